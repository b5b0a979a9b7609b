"""Provides folders for what libraries keep between starts, even without a home that can be written.

In a container, under another uid or on a read-only disk there may be no such home. That costs speed,
not work: compiled code and downloads then go to a private folder, which is removed when this process
ends. Call `provide_caches` before torch, `datasets` or sacreBLEU is imported: they read these
variables once, and torch creates its folder when it is imported.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from nmt.system.errors import UserError
from nmt.system.files import make_folder
from nmt.system.progress import say

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
        if given is None and ours is not None:
            os.environ[variable] = str(ours / name)
        elif given is None:
            lost.append(variable)
        elif not _is_usable(Path(given).absolute()):
            say(f"warning: {variable}={given}: cannot be written, so compiled code is not kept")
            lost.append(variable)
    if lost:
        folder = make_temporary_folder()
        os.environ.update(dict.fromkeys(lost, folder))


def find_cache_folder() -> Path | None:
    """Return this user's folder for what can be made again; None without a home that can be written."""
    ours = _find_user_caches() / "nmt"
    return ours if _is_usable(ours) and _is_private(ours) else None


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


def _is_usable(folder: Path) -> bool:
    """Whether files can be created in `folder`, which is created if it does not exist. It must be
    absolute: without a home, `~` would be a folder in the current one.
    """
    try:
        return folder.is_absolute() and bool(make_folder(folder))
    except UserError:
        return False


def _is_private(folder: Path) -> bool:
    """Whether this user owns the folder. The home may be /tmp, and compiled code from there is run."""
    return folder.stat().st_uid == os.geteuid()


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
