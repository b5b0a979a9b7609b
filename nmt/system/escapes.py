"""Makes text that others wrote harmless to read: in a terminal or a log, in Markdown, in HTML.

Names of files and corpora, ledgers, configs and translations may hold characters that a terminal
obeys: they colour and erase, set the window's title, reverse the direction of writing, or begin a
line that looks like one of ours. Such a character is written out, as <U+001B>. All others stay, even
invisible ones that some languages need, such as the zero-width joiner.
"""

import html
import re

# Control characters of ASCII and of Latin-1, without the tab; separators of lines and paragraphs;
# marks that reverse the direction of what follows.
OBEYED = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

# What Markdown reads as more than itself, also as the beginning of HTML or of a formula. Not an
# underscore between letters or digits, as in `d_model`, and not a `>`, which ends only what another begins.
MARKUP = re.compile(r"[\\`*{}\[\]<#|~$&]|(?<![^\W_])_|_(?![^\W_])")

# What HTML may not contain: lone surrogates and code points that are no characters, such as the last two
# of each of Unicode's planes.
ENDS_OF_PLANES = [chr(end - i) for end in range(0xFFFF, 0x110000, 0x10000) for i in (0, 1)]
NO_CHARACTER = re.compile(f"[\ud800-\udfff\ufdd0-\ufdef{''.join(ENDS_OF_PLANES)}]")


def escape_line(text: str) -> str:
    """Return `text` as one line in which nothing acts on a terminal."""
    return OBEYED.sub(lambda match: f"<U+{ord(match[0]):04X}>", text)


def escape_lines(text: str) -> str:
    """Do the same with each line of `text`."""
    return "\n".join(map(escape_line, text.split("\n")))


def escape_markdown(text: str) -> str:
    """Return Markdown that shows just this text inside a line: in a heading, in a cell of a table."""
    line = escape_line(re.sub(r"\s+", " ", text))
    encodable = line.encode(errors="backslashreplace").decode()  # without lone surrogates
    return MARKUP.sub(r"\\\g<0>", encodable)


def escape_html(text: str) -> str:
    """Return HTML that shows just this text."""
    return html.escape(NO_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", escape_line(text)))
