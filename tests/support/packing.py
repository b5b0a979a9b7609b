"""Bytes packed as corpora come: gzip, xz, bzip2, zstd with a checksum, tar in each of them.

The zstd frames of pyarrow bear no checksum, those of the zstd command do, and only those can prove
damage. So the checksum is computed here and appended; that the decoder takes it shows that it is
right.
"""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import pyarrow as pa

MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def _rotated(x: int, bits: int) -> int:
    x &= MASK
    return (x << bits | x >> (64 - bits)) & MASK


def _round(lane: int, word: int) -> int:
    return _rotated(lane + word * P2, 31) * P1 & MASK


def xxh64(data: bytes) -> int:
    """The 64-bit xxHash with seed 0."""
    n = len(data) & ~31
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) & ~7, 8)]
    lanes = [P1 + P2 & MASK, P2, 0, -P1 & MASK]
    for i, word in enumerate(words[: n // 8]):
        lanes[i % 4] = _round(lanes[i % 4], word)
    total = P5
    if n:
        total = sum(_rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            total = (total ^ _round(0, lane)) * P1 + P4 & MASK
    total += len(data)
    for word in words[n // 8 :]:
        total = _rotated(total ^ _round(0, word), 27) * P1 + P4
    rest = data[len(words) * 8 :]
    if len(rest) >= 4:
        total = _rotated(total ^ int.from_bytes(rest[:4], "little") * P1, 23) * P2 + P3
        rest = rest[4:]
    for byte in rest:
        total = _rotated(total ^ byte * P5, 11) * P1
    total &= MASK
    total = (total ^ total >> 33) * P2 & MASK
    total = (total ^ total >> 29) * P3 & MASK
    return total ^ total >> 32


def zstd(data: bytes) -> bytes:
    frame = bytearray(pa.Codec("zstd").compress(data, asbytes=True))
    frame[4] |= 4  # the header's mark that a checksum follows the blocks
    return bytes(frame) + (xxh64(data) & 0xFFFFFFFF).to_bytes(4, "little")


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
