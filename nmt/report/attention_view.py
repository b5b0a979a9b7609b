"""The view of attention maps in a browser, and a page of its own for the translations of some lines.

`attention_view.js` draws one map into an element of any page, with `attention_view.css`. The page
made here has everything inside and may load nothing: its policy names the digests of its one script
and its one style. Maps are data, which no browser executes.
"""

from collections.abc import Sequence
from pathlib import Path

from nmt.data.vocab import SPACE
from nmt.report.markup import escape_text, make_policy, render_data
from nmt.translate.attention_maps import AttentionMap

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
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{make_policy([script], style)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape_text(title)}</h1>\n",
        "<noscript><p>The maps are drawn by this page's own script, which is switched off.</p></noscript>\n",
    ]
    if note:
        parts.append(f"<p>{escape_text(note)}</p>\n")
    for number, one in enumerate(maps):
        parts.append(
            f'<details class="line"{"" if number else " open"}>\n<summary><bdi>{_join(one.source)}</bdi>'
            f" → <bdi>{_join(one.target)}</bdi></summary>\n"
            f"{render_data(one.to_json())}\n</details>\n"
        )
    parts.append(f"<script>{script}</script>\n</body>\n</html>\n")
    return "".join(parts)


def _join(pieces: Sequence[str]) -> str:
    """The text of pieces, without the end mark, as HTML."""
    return escape_text("".join(pieces[:-1]).replace(SPACE, " ").strip())
