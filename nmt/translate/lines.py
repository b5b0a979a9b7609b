"""Lines of a stream: read as they come, so many at a time; and long ones in parts.

However long the stream, only a chunk of it is in memory. The first chunks are small, so that output is seen soon; later
ones are large, so that sentences of like length meet. A live source is not waited for: what is there is taken. Every
line gives one, whatever its bytes: what is not UTF-8 is told and replaced by U+FFFD.
"""

import os
import re
import select
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nmt.corpus.text_files import decode_lines
from nmt.data.vocab import SPACE
from nmt.system.errors import UserError
from nmt.system.progress import say

FIRST, LARGEST = (
    32,
    1_024,
)  # lines of a chunk; measured: 64 lose a quarter of the speed, more than 1,024 gain none
BUFFER, CHUNK_BYTES, LINE_BYTES = 1 << 16, 2 << 20, 16 << 20
PAUSE_S = 0.05  # a source that is silent for so long has no more for the moment
TOLD = 3  # lines that are not UTF-8 and named each


@dataclass(frozen=True)
class Chunk:
    first: int  # number of the first line, from 1
    lines: list[str]
    n_bytes: int  # of the stream, up to its end
    prefixes: list[str] | None = None  # how the translation of each must begin


class Lines:
    """The lines of the open file `handle`, which messages call `name`."""

    def __init__(self, handle: int, name: str) -> None:
        self.handle, self.name = handle, name
        self.n_bad = 0

    def chunks(self, skip: int = 0, largest: int = LARGEST) -> Iterator[Chunk]:
        """All lines but the first `skip`, at most `largest` at a time."""
        first, n_bytes = 1, 0
        for block in _blocks(self.handle, self.name, largest):
            n_bytes += sum(map(len, block))
            if first + len(block) > skip + 1:
                lines = self._decoded(block, first)
                rest = max(0, skip + 1 - first)
                yield Chunk(first + rest, lines[rest:], n_bytes)
            first += len(block)
        if first <= skip:
            raise UserError(
                f"{self.name}: has {first - 1:,} lines, fewer than the {skip:,} that are done; give the "
                "input that the output is of"
            )
        if self.n_bad > TOLD:
            say(f"warning: {self.name}: {self.n_bad:,} lines are not valid UTF-8")

    def _decoded(self, block: list[bytes], first: int) -> list[str]:
        lines, bad = decode_lines(block, first, self.name)
        for i, complaint in bad.items():
            text = block[i].removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace")
            lines[i] = text.removeprefix("\ufeff") if first + i == 1 else text
            self.n_bad += 1
            if self.n_bad <= TOLD:
                say(f"warning: {complaint}; until then U+FFFD stands there")
        return lines


def _blocks(handle: int, name: str, largest: int) -> Iterator[list[bytes]]:
    """Whole lines, each with its end; the last may have none."""
    ready: list[bytes] = []
    rest: list[bytes] = []  # of a line whose end has not come yet
    size, n_ready, n_rest, n = FIRST, 0, 0, 0
    while data := _read(handle, name):
        *ended, last = data.split(b"\n")
        if ended:
            ended[0] = b"".join((*rest, ended[0]))
            rest, n_rest = [], 0
            ready.extend(line + b"\n" for line in ended)
            n_ready += sum(map(len, ended))
        if last:
            rest.append(last)
            n_rest += len(last)
        is_pausing = not select.select([handle], [], [], PAUSE_S)[0]
        while len(ready) >= size or (
            ready and (is_pausing or n_ready > CHUNK_BYTES or n_rest > LINE_BYTES)
        ):
            block, ready = ready[:size], ready[size:]
            n_ready, n = sum(map(len, ready)), n + len(block)
            yield block
            size = min(largest, 2 * size)
        if n_rest > LINE_BYTES:
            raise UserError(
                f"{name}:{n + 1}: more than {LINE_BYTES:,} bytes without a line end; is it text?"
            )
    ready.extend([b"".join(rest)] if rest else [])
    while ready:
        yield ready[:size]
        ready, size = ready[size:], min(largest, 2 * size)


def _read(handle: int, name: str) -> bytes:
    try:
        return os.read(handle, BUFFER)
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None


@contextmanager
def opened_source(path: str | None) -> Iterator[Lines]:
    """The file `path`, or standard input."""
    if path is None:
        yield Lines(0, "standard input")
        return
    if path.endswith((".gz", ".xz", ".zst", ".bz2")):
        raise UserError(
            f"{path}: is packed; give its text, such as gzip -dc {path} | nmt-translate ..."
        )
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        yield Lines(handle, path)
    finally:
        os.close(handle)


def size_of_source(source: Lines) -> int | None:
    """Its bytes, where that can be known."""
    status = os.fstat(source.handle)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def with_prefixes(chunks: Iterator[Chunk], prefixes: Lines, skip: int = 0) -> Iterator[Chunk]:
    """Chunks with the lines of another stream beside theirs, of which there must be as many."""
    waiting: list[str] = []  # of the others
    others = prefixes.chunks(skip)
    n = skip
    for chunk in chunks:
        other: Chunk | None
        while len(waiting) < len(chunk.lines) and (other := next(others, None)) is not None:
            waiting.extend(other.lines)
        n = chunk.first + len(chunk.lines) - 1
        if len(waiting) < len(chunk.lines):
            raise UserError(
                f"{prefixes.name}: ends after {n - len(chunk.lines) + len(waiting):,} lines, the input has "
                "more; give a line for each line of it, empty where nothing is forced"
            )
        yield replace(chunk, prefixes=waiting[: len(chunk.lines)])
        del waiting[: len(chunk.lines)]
    if waiting or next(others, None) is not None:
        raise UserError(
            f"{prefixes.name}: has more lines than the input, which has {n:,}; give a line for each of it"
        )


ENDS = "\"'”’»)]"
SENTENCE_END = re.compile(rf"[.!?…؟۔।][{re.escape(ENDS)}]*$")
CLAUSE_END = re.compile(rf"[,;:،؛–—][{re.escape(ENDS)}]*$")


def split(pieces: Sequence[str], longest: int) -> list[range]:
    """Parts of at most `longest` pieces, of like size: they end where a sentence does, else a clause, else a word, else
    anywhere."""
    parts = []
    start, n = 0, len(pieces)
    while n - start > longest:
        aim = -(
            -(n - start) // -(-(n - start) // longest)
        )  # if all that are needed were of one size
        places = range(start + max(1, aim // 2), start + longest + 1)
        end = max(places, key=lambda place: (_worth(pieces, place), -abs(place - start - aim)))
        parts.append(range(start, end))
        start = end
    return [*parts, range(start, n)]


def _worth(pieces: Sequence[str], place: int) -> int:
    """How good it is to part before piece `place`."""
    before = "".join(pieces[max(0, place - 3) : place])
    if pieces[place].startswith(SPACE):
        return 3 if SENTENCE_END.search(before) else 2 if CLAUSE_END.search(before) else 1
    return (
        3
        if before.endswith(("。", "！", "？"))
        else 2
        if before.endswith(("，", "、", "；", "："))
        else 0
    )


def keep_whole_lines(path: str) -> int:
    """How many lines the file has, once what stands behind its last line end is cut off."""
    n = end = 0
    with open(path, "rb+") as file:
        while block := file.read(1 << 20):
            if b"\n" in block:
                n += block.count(b"\n")
                end = file.tell() - len(block) + block.rindex(b"\n") + 1
        file.truncate(end)
    return n
