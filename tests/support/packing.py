"""Bytes packed as corpora come: gzip, xz, bzip2, zstd, tar in each of them; and unpacked by Python's
own modules, each in one call.
"""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable

import pyarrow as pa


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zip_members(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("folder/"), b"")  # ZipInfo: not the time of today
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def pack_archive(members: dict[str, bytes], name: str) -> bytes:
    """An archive of that name."""
    return zip_members(members) if name.endswith(".zip") else pack(tar(members), name)


def pack(data: bytes, name: str) -> bytes:
    """`data` as a file of that name would hold it."""
    if name.endswith((".gz", ".tgz")):
        return gzip.compress(data, mtime=0)
    if name.endswith((".xz", ".txz")):
        return lzma.compress(data)
    if name.endswith((".bz2", ".tbz2")):
        return bz2.compress(data)
    return zstd(data) if name.endswith(".zst") else data


def unpack(data: bytes, name: str) -> bytes:
    """The content of a file of that name. A damaged one raises anything."""
    if name.endswith((".gz", ".tgz")):
        return gzip.decompress(data)
    if name.endswith((".xz", ".txz")):
        return _unpack_parts(data, lzma.LZMADecompressor)
    if name.endswith((".bz2", ".tbz2")):
        return _unpack_parts(data, bz2.BZ2Decompressor)
    if name.endswith(".zst"):
        return bytes(pa.CompressedInputStream(pa.BufferReader(data), "zstd").read())
    return data


def _unpack_parts(
    data: bytes, make: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor]
) -> bytes:
    """What joined files hold, with zeros between them."""
    text = b""
    while data:
        part = make()
        text += part.decompress(data)
        if not part.eof:
            raise EOFError
        data = part.unused_data.lstrip(b"\0")
    return text


def unpack_member(data: bytes, name: str, member: str) -> bytes:
    """The first member of that name of an archive."""
    if name.endswith(".zip"):
        return zipfile.ZipFile(io.BytesIO(data)).read(member)
    with tarfile.open(fileobj=io.BytesIO(unpack(data, name)), mode="r|") as archive:
        for entry in archive:
            file = archive.extractfile(entry)
            if entry.isfile() and file and entry.name.removeprefix("./") == member:
                return file.read()
    raise KeyError(member)
