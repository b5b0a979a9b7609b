"""What must not change: every file and folder below a place, to the byte and the nanosecond."""

import hashlib
import os
import stat
from pathlib import Path

from safetensors.torch import load_file


def record(folder: Path) -> dict[str, object]:
    """Content, mode, number and time of the last change of everything below a folder."""
    found: dict[str, object] = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        content: bytes | str | None = None
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        found[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found


def digest_tensors(path: Path) -> str:
    """Of the names, types and values in a file, whatever else its header says."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode() + tensor.numpy().tobytes())
    return digest.hexdigest()
