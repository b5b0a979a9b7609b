"""Reads the lines of a stream as they come, in chunks.

However long the stream, only a chunk of it is in memory. The first chunks are small, so that output
is seen soon; later ones are large, so that sentences of similar length share a batch. A live source
is not waited for: the lines that have arrived are taken. Every line yields one, whatever its bytes:
invalid UTF-8 is reported and replaced by U+FFFD.
"""

import os
import select
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice

from nmt.corpus.text_files import decode_lines
from nmt.score.text_checks import warn_of_traces
from nmt.system.errors import UserError
from nmt.system.files import explain_unreadable
from nmt.system.progress import say

# Lines of a chunk, the first and the largest. Measured: 64 lose a quarter of the speed, more than
# 1,024 gain nothing.
FIRST_CHUNK, LARGEST_CHUNK = 32, 1_024
READ_BYTES = 1 << 16
MAX_CHUNK_BYTES, MAX_LINE_BYTES = 2 << 20, 16 << 20
PAUSE_S = 0.05  # a source that is silent for so long has nothing more at the moment
# how a compressed file begins, which is refused, and the tool for it
SIGNATURES = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"(\xb5/\xfd": "zstd", b"BZh": "bzip2"}
MAX_WARNINGS = 3  # lines that are not UTF-8, named one by one


@dataclass(frozen=True)
class Chunk:
    first: int  # number of the first line, from 1
    lines: list[str]
    share: float  # of the stream, read up to the end of the chunk; 0: unknown
    prefixes: Sequence[str] = ()  # how the translation of each must begin, if they are given

    @property
    def numbers(self) -> range:
        """The numbers of its lines."""
        return range(self.first, self.first + len(self.lines))

    def cut(self, n: int) -> "Chunk":
        """Its first `n` lines."""
        return Chunk(self.first, self.lines[:n], self.share, self.prefixes[:n])


def refuse_short(name: str, n_lines: int, n_done: int) -> None:
    """Refuse an input that has fewer lines than its output, which --resume continues."""
    if n_lines < n_done:
        raise UserError(
            f"{name}: has {n_lines:,} lines, fewer than the {n_done:,} already done; give the input that the "
            "output was made from"
        )


class LineReader:
    """The lines of the open file `handle`, which messages call `name`."""

    def __init__(self, handle: int, name: str) -> None:
        self.handle, self.name = handle, name
        status = os.fstat(handle)
        self.size = status.st_size if stat.S_ISREG(status.st_mode) else 0  # in bytes; 0: unknown
        self.n_invalid = 0  # lines that are not UTF-8
        self.record: int | None = None  # an open file, for a checksum after each line
        self.checksum = 0  # of the lines so far and, at first, of whatever it starts from

    def read_chunks(self, skip: int = 0, largest: int = LARGEST_CHUNK) -> Iterator[Chunk]:
        """Yield all lines except the first `skip`, at most `largest` at a time."""
        first, n_bytes = 1, 0
        for block in _read_blocks(self.handle, self.name, largest):
            if first == 1:
                self._check_is_text(block[0])
            if self.record is not None:
                self._note(self.record, block, first, skip)
            n_bytes += sum(map(len, block))
            if first + len(block) > skip + 1:
                n_skipped = max(0, skip + 1 - first)
                lines = self._decode(block, first)
                if first == 1:
                    warn_of_traces(self.name, lines)
                share = n_bytes / self.size if self.size else 0.0
                yield Chunk(first + n_skipped, lines[n_skipped:], share)
            first += len(block)
        refuse_short(self.name, first - 1, skip)
        if self.n_invalid > MAX_WARNINGS:
            say(f"warning: {self.name}: {self.n_invalid:,} lines are not valid UTF-8")

    def _note(self, record: int, block: list[bytes], first: int, skip: int) -> None:
        """Write the checksum after each line; refuse if after the last one to skip it was another."""
        for number, line in enumerate(block, first):
            self.checksum = zlib.crc32(line, self.checksum)
            written = self.checksum.to_bytes(4)
            if number == skip and os.pread(record, 4, 4 * skip) not in (written, b""):
                raise UserError(
                    f"{self.name}: the output so far was made from other lines, by another model or with other "
                    "settings; give the same command again, or leave --resume out to begin anew"
                )
            if number >= skip:
                os.pwrite(record, written, 4 * number)

    def _check_is_text(self, line: bytes) -> None:
        for signature, tool in SIGNATURES.items():
            is_text = tool == "bzip2" and line.isascii()  # "BZh" may begin a sentence
            if line.startswith(signature) and not is_text:
                raise UserError(
                    f"{self.name}: is compressed; decompress it first: {tool} -dc FILE | nmt-translate ..."
                )

    def _decode(self, block: list[bytes], first: int) -> list[str]:
        lines, complaints = decode_lines(block, first, self.name)
        for i, complaint in complaints.items():
            text = block[i].removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace")
            if first + i == 1:
                text = text.removeprefix("\ufeff")
            lines[i] = text
            self.n_invalid += 1
            if self.n_invalid <= MAX_WARNINGS:
                say(f"warning: {complaint}; U+FFFD was substituted")
        return lines


def _read_blocks(handle: int, name: str, largest: int) -> Iterator[list[bytes]]:
    """Whole lines, each with its end; the last line of the stream may have none."""
    ready: list[bytes] = []  # whole lines
    rest = bytearray()  # of a line whose end has not come yet
    size = FIRST_CHUNK
    n_lines = 0  # yielded
    while True:
        data = _read(handle, name)
        *ended, last = data.split(b"\n")
        if ended:
            ended[0] = bytes(rest) + ended[0]
            rest.clear()
        rest += last
        ready += [line + b"\n" for line in ended]
        if rest and not data:  # the end of the stream
            ready.append(bytes(rest))
            rest.clear()

        # full blocks, or everything so far if waiting would not help
        is_pausing = not data or not select.select([handle], [], [], PAUSE_S)[0]
        is_large = len(rest) > MAX_LINE_BYTES or sum(map(len, ready)) > MAX_CHUNK_BYTES
        while len(ready) >= size or (ready and (is_pausing or is_large)):
            block, ready = ready[:size], ready[size:]
            n_lines += len(block)
            yield block
            size = min(largest, 2 * size)
        if len(rest) > MAX_LINE_BYTES:
            raise UserError(
                f"{name}:{n_lines + 1}: is longer than {MAX_LINE_BYTES:,} bytes; "
                "give a text file with one sentence per line"
            )
        if not data:
            return


def _read(handle: int, name: str) -> bytes:
    with explain_unreadable(name):
        while True:
            with suppress(BlockingIOError):  # set not to wait, by another program that shares it
                return os.read(handle, READ_BYTES)
            select.select([handle], [], [])


@contextmanager
def open_input(path: str | None) -> Iterator[LineReader]:
    """The lines of the file `path`, or of standard input."""
    if path is None:
        yield LineReader(0, "standard input")
        return
    with explain_unreadable(path):
        handle = os.open(path, os.O_RDONLY)
    try:
        yield LineReader(handle, path)
    finally:
        os.close(handle)


def add_prefixes(chunks: Iterator[Chunk], reader: LineReader, skip: int) -> Iterator[Chunk]:
    """Chunks with the lines of another stream as their prefixes. It must have as many lines."""
    prefixes = chain.from_iterable(chunk.lines for chunk in reader.read_chunks(skip))
    n = skip  # lines of the input so far
    for chunk in chunks:
        own = list(islice(prefixes, len(chunk.lines)))
        if len(own) < len(chunk.lines):
            raise UserError(
                f"{reader.name}: ends after line {n + len(own):,}, but the input has more lines; "
                f"give one line for each input line, empty if it has no prefix"
            )
        yield replace(chunk, prefixes=own)
        n += len(own)
    if next(prefixes, None) is not None:
        raise UserError(
            f"{reader.name}: has more lines than the input ({n:,}); give exactly one line for each input line"
        )
