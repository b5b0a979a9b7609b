"""Copies a run to `training.mirror` after each checkpoint, and fetches it onto a machine that is behind.

A sealed folder is copied if the manifest there is not the one here; sizes would not tell an average that was
made anew. Its manifest is removed first and copied last, so a folder that has one is complete. The other
files are small and copied each time. Folders that are gone here are removed there at the very end.
"""

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from nmt.checkpoint.checkpoint import parse_step
from nmt.checkpoint.run_checkpoints import list_steps
from nmt.config import RunConfig
from nmt.config_files import list_differences, parse_recorded_config
from nmt.system.errors import Failure, ForeseenError, UserError
from nmt.system.extras import name_remedy
from nmt.system.files import read_manifest, verify, write_bytes, write_folder
from nmt.system.progress import clock, say
from nmt.system.run_folder import CONFIG_FILE, MANIFEST_FILE, METRICS_FILE, RunFolder
from nmt.train.checkpoint_writer import Mirror

FOLDER_NAMES = "store|average|checkpoints/step-[0-9]+"  # all of them sealed
SLOW_S = 1.0  # that training waits for the mirror


class RunMirror(Mirror):
    """The mirror of a run at `url`; a thread copies. Only the main rank uses it."""

    def __init__(self, url: str, config: RunConfig) -> None:
        self.url, self.config = url, config
        self._is_slow = False  # as was said
        self._thread = ThreadPoolExecutor(1)
        self._copying: Future[None] | None = None

    def fetch(self) -> RunConfig | None:
        return fetch_run(self.url, self.config)

    def copy(self) -> None:
        copy_run(self.url, self.config.run_folder, Path(self.config.data.store))

    def start_copy(self) -> None:
        self._copying = self._thread.submit(self._try_to_copy)

    def _try_to_copy(self) -> None:
        try:
            self.copy()
        except (ForeseenError, OSError) as error:
            say(f"warning: {error}; training goes on, and with the next checkpoint copies again")

    def wait(self, step: int) -> None:
        """Wait for the last copy to end, and say once if that holds up the training."""
        started_at = clock()
        if self._copying is not None:
            wait([self._copying])  # whatever became of it
        waited_s = clock() - started_at
        if waited_s >= SLOW_S and not self._is_slow:
            self._is_slow = True
            say(
                f"warning: training waited {waited_s:.0f} s at update {step} for the previous checkpoint to be "
                "copied to training.mirror; raise training.checkpoint_every, or use a faster mirror"
            )

    def close(self) -> None:
        self.start_copy()
        self._thread.shutdown()


@contextlib.contextmanager
def open_mirror(url: str) -> Iterator[Any]:
    """Open the mirror as a file system of its own. Each service has its own kinds of errors."""
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem

    try:
        # Other machines may write there too, so a list of files is never taken from a cache.
        service, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        yield DirFileSystem(root, service)
    except UserError as error:
        raise UserError(f"training.mirror={url}: {error}") from None
    except ImportError as error:
        raise UserError(f"training.mirror={url}: {error}; {name_remedy('s3fs')}") from None
    except Exception as error:
        raise Failure(
            f"training.mirror={url}: {error!r:.300}; try again, or without it (null)"
        ) from None


def list_mirrored(mirror: Any) -> list[str]:
    """List the complete folders in a mirror; a later checkpoint comes after an earlier one."""
    suffix = f"/{MANIFEST_FILE}"
    folders = [name.removesuffix(suffix) for name in mirror.find("") if name.endswith(suffix)]
    return sorted(name for name in folders if re.fullmatch(FOLDER_NAMES, name))


# ---- after a checkpoint -----------------------------------------------------------------------------------


def copy_run(url: str, run: RunFolder, store: Path) -> None:
    """Make the mirror like the run folder."""
    paths = [run.average, *map(run.checkpoint, list_steps(run))]
    folders = {str(path.relative_to(run.path)): path for path in paths}
    folders["store"] = store
    with open_mirror(url) as mirror:
        for path in run.path.glob("[!.]*.*"):
            if path.is_file():
                put_file(mirror, path, path.name)
        for name, folder in folders.items():
            if (folder / MANIFEST_FILE).exists():
                put_folder(mirror, folder, name)
        for name in list_mirrored(mirror):
            if name not in folders:
                mirror.rm_file(f"{name}/{MANIFEST_FILE}")
                mirror.rm(name, recursive=True)


def put_folder(mirror: Any, folder: Path, name: str) -> None:
    # If the folder is replaced meanwhile, this one no longer fits, and the next copy brings the other.
    content = (folder / MANIFEST_FILE).read_bytes()
    manifest = f"{name}/{MANIFEST_FILE}"
    if mirror.exists(manifest):
        if mirror.cat_file(manifest) == content:
            return
        mirror.rm_file(manifest)
    for file in read_manifest(folder):
        put_file(mirror, folder / file, f"{name}/{file}")
    mirror.pipe_file(f"{manifest}.part", content)
    mirror.mv(f"{manifest}.part", manifest)


def put_file(mirror: Any, path: Path, name: str) -> None:
    """Copy a file so that it appears at once, complete."""
    if not mirror.fs.async_impl:  # object stores have no folders
        mirror.makedirs(name.rpartition("/")[0], exist_ok=True)
    mirror.put_file(str(path), f"{name}.part")
    mirror.mv(f"{name}.part", name)


# ---- at the start -------------------------------------------------------------------------------------


def fetch_run(url: str, config: RunConfig) -> RunConfig | None:
    """Fetch the run of this config if its newest checkpoint is not here, and the store if there is none
    here. Return the config that the run began with if it was fetched.
    """
    run = config.run_folder
    newest = max(list_steps(run), default=0)
    with open_mirror(url) as mirror:
        recorded = find_mirrored_run(mirror, config)
        names = list_mirrored(mirror)
        is_behind = any((parse_step(Path(name).name) or 0) > newest for name in names)
        if is_behind:
            say(f"fetching {run.path} from {url}")
            run.path.mkdir(parents=True, exist_ok=True)
            for name in (CONFIG_FILE, METRICS_FILE):
                write_bytes(run.path / name, mirror.cat_file(name))
        for name in names:
            is_store = name == "store"
            folder = Path(config.data.store) if is_store else run.path / name
            if (is_behind or is_store) and not folder.exists():
                write_folder(folder, partial(fetch_folder, mirror, name))
    return recorded if is_behind else None


def fetch_folder(mirror: Any, name: str, folder: Path) -> None:
    mirror.get_file(f"{name}/{MANIFEST_FILE}", str(folder / MANIFEST_FILE))
    for file in read_manifest(folder):
        mirror.get_file(f"{name}/{file}", str(folder / file))
    verify(folder)


def find_mirrored_run(mirror: Any, config: RunConfig) -> RunConfig | None:
    """Return the config that the run in a mirror began with, or None if the place is empty. Refuse what
    is something other than this run, because it would be overwritten.
    """
    recorded, changes = None, []
    if mirror.exists(CONFIG_FILE):
        recorded = parse_recorded_config(mirror.cat_file(CONFIG_FILE), CONFIG_FILE)
        changes = list_differences(recorded, config)
    elif mirror.exists(""):
        # An object store may list the folder itself, and a kill may leave a part of the first file.
        changes = [
            name for name in mirror.ls("", detail=False) if name and not name.endswith(".part")
        ][:1]
    if changes:
        raise UserError(
            f"holds something other than this run ({'; '.join(changes)}); restore the settings of the run "
            "there, or give an empty place"
        )
    return recorded
