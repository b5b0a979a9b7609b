"""A page for the attention of some lines. Like a report, it is self-contained and may load nothing.

Maps are data, which no browser executes; `attention_view.js` draws each when it is opened.
"""

from collections.abc import Sequence

from nmt.data.vocab import SPACE
from nmt.extras.maps.attention_maps import AttentionMap
from nmt.extras.report.markup import (
    read_page_file,
    render_data,
    render_details,
    render_document,
    render_sentence,
)
from nmt.system.escapes import escape_html
from nmt.system.tables import Html


def render_attention_page(maps: Sequence[AttentionMap], title: str, note: str = "") -> str:
    """Make a page that shows the maps; the first one is open. `note` is a line below the title."""
    body = [f"<header><h1>{escape_html(title)}</h1><p>{escape_html(note)}</p></header>", "<main>"]
    body.append(
        "<noscript><p>The maps are drawn by a script, but scripts are switched off.</p></noscript>"
    )
    for number, attention in enumerate(maps):
        summary = Html(f"{_join_pieces(attention.source)} → {_join_pieces(attention.target)}")
        content = f"<div></div>\n{render_data(attention.to_json())}"
        body.append(render_details(summary, content, is_open=number == 0, kind="attention"))
    body.append("</main>")
    style = read_page_file("page.css") + read_page_file("attention_view.css")
    return render_document(title, body, [read_page_file("attention_view.js")], style)


def _join_pieces(pieces: Sequence[str]) -> str:
    """The text of pieces, without the end mark, as HTML."""
    return render_sentence("".join(pieces[:-1]).replace(SPACE, " ").strip()).text
