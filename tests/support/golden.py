"""Whole outputs, compared with the files of tests/golden: what people read is read there, by whoever
changes it. `UPDATE_GOLDEN=1 .venv/bin/pytest -k golden` writes all of them anew.
"""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence

import pytest

from support.checkout import TESTS

GOLDEN = TESTS / "golden"


def check_golden(name: str, outputs: Mapping[str, str]) -> None:
    """Compare the outputs, each under its name, with tests/golden/`name`."""
    path = GOLDEN / name
    text = format_outputs(outputs)
    if "UPDATE_GOLDEN" in os.environ:
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        lines = expected.splitlines(), text.splitlines()
        difference = difflib.unified_diff(*lines, f"tests/golden/{name}", "now", n=2, lineterm="")
        remedy = "if it is meant to differ: UPDATE_GOLDEN=1 .venv/bin/pytest -k golden"
        pytest.fail("\n".join([*difference, remedy]), pytrace=False)


def format_outputs(outputs: Mapping[str, str]) -> str:
    """Show an output whole, or, if it is called `ANOTHER: WHAT DIFFERS`, what differs from ANOTHER, if anything."""
    shown = []
    for name, text in outputs.items():
        usual, _, change = name.partition(": ")
        lines = text.splitlines()
        if change:
            lines = list(list_changes(outputs[usual].splitlines(), lines))
        if lines:
            shown += [f"==== {name}", *lines, ""]
    return "\n".join(shown)


def list_changes(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """The lines that are gone (-), new (+), or in the place of as many others (~)."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for _, i, i_end, j, j_end in matcher.get_opcodes():
        if before[i:i_end] == after[j:j_end]:
            continue
        if i_end - i == j_end - j:
            yield from (f"~{line}" for line in after[j:j_end])
        else:
            yield from (f"-{line}" for line in before[i:i_end])
            yield from (f"+{line}" for line in after[j:j_end])
