"""Files that are complete or absent: atomic writes, digests, sealed folders, and locks.

Everything goes to a temporary name first, is fsynced, renamed, and its folder fsynced: after a
power cut a reader finds the old content or the new, never a mixture. A sealed folder has a
`manifest.json` with the sha256 and size of each of its files, and `verify` compares them before
anything is read.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from nmt.system.errors import UserError
from nmt.system.run_folder import MANIFEST_FILE

MAX_MANIFEST_BYTES = 1 << 20
NOTHING_KNOWN: Mapping[str, str] = MappingProxyType({})


# ---- single files -----------------------------------------------------------------------------------------------


def digest_file(path: Path) -> str:
    """Compute the sha256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_to_disk(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> Path:
    """Make the folder `path` unless it exists, and fail now rather than later if no file can be
    made in it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        # A nameless or unique file, because several threads may try at the same time.
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        why = "it is a file" if path.is_file() else error.strerror
        raise UserError(f"{path}: cannot be written ({why}); choose another folder") from None
    return path


def check_writable(path: Path) -> None:
    """Fail now if the file `path` cannot be written later; nothing but a plain file is ever
    replaced.
    """
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise UserError(f"{path}: is not a regular file; choose another path")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"{path}: its folder does not exist or is not writable; choose another path"
        )


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of the file `path`, atomically."""
    # The file's own name may be as long as names can be, so the temporary one is a digest of it.
    name = hashlib.sha256(path.name.encode(errors="surrogateescape")).hexdigest()[:16]
    temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_to_disk(path.parent)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    # A file name may hold bytes that are not UTF-8; they become JSON escapes.
    write_bytes(path, text.encode(errors="backslashreplace"))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is damaged (not JSON); use another copy") from None


def read_file_size(path: Path) -> int:
    """Return the size of a regular file. Refuse a link, a pipe or a device without opening it: it
    leads elsewhere or never ends.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise UserError(f"{path}: is missing, so the folder is damaged; use another copy") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); use another copy") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(
            f"{path}: is not a regular file, so the folder is damaged; use another copy"
        )
    return status.st_size


def read_file_stamp(path: Path) -> list[int]:
    """Numbers that differ once the file is changed or exchanged, without reading it."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def point_link(link: Path, target: str) -> None:
    """Make the symbolic link `link` point to `target`, atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
    sync_to_disk(link.parent)


# ---- sealed folders ---------------------------------------------------------------------------------------------


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path` appear complete: `fill` writes into a temporary one, which is sealed
    and renamed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # a killed process was between the two renames below
        os.rename(old, path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        seal(temporary)
        if path.exists():  # replaced only now that its successor is complete
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
            os.rename(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(temporary, path)
        sync_to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seal(folder: Path, known: Mapping[str, str] = NOTHING_KNOWN) -> None:
    """Fsync each file of `folder` and write the manifest that `verify` compares them with. Digests
    that are `known` are not computed again."""
    # safetensors writes files that only their owner can read; colleagues should be able to.
    mode = folder.stat().st_mode & 0o666
    entries = {}
    for file in sorted(folder.iterdir()):
        if file.name == MANIFEST_FILE or file.name.startswith("."):
            continue
        file.chmod(mode)
        sync_to_disk(file)
        sha256 = known.get(file.name) or digest_file(file)
        entries[file.name] = {"sha256": sha256, "size": file.stat().st_size}
    write_json(folder / MANIFEST_FILE, entries)
    sync_to_disk(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the sha256 and size of each file, by its name. The manifest itself may come from a
    stranger.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise UserError(
            f"{folder}: has no {MANIFEST_FILE}, so it is not a complete checkpoint or store; use another copy"
        )
    size = read_file_size(path)
    if size > MAX_MANIFEST_BYTES:
        raise UserError(
            f"{path}: is damaged ({size:,} bytes, but at most {MAX_MANIFEST_BYTES:,} are allowed); "
            "use another copy"
        )
    entries = read_json(path)
    if not isinstance(entries, dict):
        raise UserError(f"{path}: is damaged (not a JSON object); use another copy")
    for name, entry in entries.items():
        # No separators, so that no name leads out of the folder.
        is_plain_name = re.fullmatch(r"\w[\w.-]*", name, re.ASCII)
        if not is_plain_name or not _is_entry(entry):
            raise UserError(f"{path}: is damaged (entry {ascii(name[:99])}); use another copy")
    return entries


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
        return False
    size, sha256 = entry["size"], entry["sha256"]
    if type(size) is not int or not 0 <= size < 2**63:
        return False
    return isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) is not None


def verify(folder: Path, needed: Iterable[str] = (), only: Iterable[str] | None = None) -> None:
    """Raise a `UserError` that names the first file which is missing or differs from the manifest.

    All sizes are compared; sha256 of all files, or of `only` these. The manifest must name all that
    are `needed`.
    """
    entries = read_manifest(folder)
    for name in needed:
        if name not in entries:
            raise UserError(
                f"{folder}: is incomplete: its {MANIFEST_FILE} does not list {name}; use another copy"
            )
    for name, entry in entries.items():
        size = read_file_size(folder / name)
        if size != entry["size"]:
            raise UserError(
                f"{folder / name}: is damaged ({size:,} bytes, not {entry['size']:,} as in {MANIFEST_FILE}); "
                "use another copy"
            )
    for name in entries if only is None else only:
        try:
            sha256 = digest_file(folder / name)
        except OSError as error:
            raise UserError(
                f"{folder / name}: cannot be read ({error.strerror}); use another copy"
            ) from None
        if sha256 != entries[name]["sha256"]:
            raise UserError(
                f"{folder / name}: is damaged: its sha256 does not match {MANIFEST_FILE}; "
                "use another copy"
            )


def remove_folder(path: Path) -> None:
    """Remove a folder so that a kill in between leaves it whole or gone."""
    gone = path.with_name(f".{path.name}.gone")
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Clear away what killed processes left in `folder`; the caller holds its lock."""
    for path in folder.glob(".*"):
        whole = path.with_name(path.stem[1:])
        if path.suffix == ".old" and not whole.exists():
            os.rename(path, whole)  # its successor was never renamed into place
        elif path.suffix in (".tmp", ".gone", ".old"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


# ---- locks ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock(folder: Path, doing: str, file_name: str | None = None) -> Iterator[None]:
    """Hold `folder` for this process; the kernel lets go when the process dies, however it dies.

    A folder that may not exist yet is held by the file `file_name` beside it, which is removed in
    the end.
    """
    path = folder.with_name(file_name) if file_name else folder / ".lock"
    with open(path, "a+", encoding="utf-8") as file:
        _take_lock(file, folder)
        # who holds it, for the message that others get
        file.seek(0)
        file.truncate()
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"{doing} on {socket.gethostname()}, pid {os.getpid()}, since {started}")
        file.flush()
        try:
            yield
        finally:
            if file_name:
                path.unlink(missing_ok=True)


def _take_lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its holder may have removed the file since we opened it, and another may hold a new one.
        if not os.fstat(file.fileno()).st_nlink:
            raise BlockingIOError(errno.EAGAIN, "changed hands")
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise UserError(
            f"{folder}: is in use by {holder}; wait for it or choose another folder"
        ) from None
