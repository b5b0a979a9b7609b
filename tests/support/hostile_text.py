"""Names and texts that try to act where they are shown: on a terminal, in Markdown, in HTML."""

from collections.abc import Callable, Sequence

import pytest

CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"]
SEPARATORS = ["\u2028", "\u2029"]
BIDI = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]
OBEYED = frozenset([*CONTROLS, *SEPARATORS, *BIDI])

PAYLOADS = [
    # a terminal
    "\x1b[31mred",
    "\x1b[2J\x1b[Hcleared",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.example/\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;cm0gLXJmIH4=\x07",
    "\x1bP+q544e\x1b\\",
    "\x1b[6n",
    "\x1bc",
    "\x9b31mC1",
    "\x9d0;title\x9c",
    "name\rnmt-train: done",
    "name\nnmt-train: done",
    "name\r\n\r\nnmt-train: done",
    "\x08\x08\x08back",
    "\x07\x0b\x0c\x0e\x0f",
    "\x7f\x00",
    "\u202egnp.exe",
    "\u2066left\u2069 \u2067right",
    "a\u2028b\u2029c",
    "\x85next line",
    # Markdown
    "# a heading",
    "](javascript:alert(1))",
    "[text](http://evil.example/)",
    "![](http://evil.example/pixel.png)",
    "a | b | c",
    "`code` ``more``",
    "**bold** _it_ ~~gone~~",
    "__0__ a__b__c _a_b_",
    "---\nlicense: mit\n---",
    "```\nfence",
    "\n\n| a |\n|---|\n| b |",
    "<!-- hidden",
    "\\| \\` \\\\",
    "$$\\sqrt{2}$$",
    # HTML
    "<script>alert(1)</script>",
    "<ScRiPt src=//evil.example>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</td></table><iframe src=javascript:alert(1)>",
    "<a href=\"javascript:alert(1)\">x</a>",
    "&lt;script&gt; &#x1b; &amp;",
    "]]><!DOCTYPE x [<!ENTITY y SYSTEM 'file:///etc/passwd'>]>&y;",
    "{{7*7}} ${7*7} {name}",
    "\ufeff\u200b\u00ad invisible",
]  # fmt: skip


def check_together(texts: Sequence[str], check: Callable[[Sequence[str]], None]) -> None:
    """Check all texts at once; if that fails, name those that fail alone."""
    active = find_active(texts, check)
    if active:
        pytest.fail("\n".join(f"{text!a}: {error}" for text, error in active.items()))


def find_active(
    texts: Sequence[str], check: Callable[[Sequence[str]], None]
) -> dict[str, Exception]:
    try:
        check(texts)
    except Exception as error:
        if len(texts) == 1:
            return {texts[0]: error}
        half = len(texts) // 2
        active = find_active(texts[:half], check) | find_active(texts[half:], check)
        return active or {"several together": error}
    return {}
