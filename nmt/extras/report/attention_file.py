"""What `nmt-translate --attention FILE` writes: a page or JSON, by the suffix of FILE.

The file appears when the last line is translated, complete or not at all. JSON is an object for each
line, of any number of lines. A page has the first lines, and a message says so if there are more.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from nmt.extras.maps.attention_maps import AttentionMap, map_attention
from nmt.extras.report.attention_view import render_attention_page
from nmt.system.files import check_writable, refuse_run_file, replace_file
from nmt.system.progress import say
from nmt.system.strict_json import Fields
from nmt.translate.translator import TextToText, Translation

MAX_PAGE_LINES = 50
MAX_PAGE_WEIGHTS = 20_000_000  # 27 MB
NO_ATTENTION: Fields = {"source": [], "target": [], "alignment": [], "attention": {}}


@contextmanager
def open_attention_file(path: Path, title: str) -> Iterator["AttentionFile"]:
    """Check now that the file can be written; it is written unless the block fails."""
    check_writable(path)
    refuse_run_file(path)
    with replace_file(path) as file:
        written = AttentionFile(path, title, file)
        yield written
        written.finish()


@dataclass
class AttentionFile:
    path: Path
    title: str
    file: BinaryIO
    n_lines: int = 0
    n_weights: int = 0
    n_shown: int | None = None  # lines, once no more fit
    maps: list[AttentionMap] = field(default_factory=list)  # of a page

    @property
    def is_page(self) -> bool:
        return self.path.suffix == ".html"

    def add(
        self, translator: TextToText, lines: Sequence[str], translations: Sequence[Translation]
    ) -> None:
        """Take the attention of the next lines."""
        first = self.n_lines + 1
        self.n_lines += len(lines)
        if self.n_shown is not None:
            return
        for number, attention in enumerate(map_attention(translator, lines, translations), first):
            if not self.is_page:
                fields = NO_ATTENTION if attention is None else attention.to_json()
                self.file.write(json.dumps({"line": number} | fields).encode() + b"\n")
            elif attention is not None and not self._take(attention):
                self.n_shown = number - 1
                return

    def _take(self, attention: AttentionMap) -> bool:
        """Take a map for the page; False if it does not fit."""
        self.n_weights += sum(kind.size for kind in attention.kinds.values())
        if len(self.maps) == MAX_PAGE_LINES or self.n_weights > MAX_PAGE_WEIGHTS:
            return False
        self.maps.append(attention)
        return True

    def finish(self) -> None:
        if not self.is_page:
            return
        note = ""
        if self.n_shown is not None:
            note = f"the first {self.n_shown:,} of {self.n_lines:,} lines"
            say(f"{self.path}: shows {note}; --attention FILE.json has them all")
        self.file.write(render_attention_page(self.maps, self.title, note).encode())
