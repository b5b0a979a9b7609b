"""The messages that docs/troubleshooting.md quotes are those of the code."""

import ast
import re
from collections.abc import Iterator

from support.checkout import ROOT

OF_ARGPARSE = "unrecognized arguments:"


def list_texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a file, each whole; what is filled in is `...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            ]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_quoted_messages_are_those_of_the_code() -> None:
    files = ROOT.glob("nmt/**/*.py")
    known = "\n".join(text for file in files for text in list_texts(ast.parse(file.read_text())))
    page = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
    quoted = [
        text for text in re.findall(r"`([^`]+)`", page) if "..." in text or len(text.split()) > 3
    ]
    messages = [
        text for text in quoted if not text.startswith(("nmt-", "training.")) and text != "..."
    ]
    assert len(messages) > 15
    parts = [part.strip() for text in messages for part in text.split("...")]
    assert [part for part in parts if part not in known and part != OF_ARGPARSE] == []
