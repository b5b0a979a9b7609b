"""Lines from bytes: of a file, of a packed file, of a member of an archive, many at a time and none on disk.

A line ends with `\\n` and nothing else: Python's own line ends (U+2028, U+0085, VT, FF, a lone CR) occur inside
sentences of real corpora and would shift one side against the other. A packed file and the archive around a member
are read to their very end, for there stands the checksum. A block is decoded as a whole; only where that fails is
the culprit looked for.
"""

import contextlib
import difflib
import gzip
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from nmt.system.errors import UserError

BUFFER = 1 << 16
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)
Complaints = dict[int, str]  # about lines of a block, by their place in it


@dataclass(frozen=True)
class TextFile:
    """A file of lines: `path`, or the member of that name of the archive `path`."""

    path: Path
    member: str | None = None

    @property
    def name(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"


def read_raw(text: TextFile, size: int) -> Iterator[tuple[list[bytes], float]]:
    """Blocks of `size` lines as they lie, and the share of the bytes read by then. An empty file is refused."""
    n = 0
    lines: list[bytes] = []
    try:
        with _opened(text) as (file, packed, n_bytes):
            while True:
                lines = []
                lines.extend(islice(file, size))  # keeps what comes before an error
                if not lines:
                    break
                yield lines, min(1.0, _place(packed) / max(1, n_bytes))
                n += len(lines)
    except DAMAGE as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"{text.name}: cannot be read ({error.strerror})") from None
        raise UserError(
            f"{text.name}: corrupt after line {n + len(lines)} ({reason(error)}); fetch or pack it again"
        ) from None
    if n == 0:
        raise UserError(f"{text.name}: empty; it should hold one sentence per line")


def _place(packed: IO[bytes]) -> int:
    """How much of it has been read; of a pipe nobody knows."""
    try:
        return packed.tell()
    except OSError:
        return 0


def read_lines(text: TextFile) -> Iterator[str]:
    """Its lines; the first that is not UTF-8 stops the reading."""
    first = 1
    for lines, _ in read_raw(text, 4096):
        texts, bad = decode(lines, first, text.name)
        if bad:
            raise UserError(bad[min(bad)])
        yield from texts
        first += len(lines)


def decode(lines: list[bytes], first: int, name: str) -> tuple[list[str], Complaints]:
    """The texts of a block that begins at line `first`; where one is not UTF-8, nothing and a complaint.

    One CR before the end of a line is dropped, and a byte order mark at the start of the file.
    """
    bad: Complaints = {}
    try:
        text = b"".join(lines).decode()
    except UnicodeDecodeError:
        for i, line in enumerate(lines):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                bad[i] = (
                    f"{name}:{first + i}:{error.start + 1}: byte 0x{line[error.start]:02x} is not valid UTF-8; "
                    "convert the file to UTF-8"
                )
        text = b"".join(b"\n" if i in bad else line for i, line in enumerate(lines)).decode()
    if not text.endswith("\n"):
        text += "\n"
    if first == 1:
        text = text.removeprefix("\ufeff")
    texts = text.replace("\r\n", "\n").split("\n")
    texts.pop()
    return texts, bad


def decoded(file: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a stream, each as soon as it comes; the first bad one stops it."""
    for n, line in enumerate(file, 1):
        texts, bad = decode([line], n, name)
        if bad:
            raise UserError(bad[0])
        yield texts[0]


def reason(error: BaseException) -> str:
    """What a foreign library says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _opened(text: TextFile) -> Iterator[tuple[IO[bytes], IO[bytes], int]]:
    """The unpacked stream of a text, the packed one behind it, and the bytes of that."""
    with open(text.path, "rb", BUFFER) as raw:
        outer = _unpacked(raw, text.path.name)
        if text.member is None:
            yield outer, raw, os.fstat(raw.fileno()).st_size
            return
        with tarfile.open(fileobj=outer, mode="r|") as archive:
            member = _find(archive, text)
            packed = cast(
                IO[bytes], BufferedReader(cast(BufferedReader, archive.extractfile(member)), BUFFER)
            )
            yield _unpacked(packed, text.member), packed, member.size
        while outer.read(BUFFER):
            pass


def _unpacked(packed: IO[bytes], name: str) -> IO[bytes]:
    raw: object
    if name.endswith((".gz", ".tgz")):
        raw = gzip.GzipFile(fileobj=packed)
    elif name.endswith((".xz", ".txz")):
        raw = _Xz(packed)
    elif name.endswith(".zst"):
        import pyarrow

        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, mode="r"), "zstd")
    else:
        return packed
    return cast(IO[bytes], BufferedReader(cast(BufferedReader, raw), BUFFER))


class _Xz(RawIOBase):
    """What `lzma.LZMAFile` gives, which takes a damaged second part of a joined file for its end."""

    def __init__(self, packed: IO[bytes]) -> None:
        self.packed, self.part = packed, lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self.part.eof:
                packed = self.part.unused_data.lstrip(b"\0") or self.packed.read(BUFFER).lstrip(
                    b"\0"
                )
                if not packed:
                    return 0
                self.part = lzma.LZMADecompressor()
            else:
                packed = self.packed.read(BUFFER) if self.part.needs_input else b""
                if self.part.needs_input and not packed:
                    raise EOFError("it ends too early")
            unpacked = self.part.decompress(packed, len(buffer))
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)


def _find(archive: tarfile.TarFile, text: TextFile) -> tarfile.TarInfo:
    names = []
    for member in archive:
        if member.isfile():
            names.append(member.name.removeprefix("./"))
            if names[-1] == str(text.member).removeprefix("./"):
                return member
    close = difflib.get_close_matches(str(text.member), names, 3) or names[:3]
    raise UserError(
        f"{text.path}: no file {text.member!r} among its {len(names)}; "
        f"it has {', '.join(map(repr, close)) or 'none'}"
    )
