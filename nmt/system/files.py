"""Files that are complete or absent: atomic writes, digests, and the lock of a folder.

Everything goes to a temporary name first, is fsynced, renamed, and its folder fsynced: after a power cut a reader
finds the old content or the new, never a mixture. A `manifest.json` holds the sha256 and size of each file of a
folder, and `verify` compares them on the way in.
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
from typing import Any

from nmt.system.errors import UserError
from nmt.system.run_folder import MANIFEST_FILE

MAX_MANIFEST_BYTES = 1 << 20


def digest(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> Path:
    """`path` as an existing folder in which files can be made; the user hears at once when it cannot be one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(
            dir=path
        ).close()  # nameless or unique: threads may ask at the same time
    except OSError as error:
        why = "it is a file" if path.is_file() else error.strerror
        raise UserError(f"{path}: cannot be written ({why}); choose another folder") from None
    return path


def check_writable(path: Path) -> None:
    """Tell the user now that the file `path` cannot be written later; only a plain file is ever replaced."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise UserError(f"{path}: is not a plain file; give another place")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"{path}: its folder does not exist or cannot be written; choose another place"
        )


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of the file `path`, atomically."""
    # A name of the same length as any, for a file name may be as long as names can be.
    temporary = path.with_name(
        f".{hashlib.sha256(path.name.encode(errors='surrogateescape')).hexdigest()[:16]}"
        f".{os.getpid()}.tmp"
    )
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_bytes(
        path, text.encode(errors="backslashreplace")
    )  # a file name's stray bytes become JSON escapes


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: damaged (not JSON)") from None


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path` appear complete: `fill` writes into a temporary one, which is sealed and renamed."""
    temporary, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # a predecessor died between the two renames below
        os.rename(old, path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        seal(temporary)
        if path.exists():  # replaced only now that its successor is whole
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
            os.rename(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(temporary, path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seal(folder: Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Fsync each file of `folder` and write the manifest that `verify` will hold them against; sha256 `known` before
    are not computed again."""
    entries = {}
    for file in sorted(p for p in folder.iterdir() if p.name != MANIFEST_FILE and p.name[0] != "."):
        file.chmod(
            folder.stat().st_mode & 0o666
        )  # safetensors would keep colleagues from reading weights
        sync(file)
        entries[file.name] = {
            "sha256": known.get(file.name) or digest(file),
            "size": file.stat().st_size,
        }
    write_json(folder / MANIFEST_FILE, entries)
    sync(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST_FILE).is_file():
        raise UserError(f"{folder}: no {MANIFEST_FILE}; not a complete checkpoint or store")
    if (size := size_of(folder / MANIFEST_FILE)) > MAX_MANIFEST_BYTES:
        raise UserError(
            f"{folder / MANIFEST_FILE}: {size} bytes are too many; damaged, use another copy"
        )
    entries = read_json(folder / MANIFEST_FILE)
    if not isinstance(entries, dict):
        raise UserError(f"{folder / MANIFEST_FILE}: damaged, use another copy")
    for name, entry in entries.items():
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or not _is_entry(entry):
            raise UserError(
                f"{folder / MANIFEST_FILE}: damaged at {ascii(name[:99])}, use another copy"
            )
    return entries


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"sha256", "size"}
        and type(entry["size"]) is int
        and 0 <= entry["size"] < 2**63
        and isinstance(entry["sha256"], str)
        and re.fullmatch("[0-9a-f]{64}", entry["sha256"]) is not None
    )


def size_of(path: Path) -> int:
    """The size of a plain file. A link, a pipe or a device is refused unopened: it leads elsewhere or never ends."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise UserError(f"{path}: missing; the folder is damaged, use another copy") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); use another copy") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is not a plain file; the folder is damaged, use another copy")
    return status.st_size


def stamp(path: Path) -> list[int]:
    """Tells a file from what it was before it was changed or exchanged, without reading it."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def verify(folder: Path, needed: Iterable[str] = (), only: Iterable[str] | None = None) -> None:
    """Raise a `UserError` that names the first file which is not what the manifest says, or one that it lacks. Sizes
    are those of all files, the sha256 of all or of `only` these."""
    entries = read_manifest(folder)
    for name in needed:
        if name not in entries:
            raise UserError(
                f"{folder}: its {MANIFEST_FILE} names no {name}; not a complete folder of its kind"
            )
    for name, entry in entries.items():
        if (size := size_of(folder / name)) != entry["size"]:
            raise UserError(
                f"{folder / name}: {size} bytes, not {entry['size']} as {MANIFEST_FILE} says; damaged, "
                "use another copy"
            )
    for name in entries if only is None else only:
        try:
            is_same = digest(folder / name) == entries[name]["sha256"]
        except OSError as error:
            raise UserError(
                f"{folder / name}: cannot be read ({error.strerror}); use another copy"
            ) from None
        if not is_same:
            raise UserError(
                f"{folder / name}: its sha256 is not the one in {MANIFEST_FILE}; damaged, use another copy"
            )


def remove_folder(path: Path) -> None:
    """Remove a folder so that a kill on the way leaves it whole or gone."""
    gone = path.with_name(f".{path.name}.gone")
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clear away what killed predecessors left in `folder`; the caller holds its lock."""
    for path in folder.glob(".*"):
        if path.suffix == ".old" and not (whole := path.with_name(path.stem[1:])).exists():
            os.rename(path, whole)  # its successor did not come to bear the name
        elif path.suffix in (".tmp", ".gone", ".old"):
            shutil.rmtree(
                path, ignore_errors=True
            ) if path.is_dir() and not path.is_symlink() else path.unlink()


def point(link: Path, target: str) -> None:
    """Make the symbolic link `link` name `target`, atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
    sync(link.parent)


@contextlib.contextmanager
def lock(folder: Path, doing: str, file_name: str | None = None) -> Iterator[None]:
    """Hold `folder` for this process; the kernel lets go when the process dies, however it dies. A folder that is not
    there yet is held by a file beside it, which goes in the end."""
    path = folder.with_name(file_name) if file_name else folder / ".lock"
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(
                file.fileno()
            ).st_nlink:  # its holder has just gone, and another may have come
                raise BlockingIOError(errno.EAGAIN, "changed hands")
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            file.seek(0)
            raise UserError(
                f"{folder}: in use by {file.read().strip() or 'another process'}; "
                "wait for it or choose another folder"
            ) from None
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
