"""Provides folders for what libraries keep between starts, even without a home that can be written.

In a container, under another uid or on a read-only disk there may be no such home. That costs speed,
not work: compiled code and downloads then go to a private folder, which is removed when this process
ends. Call `provide_caches` before torch, `datasets` or sacreBLEU is imported: they read these
variables once, and torch creates its folder when it is imported.

numba and torch unpickle compiled code, and run it. So a folder is used only if no other user can put
anything into it: neither into it, nor in place of a folder on the way to it. So it cannot be
exchanged after the check either.
"""

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path

from nmt.system.errors import UserError
from nmt.system.files import make_folder
from nmt.system.progress import say, say_once

COMPILER_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "NUMBA_CACHE_DIR": "numba",
}


def provide_caches() -> None:
    """Set the variables that name folders of caches. What the user has set wins if it can be used."""
    ours = find_cache_folder()
    lost = [] if ours is not None else _list_lost_downloads(_find_user_caches())
    for variable, name in COMPILER_CACHES.items():
        given = os.environ.get(variable)
        if given is None:
            if ours is not None and _is_safe(ours / name, with_content=name == "numba"):
                os.environ[variable] = str(ours / name)
            else:
                lost.append(variable)
        elif not _is_usable(Path(given).absolute()):
            say(f"warning: {variable}={given}: cannot be written, so compiled code is not kept")
            lost.append(variable)
    if lost:
        folder = make_temporary_folder()
        os.environ.update(dict.fromkeys(lost, folder))


def find_cache_folder() -> Path | None:
    """Return this user's folder for what can be made again; None if the home cannot be written, or
    if another user could write there too.
    """
    ours = Path(os.path.realpath(_find_user_caches() / "nmt"))
    is_absolute = _find_user_caches().is_absolute()  # without a home, `~` would be in this folder
    return ours if is_absolute and _is_safe(ours) and _is_usable(ours, 0o700) else None


def _find_user_caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def _list_lost_downloads(user_caches: Path) -> list[str]:
    """Return the variables that must point elsewhere, because their downloads cannot be kept in the
    home. What was downloaded before the home became read-only is still used.
    """
    lost = []
    hub = user_caches / "huggingface"
    if "HF_HOME" not in os.environ and not _is_usable(hub):
        lost.append("HF_HOME")
        if hub.is_absolute() and os.path.isdir(hub):
            os.environ.setdefault("HF_HUB_CACHE", str(hub / "hub"))
            os.environ.setdefault("HF_TOKEN_PATH", str(hub / "token"))
    test_sets = os.path.expanduser("~/.sacrebleu")
    is_known = "SACREBLEU" in os.environ or os.path.isdir(test_sets)
    if not is_known and not _is_usable(Path(test_sets)):
        lost.append("SACREBLEU")
    return lost


def _is_usable(folder: Path, mode: int = 0o777) -> bool:
    """Whether files can be created in `folder`, which is created if it does not exist. It must be
    absolute: without a home, `~` would be a folder in the current one.
    """
    try:
        return folder.is_absolute() and bool(make_folder(folder, mode))
    except UserError:
        return False


def _is_safe(folder: Path, with_content: bool = False) -> bool:
    """Whether only this user can put anything into `folder`, which may not exist; warn once if not.

    numba's own folder is looked through (`with_content`): it is small, and all of it is unpickled.
    """
    content = sorted(folder.rglob("*")) if with_content else []
    is_hidden = False  # inside a folder that only this user can enter
    for path in [*reversed(folder.parents), folder, *content]:
        try:
            status = path.lstat()
        except OSError:  # it does not exist, and only this user can make it
            continue
        is_above, is_content = path in folder.parents, folder in path.parents
        fault = None
        if not _is_owned(status, is_above):
            fault = "belongs to another user"
        elif not (stat.S_ISDIR(status.st_mode) or (is_content and stat.S_ISREG(status.st_mode))):
            fault = "is not a plain file" if is_content else "is not a folder"
        elif not is_hidden and _can_others_write(status, is_above):
            fault = "can be written by other users"
        if fault is not None:
            say_once(
                f"warning: {path}: {fault}, so compiled code is not kept; remove it, or make it "
                "yours and writable by you alone"
            )
            return False
        is_hidden = is_hidden or (status.st_uid == os.geteuid() and not status.st_mode & 0o077)
    return True


def _is_owned(status: os.stat_result, is_above: bool) -> bool:
    """Whether this user owns a folder. Those above it may also belong to root, or to the owner of `/`,
    whose number is not 0 in some containers.
    """
    owners = {0, Path("/").stat().st_uid} if is_above else set()
    return status.st_uid in owners | {os.geteuid()}


def _can_others_write(status: os.stat_result, is_above: bool) -> bool:
    # A group with the number of the owner is the owner's own, as useradd makes it.
    is_own_group = status.st_gid == status.st_uid
    others = stat.S_IWOTH if is_own_group else stat.S_IWOTH | stat.S_IWGRP
    # In a sticky folder, such as /tmp, others cannot touch what is ours.
    is_protected = is_above and status.st_mode & stat.S_ISVTX
    return bool(status.st_mode & others) and not is_protected


def make_temporary_folder() -> str:
    """Make a folder that only this user can enter, and remove it when this process ends."""
    try:
        folder = tempfile.mkdtemp(prefix="nmt-caches-")
    except OSError:
        raise UserError(
            "neither the home nor a folder for temporary files can be written; set TMPDIR to one"
        ) from None
    atexit.register(_remove_own_folder, folder, os.getpid())
    return folder


def _remove_own_folder(folder: str, owner: int) -> None:
    # A fork of the process that made it must leave it.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
