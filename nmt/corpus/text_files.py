"""Lines from bytes: of a file, a compressed file, a member of an archive, many at a time and none
on disk.

A line ends with `\\n` and nothing else: Python's other line ends (U+2028, U+0085, VT, FF, a lone
CR) occur inside sentences of real corpora and would shift one side against the other. A compressed
file and the archive around a member are read to their very end, because the checksum is there.
"""

import bz2
import codecs
import contextlib
import difflib
import functools
import gzip
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from nmt.system.errors import UserError, describe_error
from nmt.system.extras import import_extra
from nmt.system.files import digest_content, read_file_stamp
from nmt.system.progress import say_once

BUFFER_BYTES = 1 << 16
UTF_16_MARKS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE  # the first is also how UTF-32's begins
# Every second byte of Latin text in UTF-16 is NUL. A text may have a few, and a compressed file more.
FEW_NULLS, NULL_SHARE = 3, 0.25
LINES_AT_ONCE = 4096  # that `read_lines` holds
DAMAGE = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,  # a method of compression that zipfile does not know
)
ENCRYPTED = 1  # the bit of a zip member's flags
TextPair = tuple[str, str]  # a source and its translation
LinesOfSides = tuple[list[bytes], list[bytes]]  # undecoded lines of the source, and of the target
Complaints = dict[int, str]  # about lines of a block, by their place in it


@dataclass(frozen=True)
class TextFile:
    """A file of lines: `path`, or the member of that name of the archive `path`."""

    path: Path
    member: str | None = None

    @property
    def name(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"


def read_line_blocks(text: TextFile, size: int) -> Iterator[tuple[list[bytes], float]]:
    """Blocks of `size` undecoded lines, and the share of the bytes read by then. An empty file is
    refused.
    """
    n = 0
    lines: list[bytes] = []
    try:
        with _open_text(text) as (file, compressed, n_bytes):
            while True:
                lines = []
                lines.extend(islice(file, size))  # keeps what comes before an error
                if not lines:
                    break
                yield lines, _find_share(compressed, n_bytes)
                n += len(lines)
    except MemoryError:
        raise UserError(
            f"{text.name}: line {n + len(lines) + 1} does not fit into memory; is it a text, with "
            "one sentence per line?"
        ) from None
    except DAMAGE as error:
        raise _explain_damage(text, error, f" after line {n + len(lines)}") from None
    if n == 0:
        raise UserError(f"{text.name}: is empty; it should hold one sentence per line")


def read_byte_blocks(text: TextFile) -> Iterator[tuple[bytes, float]]:
    """Blocks of bytes that are not lines, and the share of the bytes read by then."""
    try:
        with _open_text(text) as (file, compressed, n_bytes):
            while block := file.read(BUFFER_BYTES):
                yield block, _find_share(compressed, n_bytes)
    except DAMAGE as error:
        raise _explain_damage(text, error) from None


def _explain_damage(text: TextFile, error: Exception, where: str = "") -> UserError:
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{text.name}: cannot be read ({error.strerror})")
    return UserError(
        f"{text.name}: is corrupt{where} ({describe_error(error)}); download or compress it again"
    )


def _find_share(file: IO[bytes], n_bytes: int) -> float:
    """How much of it has been read; 0 for a pipe, where it is unknown."""
    try:
        return min(1.0, file.tell() / max(1, n_bytes))
    except OSError:
        return 0.0


def read_lines(text: TextFile) -> Iterator[str]:
    """Its lines; the first that is not UTF-8 stops the reading."""
    first = 1
    for lines, _ in read_line_blocks(text, LINES_AT_ONCE):
        texts, bad = decode_lines(lines, first, text.name)
        if bad:
            raise UserError(bad[min(bad)])
        yield from texts
        first += len(lines)


def decode_lines(lines: list[bytes], first: int, name: str) -> tuple[list[str], Complaints]:
    """The texts of a block that begins at line `first`; for one that is not UTF-8, an empty text
    and a complaint.

    One CR before the end of a line is dropped, and a byte order mark at the start of the file.
    """
    if first == 1:
        check_encoding(lines, name)
    texts = []
    bad: Complaints = {}
    for i, line in enumerate(lines):
        try:
            texts.append(line.decode().removesuffix("\n").removesuffix("\r"))
        except UnicodeDecodeError as error:
            texts.append("")
            bad[i] = (
                f"{name}:{first + i}:{error.start + 1}: byte 0x{line[error.start]:02x} is not valid UTF-8; "
                "convert the file to UTF-8"
            )
    if first == 1 and texts:
        texts[0] = texts[0].removeprefix("\ufeff")
    return texts, bad


def check_encoding(lines: list[bytes], name: str) -> None:
    """Refuse UTF-16 and UTF-32, most of which is valid UTF-8 with many NULs, by the first lines of a text;
    warn once if CRs seem to end its lines.
    """
    start = b"".join(lines)
    n_nulls = start.count(0)
    if start.startswith(UTF_16_MARKS) or n_nulls > max(FEW_NULLS, NULL_SHARE * len(start)):
        raise UserError(
            f"{name}:1: is UTF-16 or UTF-32; convert it to UTF-8: iconv -f UTF-16 -t UTF-8 FILE"
        )
    if start.startswith(b"\x1f\x8b"):
        raise UserError(f"{name}:1: is compressed by gzip; give it a name that ends in .gz")
    n_single = start.count(b"\r") - start.count(b"\r\n")
    if n_single > len(lines):
        say_once(
            f"warning: {name}:1: has {n_single:,} carriage returns in {len(lines):,} lines; if they end "
            "lines, convert them: tr '\\r' '\\n'"
        )


def digest_source(path: Path) -> str:
    """Compute the sha256 of a corpus file, which may be a link, once per process."""
    return _digest_unchanged(path, *read_file_stamp(path))


@functools.cache
def _digest_unchanged(path: Path, *stamp: int) -> str:
    with open(path, "rb") as file:
        return digest_content(file)


# ---- compressed files and archives ------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_text(text: TextFile) -> Iterator[tuple[IO[bytes], IO[bytes], int]]:
    """The decompressed stream of a text, the compressed one behind it, and the bytes of that."""
    with open(text.path, "rb", BUFFER_BYTES) as raw:
        if text.member is not None and text.path.suffix == ".zip":
            unzipped, n_bytes = _open_zipped(raw, text)
            with unzipped:
                yield _decompress(unzipped, text.member), unzipped, n_bytes
            return
        outer = _decompress(raw, text.path.name)
        if text.member is None:
            yield outer, raw, os.fstat(raw.fileno()).st_size
            return
        with tarfile.open(fileobj=outer, mode="r|") as archive:
            member = _find_member(archive, text)
            compressed = _buffer(archive.extractfile(member))
            yield _decompress(compressed, text.member), compressed, member.size
        # to the checksum behind the last member
        while outer.read(BUFFER_BYTES):
            pass


def _decompress(compressed: IO[bytes], name: str) -> IO[bytes]:
    if name.endswith((".gz", ".tgz")):
        return _buffer(gzip.GzipFile(fileobj=compressed))
    if name.endswith((".xz", ".txz")):
        return _buffer(_JoinedFile(compressed, lzma.LZMADecompressor))
    if name.endswith((".bz2", ".tbz2")):
        return _buffer(_JoinedFile(compressed, bz2.BZ2Decompressor))
    if name.endswith(".zst"):
        pyarrow = import_extra("pyarrow")
        file = pyarrow.PythonFile(compressed, mode="r")
        return _buffer(pyarrow.CompressedInputStream(file, "zstd"))
    return compressed


def _buffer(raw: object) -> IO[bytes]:
    return cast(IO[bytes], BufferedReader(cast(RawIOBase, raw), BUFFER_BYTES))


Decompressor = lzma.LZMADecompressor | bz2.BZ2Decompressor


class _JoinedFile(RawIOBase):
    """Like `lzma.LZMAFile` and `bz2.BZ2File`, which take a damaged second part of a joined file for
    its end.
    """

    def __init__(
        self, compressed: IO[bytes], make_decompressor: Callable[[], Decompressor]
    ) -> None:
        self.compressed, self.make_decompressor = compressed, make_decompressor
        self.part = make_decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self.part.eof:
                # another part may follow, after zeros
                rest = self.part.unused_data.lstrip(b"\0")
                data = rest or self.compressed.read(BUFFER_BYTES).lstrip(b"\0")
                if not data:
                    return 0
                self.part = self.make_decompressor()
            elif self.part.needs_input:
                data = self.compressed.read(BUFFER_BYTES)
                if not data:
                    raise EOFError("it ends too early")
            else:
                data = b""
            text = self.part.decompress(data, len(buffer))
            if text:
                buffer[: len(text)] = text
                return len(text)


def _find_member(archive: tarfile.TarFile, text: TextFile) -> tarfile.TarInfo:
    wanted = str(text.member).removeprefix("./")
    names = []
    for member in archive:
        if member.isfile():
            name = member.name.removeprefix("./")
            if name == wanted:
                return member
            names.append(name)
    raise _explain_missing(text, names)


def _open_zipped(raw: IO[bytes], text: TextFile) -> tuple[IO[bytes], int]:
    """Return the stream of a member of a .zip, and its size."""
    try:
        archive = zipfile.ZipFile(raw)
        names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
        name = str(text.member).removeprefix("./")
        if name not in names:
            raise _explain_missing(text, names)
        if names.count(name) > 1:
            raise UserError(f"{text.name}: occurs more than once in the archive; pack it again")
        entry = archive.getinfo(name)
        if entry.flag_bits & ENCRYPTED:
            raise UserError(f"{text.name}: is encrypted; decrypt the archive")
        return archive.open(entry), entry.file_size
    except (ValueError, LookupError, struct.error, RuntimeError) as error:
        # what zipfile raises if names, dates or extra fields are damaged
        raise zipfile.BadZipFile(describe_error(error)) from None


def _explain_missing(text: TextFile, names: list[str]) -> UserError:
    if not names:
        return UserError(f"{text.path}: contains no files; give another archive")
    close = difflib.get_close_matches(str(text.member), names, 3) or names[:3]
    return UserError(
        f"{text.path}: has no member {text.member!r}; give one of its {len(names)} files, such as "
        f"{', '.join(map(repr, close))}"
    )
