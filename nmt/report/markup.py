"""Writes HTML. All text that a report shows passes `escape_html`, so none of it can become markup.

The result is valid HTML. Characters that would act on a reader, such as control
characters and marks that reverse what follows, are written out, as in a terminal.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from nmt.system.escapes import escape_html
from nmt.system.tables import Html, Table, render_html

LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8}){0,3}")


Content = str | Html

# A file that begins with this tag is a report, and may be replaced by one.
GENERATOR_TAG = '<meta name="generator" content="nmt-report"/>'


def render_code(text: str) -> Html:
    return Html(f"<code>{escape_html(text)}</code>")


def render_sentence(text: Content, language: str = "") -> Html:
    """Mark text as that of a language, written in its own direction."""
    attributes = 'dir="auto"'
    if LANGUAGE.fullmatch(language):
        attributes += f' lang="{language}"'
    return Html(f"<span {attributes}>{render_html(text)}</span>")


def render_rows(rows: Sequence[tuple[Content, Content]]) -> str:
    """Write a table of names and values."""
    lines = ['<table class="rows">']
    for name, value in rows:
        lines.append(
            f'<tr><th scope="row">{render_html(name)}</th><td>{render_html(value)}</td></tr>'
        )
    return "\n".join([*lines, "</table>"])


def render_table(
    head: Sequence[Content],
    rows: Sequence[Sequence[Content]],
    caption: str = "",
    label: str = "table",
    is_stacked: bool = False,
) -> str:
    """Write a table with a head. Where it is too wide for the screen it scrolls by itself, or if it has
    sentences, its cells are stacked, each under the name of its column.
    """
    return Table(head, rows).to_html(caption, label, is_stacked)


def render_details(summary: Content, content: str, is_open: bool = False) -> str:
    """Write content that is folded up until somebody wants to see it."""
    attribute = ' open="open"' if is_open else ""
    return f"<details{attribute}><summary>{render_html(summary)}</summary>\n{content}\n</details>"


def render_data(value: Any, name: str = "") -> str:
    """Write a value as JSON that a script can read, and in which nothing ends the element."""
    text = json.dumps(value, separators=(",", ":"))  # all of it ASCII
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    attribute = f' id="{name}"' if name else ""
    return f'<script type="application/json"{attribute}>{text}</script>'


def render_attention(summary: Html, values: dict[str, Any], is_open: bool = False) -> str:
    """Write the attention behind a line as data, which attention_view.js draws when it is opened."""
    attribute = ' open="open"' if is_open else ""
    return (
        f'<details class="attention"{attribute}><summary>{summary.text}</summary>\n<div></div>\n'
        f"{render_data(values)}\n</details>"
    )


def render_document(title: str, body: Sequence[str], scripts: Sequence[str], style: str) -> str:
    """Write a whole page, which may run these scripts and use this style, and load nothing."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8"/>',
        GENERATOR_TAG,
        '<meta name="color-scheme" content="light dark"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{make_policy(scripts, style)}"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape_html(title)}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        *body,
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts)


def read_page_file(name: str) -> str:
    """Read a script or a style of this folder."""
    return files("nmt.report").joinpath(name).read_text(encoding="utf-8")


def make_policy(scripts: Sequence[str], style: str) -> str:
    """Allow these scripts and this style, by their digests, and nothing else."""
    allowed = " ".join(map(_make_digest, scripts)) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_make_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _make_digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
