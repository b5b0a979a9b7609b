"""Bytes packed as corpora come: gzip, xz, bzip2, zstd, tar in each of them."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

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
