"""What `nmt-translate --attention FILE` writes: a page, an image or JSON, by the suffix of FILE.

The file appears when the last line is translated, complete or not at all. JSON is an object for each
line, of any number of lines. A page has the first lines and an image the first line, and a message
says so if there are more.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from nmt.data.vocab import SPACE
from nmt.report.attention_view import render_attention_page
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import check_not_ours, check_writable, replace_file
from nmt.system.progress import say
from nmt.translate.attention_maps import AttentionMap
from nmt.translate.translator import TextToText, Translation

MAX_PAGE_LINES = 50
MAX_PAGE_WEIGHTS = 20_000_000  # 27 MB
MAX_IMAGE_PIECES = 250
NO_ATTENTION: dict[str, Any] = {"source": [], "target": [], "alignment": [], "attention": {}}


@contextmanager
def open_attention_file(path: Path, title: str) -> Iterator["AttentionFile"]:
    """Check now that the file can be written; it is, unless what follows fails."""
    check_writable(path)
    check_not_ours(path)
    if path.suffix == ".png":
        import_vl_convert()
    with replace_file(path) as file:
        written = AttentionFile(path, title, file)
        yield written
        written.finish()


class AttentionFile:
    def __init__(self, path: Path, title: str, file: BinaryIO) -> None:
        self.path, self.title, self.file = path, title, file
        self.n_lines = 0
        self.n_weights = 0
        self.n_shown: int | None = None  # lines, once no more fit
        self.maps: list[AttentionMap] = []

    def add(
        self, translator: TextToText, lines: Sequence[str], translations: Sequence[Translation]
    ) -> None:
        """Take the attention of the next lines."""
        if self.n_shown is not None:
            self.n_lines += len(lines)
            return
        for number, one in enumerate(translator.map_attention(lines, translations), 1):
            if not self._take(one, self.n_lines + number):
                self.n_shown = self.n_lines + number - 1
                break
        self.n_lines += len(lines)

    def _take(self, one: AttentionMap | None, number: int) -> bool:
        """Take a line's map; False if it does not fit."""
        if self.path.suffix == ".json":
            fields = NO_ATTENTION if one is None else one.to_json()
            self.file.write(json.dumps({"line": number} | fields).encode() + b"\n")
            return True
        if one is None:
            return True
        if self.path.suffix == ".png":
            if self.maps:
                return False
            self.maps.append(one.average_alignment_layer())
            return True
        self.n_weights += sum(kind.size for kind in one.list_kinds().values())
        if len(self.maps) == MAX_PAGE_LINES or self.n_weights > MAX_PAGE_WEIGHTS:
            return False
        self.maps.append(one)
        return True

    def finish(self) -> None:
        note = ""
        if self.n_shown is not None:
            note = f"the first {self.n_shown:,} of {self.n_lines:,} lines"
            say(f"{self.path}: shows {note}; --attention FILE.json has them all")
        if self.path.suffix == ".html":
            self.file.write(render_attention_page(self.maps, self.title, note).encode())
        elif self.path.suffix == ".png":
            if not self.maps:
                raise UserError(f"{self.path}: no line of the input has anything to show")
            self.file.write(draw_attention_image(self.maps[0]))


def import_vl_convert() -> Any:
    """Import what draws images: it finds a font for each script and shapes the text of all."""
    try:
        import vl_convert
    except ImportError:
        raise UserError("vl-convert is not installed; pip install '.[report]'") from None
    return vl_convert


def draw_attention_image(one: AttentionMap) -> bytes:
    """Draw the first head of the first layer of the memory attention as a PNG."""
    weights = one.memory[0, 0]
    if max(weights.shape) > MAX_IMAGE_PIECES:
        raise UserError(
            f"an image has room for {MAX_IMAGE_PIECES} pieces, and the line has {max(weights.shape):,}; "
            "give --attention FILE.html"
        )
    cells = []
    for row, of_row in enumerate(weights.tolist()):
        cells += [{"t": row, "s": column, "w": weight} for column, weight in enumerate(of_row)]

    def make_axis(pieces: list[str], orient: str) -> dict[str, Any]:
        # few fonts have the sign for a space, and another font would be taken for the whole piece
        texts = json.dumps([escape_line(piece).replace(SPACE, "_") for piece in pieces])
        plain = {"domain": False, "ticks": False, "title": None, "labelLimit": 140}
        return plain | {"orient": orient, "labelExpr": f"{texts}[datum.value]"}

    across = make_axis(one.source, "top") | {"labelAngle": -90}
    spec = {
        "data": {"values": cells},
        "mark": {"type": "rect", "stroke": "white", "strokeWidth": 1},
        "width": {"step": 20},
        "height": {"step": 20},
        "encoding": {
            "x": {"field": "s", "type": "ordinal", "axis": across},
            "y": {"field": "t", "type": "ordinal", "axis": make_axis(one.target, "left")},
            "color": {
                "field": "w",
                "type": "quantitative",
                "scale": {"domainMin": 0, "range": ["#f1f3f6", "#2c7ae8"]},
                "legend": {"title": None, "format": ".0%"},
            },
        },
        "config": {
            "font": "sans-serif",
            "axis": {"labelFontSize": 13},
            "view": {"stroke": None},
        },
    }
    scale = 2 if max(weights.shape) <= 60 else 1
    return bytes(import_vl_convert().vegalite_to_png(spec, scale=scale))
