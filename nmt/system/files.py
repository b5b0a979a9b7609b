"""Files that are complete or absent: atomic writes, digests, sealed folders, and locks.

Everything goes to a temporary name first, is fsynced, renamed, and its folder fsynced: after a
power cut a reader finds the old content or the new, never a mixture. A sealed folder has a
`manifest.json` with the sha256 and size of each of its files, and `verify` compares them before
anything is read.

A run, a store or a checkpoint may come from a stranger. So every file that nmt itself names is
opened by `open_plain_file`, which refuses links: one could lead out of the folder. Paths that the user
names may be links, pipes and devices; they are opened elsewhere.
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
from typing import Any, BinaryIO, Literal

from nmt.system.errors import Failure, UserError
from nmt.system.progress import clock, say, say_once
from nmt.system.run_folder import CARD_FILE, MANIFEST_FILE, RUN_FILES, RunFolder
from nmt.system.strict_json import Fields, parse_json

COMPRESSED = (".gz", ".xz", ".zst", ".bz2")  # what the name of a compressed text ends in
MAX_JSON_BYTES = 64 << 20
MAX_MANIFEST_BYTES = 1 << 20
MEND = "use another copy; if it is a prepared store, remove its folder and run the command again"
FileMode = Literal["rb", "r+b", "a+b", "wb", "xb"]
DIGEST_BLOCK = 1 << 18  # bytes
# the name of a file that a killed process may have left half-written
ABANDONED = re.compile(r"\.[0-9a-f]{16}\.[0-9]+\.tmp")
LOCK_FILE = ".lock"  # stays in the folder that it locks


class FolderInUse(UserError):
    """Another process holds the lock of a folder."""


def on_change(change: str, path: Path) -> None:
    """A hook for tests, called before each write, fsync, rename and removal of this file's functions."""


# ---- plain files only -------------------------------------------------------------------------------------------


def open_plain_file(path: Path, mode: FileMode = "rb") -> BinaryIO:
    """Open a file whose name nmt chose; raise UserError if something other than a plain file has
    that name.

    Nothing is opened through a link: what the user keeps elsewhere would be read or overwritten.
    """
    if mode != "rb":
        on_change("write", path)
    return open(path, mode, opener=_open_without_following)


def _open_without_following(path: str, flags: int) -> int:
    check_plain_file(Path(path))
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        # not a UserError, which would count as damage of this file
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Failure(
                f"{path}: cannot be opened, because too many files are open; raise the limit, "
                "for example with ulimit -n 1024"
            ) from None
        raise


def check_plain_file(path: Path) -> None:
    """Raise UserError if something other than a plain file has a name that nmt chose. A library that
    opens files by their path gets it only after this.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            return
        what = f"a link to {os.readlink(path)}" if stat.S_ISLNK(mode) else "not a plain file"
    except OSError:  # it does not exist
        return
    if stat.S_ISDIR(mode):
        what = "a folder, not a file"
    raise UserError(f"{path}: is {what}; remove it, or put a plain file there")


def has_plain_file(path: Path) -> bool:
    """Whether the file exists; raise UserError if something other than a plain file has its name."""
    check_plain_file(path)
    return os.path.lexists(path)


def check_own_folder(path: Path, inside: Path) -> None:
    """Refuse a folder whose name nmt chose if it is a link that leads out of the folder `inside`.

    `best` and `last` lead to their neighbours. `inside` itself, such as the folder of a run, may be
    a link: it is the user who named it.
    """
    if path.is_symlink() and not path.resolve().is_relative_to(inside.resolve()):
        raise UserError(
            f"{path}: is a link to {os.readlink(path)}, outside {inside}; put the "
            f"folder itself there; to keep it elsewhere, make {inside} itself the link"
        )


def read_bytes(path: Path, max_bytes: int | None = None, remedy: str = "") -> bytes:
    """Return the content of a file whose name nmt chose; refuse one of more than `max_bytes`."""
    with explain_unreadable(path, remedy), open_plain_file(path) as file:
        if max_bytes is not None:
            check_size(file, path, max_bytes)
        return file.read()


@contextlib.contextmanager
def explain_unreadable(path: str | Path, remedy: str = "") -> Iterator[None]:
    """Turn the error of a file that cannot be read into one line that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}){remedy}") from None


def check_size(file: BinaryIO, path: Path, max_bytes: int) -> None:
    """Refuse an open file that is too large to be what it should be, before it fills the memory."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise UserError(
            f"{path}: is damaged ({size:,} bytes, but at most {max_bytes:,} are allowed); "
            "use another copy"
        )


# ---- single files -----------------------------------------------------------------------------------------------


def digest_file(path: Path) -> str:
    """Compute the sha256 of the content of a file whose name nmt chose, in hexadecimal."""
    with open_plain_file(path) as file:
        return digest_content(file)


def digest_content(file: BinaryIO) -> str:
    """Compute the sha256 of what is left to read of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    while block := file.read(DIGEST_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def digest_values(values: Any) -> str:
    """Compute the sha256 of plain values, as JSON has them, in hexadecimal."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def sync_to_disk(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    on_change("fsync", path)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(path: Path, new_path: Path) -> None:
    """Rename a file, a link or a folder, which takes the place of a file or a link that is there."""
    on_change("rename", new_path)
    os.replace(path, new_path)


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Make the folder `path` unless it exists, and fail now rather than later if no file can be made in it."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
        # A nameless or unique file, because several threads may try at the same time.
        tempfile.TemporaryFile(dir=path).close()
    except RecursionError:  # of mkdir
        raise UserError(f"{path}: is nested too deeply; choose another folder") from None
    except OSError as error:
        why = "it is a file" if os.path.isfile(path) else error.strerror
        raise UserError(f"{path}: cannot be written ({why}); choose another folder") from None
    return path


def check_writable(path: Path) -> None:
    """Fail now if the file `path` cannot be written later; only a plain file is ever replaced."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise UserError(f"{path}: is not a regular file; choose another path")
    if not os.access(path.parent, os.W_OK):
        why = "is read-only or not yours" if path.parent.is_dir() else "does not exist"
        raise UserError(f"{path}: its folder {why}; choose another path")


def refuse_run_file(path: Path) -> None:
    """Refuse an output that the user named if it is a file of a run, or lies in a folder that nmt sealed."""
    path = path.resolve()
    run = RunFolder(path.parent)
    is_of_run = path.name in RUN_FILES and run.checkpoints.exists()
    if is_of_run or (path.parent / MANIFEST_FILE).exists():
        raise UserError(
            f"{path}: belongs to a run, a checkpoint, a store or an export; choose another file"
        )


def write_text(path: Path, text: str) -> None:
    # Text from elsewhere may contain a lone surrogate, which UTF-8 cannot encode.
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of the file `path`, atomically."""
    with replace_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Replace the file `path`, atomically, by what is written; after an error nothing has changed. A
    link is replaced itself, and where it leads nothing changes.
    """
    if _is_folder(path):
        raise UserError(f"{path}: is a folder, not a file; remove it or choose another path")
    # The file's own name may be as long as names can be, so the temporary one is a digest of it.
    name = hashlib.sha256(path.name.encode(errors="surrogateescape")).hexdigest()[:16]
    _remove_abandoned(path.parent, name)
    temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        with _create_locked(temporary) as file:
            yield file
            file.flush()
            sync_to_disk(temporary)
            rename(temporary, path)
    except OSError as error:
        error.filename = str(path)  # the temporary name means nothing to a user
        error.filename2 = None
        raise
    finally:
        remove_entry(temporary)
    sync_to_disk(path.parent)


def _create_locked(path: Path) -> BinaryIO:
    """Create a file and lock it; again if, before the lock, another process took it for an abandoned one."""
    while True:
        remove_entry(path)
        file = open_plain_file(path, "xb")
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return file
        file.close()


def _remove_abandoned(folder: Path, name: str) -> None:
    """Remove the temporary files that killed processes left of a file; a living process still holds the lock."""
    for path in folder.glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError, UserError), open_plain_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_entry(path)


def write_json(path: Path, value: Any) -> None:
    # A file name may hold bytes that are not UTF-8; they become JSON escapes.
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_json_or_warn(path: Path, value: Any) -> None:
    """Write a file that is not essential; if that fails, only warn."""
    try:
        write_json(path, value)
    except (OSError, UserError) as error:
        say(f"warning: not written: {error}")


def read_json(path: Path, max_bytes: int | None = MAX_JSON_BYTES) -> Any:
    """Read a JSON file whose name nmt chose, and which a stranger may have written."""
    return parse_json(read_bytes(path, max_bytes), str(path))


def read_status(run: RunFolder) -> Fields:
    """Return the content of a run's status.json; nothing if it cannot be read."""
    try:
        status = read_json(run.status)
    except UserError:
        return {}
    return status if isinstance(status, dict) else {}


def read_file_stamp(path: Path) -> list[int]:
    """Return numbers that differ once the file is changed or replaced, without reading it."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def point_link(link: Path, target: str) -> None:
    """Make the symbolic link `link` point to `target`, atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    remove_entry(temporary)
    temporary.symlink_to(target)
    rename(temporary, link)
    sync_to_disk(link.parent)


# ---- sealed folders ---------------------------------------------------------------------------------------------


def check_exchangeable(path: Path) -> None:
    """Fail now if `write_folder` will not be able to put a new folder in the place of this one."""
    make_folder(path.parent)
    if _is_folder(path) and Path.cwd().is_relative_to(path.resolve()):
        raise UserError(
            f"{path}: is the current folder, which no new one can replace; name a folder inside it"
        )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path` appear complete: `fill` writes into a hidden one, which is sealed and
    takes the place of all that is there.

    Raise FolderInUse if another process is doing the same.
    """
    check_exchangeable(path)
    hidden = path.with_name(f".{path.name}.tmp")
    try:
        with lock(path, "a command that writes it", f".{path.name}.lock.tmp"):
            _fill_folder(hidden, fill)
            _exchange_folder(hidden, path)
    except OSError as error:
        # a write that fails, because the disk is full, does not know of which file
        error.filename = error.filename or str(path)
        raise


def _fill_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    remove_entry(folder)  # left by a killed process
    folder.mkdir(parents=True)
    try:
        fill(folder)
        seal(folder)
    except BaseException:
        remove_entry(folder)
        raise


def _exchange_folder(folder: Path, path: Path) -> None:
    """Rename a sealed folder to `path`. What was there is removed only then; after a kill between
    the renames `restore_folder` brings it back.
    """
    old = _name_old(path)
    if os.path.lexists(path):
        remove_entry(old)
        rename(path, old)
    rename(folder, path)
    sync_to_disk(path.parent)
    remove_entry(old)


def restore_folder(path: Path) -> None:
    """Bring back the folder `path` if a killed process was between the renames that replace it."""
    if not os.path.lexists(path) and _is_folder(_name_old(path)):
        rename(_name_old(path), path)


def _name_old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def move_sealed_files(folder: Path, path: Path) -> None:
    """Move the files of a sealed folder into the folder `path`, which has no manifest yet. The manifest
    comes last: a folder without one counts as absent.
    """
    names = {file.name for file in folder.iterdir()} - {MANIFEST_FILE}
    for name in names:
        remove_entry(path / name)
        rename(folder / name, path / name)
    sync_to_disk(path)
    rename(folder / MANIFEST_FILE, path / MANIFEST_FILE)
    sync_to_disk(path)


def list_own_names(folder: Path) -> set[str]:
    """List what is in a folder but for what killed processes leave, and the lock."""
    names = {path.name for path in folder.iterdir()} - {LOCK_FILE}
    return {name for name in names if not ABANDONED.fullmatch(name)}


def seal(folder: Path, known: Mapping[str, str] | None = None) -> None:
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
        sha256 = (known or {}).get(file.name) or digest_file(file)
        entries[file.name] = {"sha256": sha256, "size": file.stat().st_size}
    write_json(folder / MANIFEST_FILE, entries)
    sync_to_disk(folder)


def read_manifest(folder: Path) -> Fields:
    """Read the sha256 and size of each file, by its name. The manifest itself may come from a
    stranger.
    """
    path = folder / MANIFEST_FILE
    if not has_plain_file(path):
        raise UserError(
            f"{folder}: has no {MANIFEST_FILE}, so it is no checkpoint or store; give a run, or one of its checkpoints"
        )
    entries = read_json(path, MAX_MANIFEST_BYTES)
    if not isinstance(entries, dict):
        raise UserError(f"{path}: is damaged (not a JSON object); use another copy")
    for name, entry in entries.items():
        # No separators, so that no name leads out of the folder.
        is_plain_name = re.fullmatch(r"\w[\w.-]*", name, re.ASCII)
        if not is_plain_name or not _is_entry(entry):
            raise UserError(f"{path}: is damaged (entry {name!r}); use another copy")
    return entries


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
        return False
    size, sha256 = entry["size"], entry["sha256"]
    has_size = type(size) is int and size >= 0
    return has_size and isinstance(sha256, str) and bool(re.fullmatch("[0-9a-f]{64}", sha256))


def verify(folder: Path, needed: Iterable[str] = (), only: Iterable[str] | None = None) -> None:
    """Raise a `UserError` that names the first file which is missing or differs from the manifest.

    All sizes are compared; sha256 of all files, or of `only` these. The manifest must name all that
    are `needed`. The card is the owner's to edit.
    """
    entries = read_manifest(folder)
    entries.pop(CARD_FILE, None)
    digests = {name: entry["sha256"] for name, entry in entries.items()}
    check_sizes(folder, entries, needed)
    check_digests(folder, digests, digests if only is None else only)


def check_sizes(folder: Path, entries: Fields, needed: Iterable[str]) -> None:
    """Raise a `UserError` if a file is missing or has another size than the manifest's entries say."""
    for name in needed:
        if name not in entries:
            raise UserError(
                f"{folder}: is incomplete: its {MANIFEST_FILE} does not list {name}; use another copy"
            )
    for name, entry in entries.items():
        path = folder / name
        if not has_plain_file(path):
            raise UserError(f"{path}: is missing, so the folder is damaged; {MEND}")
        size = path.stat().st_size
        if size != entry["size"]:
            raise UserError(
                f"{path}: is damaged ({size:,} bytes, not {entry['size']:,} as in {MANIFEST_FILE}); "
                f"{MEND}"
            )


def check_digests(folder: Path, digests: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise a `UserError` if the sha256 of one of these files is not what the manifest says."""
    for name in names:
        path = folder / name
        with explain_unreadable(path, "; use another copy"):
            sha256 = digest_file(path)
        if sha256 != digests[name]:
            raise UserError(
                f"{path}: is damaged: its sha256 does not match {MANIFEST_FILE}; {MEND}"
            )


def remove_folder(path: Path) -> None:
    """Remove a folder so that a kill in between leaves it whole or gone."""
    gone = path.with_name(f".{path.name}.gone")
    remove_entry(gone)  # left by a killed process
    rename(path, gone)
    remove_entry(gone)


def remove_entry(path: Path) -> None:
    """Remove what has this name, if anything has: a folder with its content, but of a link nothing
    but the link.
    """
    if not os.path.lexists(path):
        return
    on_change("remove", path)
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Restore what killed processes were replacing in `folder`, and clear away what else they left;
    the caller holds its lock.
    """
    for path in folder.glob(".*"):
        if path.suffix == ".old":
            restore_folder(folder / path.stem[1:])
        if path.suffix in (".tmp", ".gone", ".old"):
            remove_entry(path)


# ---- locks ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock(
    folder: Path, doing: str, file_name: str | None = None, patience_s: float = 0.0
) -> Iterator[None]:
    """Hold `folder` for this process; the kernel lets go when the process dies, however it dies. If
    another process holds it, wait, but no longer than `patience_s`.

    A folder that may not exist yet is held by the file `file_name` beside it, which is removed in
    the end.
    """
    path = folder.with_name(file_name) if file_name else folder / LOCK_FILE
    # the file is never replaced: a lock belongs to it
    with _open_locked(path, folder, clock() + patience_s) as file:
        # who holds it, for the message that others get
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"{doing} on {socket.gethostname()}, pid {os.getpid()}, since {started}"
        file.write(holder.encode())
        file.flush()
        try:
            yield
        finally:
            if file_name:
                remove_entry(path)


def check_free(folder: Path) -> None:
    """Raise FolderInUse if another process holds the folder."""
    if os.path.lexists(folder / LOCK_FILE):
        with lock(folder, "looking"):
            pass


def _open_locked(path: Path, folder: Path, deadline: float) -> BinaryIO:
    while True:
        file = open_plain_file(path, "a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with file:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                file.seek(0)
                holder = file.read(1000).decode(errors="replace").strip()
            if clock() < deadline:
                if holder:
                    say_once(f"{folder}: is in use by {holder}; waiting for it")
                time.sleep(0.05)
                path.parent.mkdir(parents=True, exist_ok=True)  # its holder may have removed it
                continue
            raise FolderInUse(
                f"{folder}: is in use by {holder or 'another process'}; wait for it or choose another folder"
            ) from None
        # Its last holder may have removed the file since we opened it, and another may hold a new one.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()
