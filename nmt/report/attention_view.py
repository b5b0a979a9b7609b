"""The view of attention maps in a browser, and a page of its own for the translations of some lines.

`attention_view.js` draws one map into an element of any page, with `attention_view.css`. The page
made here has everything inside and may load nothing: its policy names the digests of its one script
and its one style. Maps are data, which no browser executes.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path

from nmt.data.vocab import SPACE
from nmt.system.escapes import escape_line
from nmt.translate.attention_maps import AttentionMap

# A piece of JSON inside a script element must not end it.
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif;
       background: #ffffff; color: #1d1d1b; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
.line { border-top: 1px solid #8885; padding: .5rem 0; }
.line > summary { cursor: pointer; overflow-wrap: anywhere; padding: .3rem 0; }
@media (prefers-color-scheme: dark) { body { background: #17181a; color: #ecebe7; } }
"""
# A map is drawn when its line is opened.
PAGE_SCRIPT = """
for (const line of document.querySelectorAll("details.line")) {
  const view = line.appendChild(document.createElement("div"));
  const draw = () => {
    if (!line.open || view.hasChildNodes()) return;
    nmtAttention.show(view, JSON.parse(line.querySelector("script").textContent));
  };
  line.addEventListener("toggle", draw);
  draw();
}
"""


def read_script() -> str:
    return Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


def read_style() -> str:
    return Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def render_attention_page(maps: Sequence[AttentionMap], title: str, note: str = "") -> str:
    """Make a page that shows the maps; the first one is open. `note` is a line below the title."""
    style, script = read_style() + PAGE_STYLE, read_script() + PAGE_SCRIPT
    policy = f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}"
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<h1>{_escape(title)}</h1>\n",
        "<noscript><p>The maps are drawn by this page's own script, which is switched off.</p></noscript>\n",
    ]
    if note:
        parts.append(f"<p>{_escape(note)}</p>\n")
    for number, one in enumerate(maps):
        data = json.dumps(one.to_json()).translate(ESCAPES)
        parts.append(
            f'<details class="line"{"" if number else " open"}>\n<summary><bdi>{_join(one.source)}</bdi>'
            f" → <bdi>{_join(one.target)}</bdi></summary>\n"
            f'<script type="application/json">{data}</script>\n</details>\n'
        )
    parts.append(f"<script>{script}</script>\n</body>\n</html>\n")
    return "".join(parts)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _join(pieces: Sequence[str]) -> str:
    """The text of pieces, without the end mark, as HTML."""
    return _escape("".join(pieces[:-1]).replace(SPACE, " ").strip())


def _escape(text: str) -> str:
    return html.escape(escape_line(text))
