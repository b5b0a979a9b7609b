"""Writes HTML. All text that a report shows passes `escape_html`, so none of it can become markup.

The result is valid HTML. Characters that would act on a reader, such as control
characters and marks that reverse what follows, are written out, as in a terminal.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from nmt.system.escapes import escape_html
from nmt.system.tables import Cell, Html, Table, render_html

LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8}){0,3}")
# A file that begins with this tag is a report, and may be replaced by one.
GENERATOR_TAG = '<meta name="generator" content="nmt-report"/>'


def render_sentence(text: Cell, language: str = "") -> Html:
    """Mark text as that of a language, written in its own direction."""
    attributes = 'dir="auto"'
    if LANGUAGE.fullmatch(language):
        attributes += f' lang="{language}"'
    return Html(f"<span {attributes}>{render_html(text)}</span>")


def render_rows(rows: Iterable[tuple[str, Cell]]) -> str:
    """Write a table of names and values; nothing without rows."""
    lines = []
    for name, value in rows:
        cells = f'<th scope="row">{escape_html(name)}</th><td>{render_html(value)}</td>'
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join(['<table class="rows">', *lines, "</table>"]) if lines else ""


def render_stacked(head: Sequence[Cell], rows: Iterable[Sequence[Cell]], label: str) -> str:
    """Write a table that puts its cells below each other on a narrow screen; nothing without rows."""
    rows_as_list = list(rows)
    return Table(head, rows_as_list).to_html(label=label, is_stacked=True) if rows_as_list else ""


def render_details(summary: Cell, content: str, is_open: bool = False, kind: str = "") -> str:
    """Write content that is folded up until a reader opens it."""
    attributes = f' class="{kind}"' if kind else ""
    attributes += ' open="open"' if is_open else ""
    return f"<details{attributes}><summary>{render_html(summary)}</summary>\n{content}\n</details>"


def render_data(value: Any, name: str = "") -> str:
    """Write a value as JSON that a script can read, and in which nothing ends the element."""
    text = json.dumps(value, separators=(",", ":"))  # all of it ASCII
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    attribute = f' id="{name}"' if name else ""
    return f'<script type="application/json"{attribute}>{text}</script>'


def render_document(title: str, body: Sequence[str], scripts: Sequence[str], style: str) -> str:
    """Write a whole page, which may run these scripts and use this style, and load nothing."""
    allowed = " ".join(map(_make_digest, scripts)) or "'none'"
    elements = [f"<script>{script}</script>" for script in scripts]
    return Template(read_page_file("page.html")).substitute(
        generator=GENERATOR_TAG,
        policy=f"script-src {allowed}; style-src {_make_digest(style)}",
        title=escape_html(title),
        style=style,
        body="\n".join([*body, *elements]),
    )


def read_page_file(name: str) -> str:
    """Read a script, a style or a template of this folder."""
    return files("nmt.extras.report").joinpath(name).read_text(encoding="utf-8")


def _make_digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
