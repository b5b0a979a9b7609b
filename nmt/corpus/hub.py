"""Files of a dataset of the Hugging Face hub, in the cache that other programs share.

huggingface_hub fetches and keeps them. It compares no digest, so that is done here, for the files whose
sha256 the hub names, which all large ones are. Without the hub, only the cache is used.
"""

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmt.corpus.text_files import digest_source
from nmt.system.errors import UserError
from nmt.system.extras import import_extra
from nmt.system.progress import Progress, say

SERVER_TIMEOUT_S = 5.0  # how long a server may stay silent before it counts as unreachable
HUB_ADDRESS = "hf://"


@dataclass(frozen=True)
class HubDataset:
    """One commit of a dataset: all its files, or those in the cache if the hub cannot be reached."""

    id: str
    folder: Path  # of the commit, in the cache; not all files need be there
    sizes: dict[str, int]  # of the files, by their names in the dataset
    is_reachable: bool


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def name_hub_file(path: Path) -> str | None:
    """Return the hub's address of a file in the cache, which is the same on all machines."""
    match = re.search(r"/datasets--([^/]+)/snapshots/([0-9a-f]{40})/(.+)", str(path))
    if match is None:
        return None
    return f"{HUB_ADDRESS}datasets/{match[1].replace('--', '/')}@{match[2]}/{match[3]}"


@functools.cache
def find_on_hub(name: str, revision: str | None) -> HubDataset | None:
    """Ask the hub once, or else the cache; None if it is in neither."""
    hub = import_extra("huggingface_hub")
    from huggingface_hub import constants, errors, utils

    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    api = hub.HfApi()
    sizes = {}
    try:
        if is_offline():
            raise errors.OfflineModeIsEnabled
        info = api.dataset_info(
            name, revision=revision, files_metadata=True, timeout=SERVER_TIMEOUT_S
        )
        for entry in info.siblings:
            if ".." not in entry.rfilename.split("/") and not entry.rfilename.startswith("/"):
                sizes[entry.rfilename] = entry.size or 0
        if "README.md" in sizes:  # says where subsets and splits are
            api.hf_hub_download(name, "README.md", repo_type="dataset", revision=revision)
        store = Path(constants.HF_HUB_CACHE).absolute() / f"datasets--{name.replace('/', '--')}"
        return HubDataset(name, store / "snapshots" / info.sha, sizes, True)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except (errors.HTTPError, errors.OfflineModeIsEnabled):
        pass  # the cache may have it
    try:
        snapshot = api.snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            local_files_only=True,
            allow_patterns=[],
        )
    except errors.LocalEntryNotFoundError:
        return None
    folder = Path(snapshot)
    for path in filter(Path.is_file, folder.rglob("*")):
        sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return HubDataset(name, folder, sizes, False)


@contextlib.contextmanager
def show_as_folder(dataset: HubDataset) -> Iterator[Path]:
    """Show the dataset as a folder, for `datasets`, which finds splits by names alone. A file that is not
    in the cache is empty.
    """
    left_out = {"dataset_infos.json"}  # obsolete, but read if it is there
    if not dataset.is_reachable:
        left_out.add("README.md")  # names subsets that the cache may lack, which `datasets` refuses
    with tempfile.TemporaryDirectory(prefix="nmt-hub-") as temporary:
        view = Path(temporary).resolve()
        for name in dataset.sizes.keys() - left_out:
            (view / name).parent.mkdir(parents=True, exist_ok=True)
            if (dataset.folder / name).is_file():
                (view / name).symlink_to(dataset.folder / name)
            else:
                (view / name).touch()
        try:
            yield view
        except UserError as error:
            note = "" if dataset.is_reachable else "; only the local cache was searched"
            raise UserError(str(error).replace(str(view), dataset.id) + note) from None


def download_files(dataset: HubDataset, names: Sequence[str], what: str) -> list[Path]:
    """Return where the files are in the cache, after fetching what is missing."""
    missing = [name for name in names if not (dataset.folder / name).is_file()]
    if missing and not dataset.is_reachable:
        raise UserError(
            f"{what}: {missing[0]} is not in the local cache; run the command once with network access"
        )
    if missing:
        _fetch(dataset, missing, what)
    paths = [dataset.folder / name for name in names]
    for path in paths:
        _check_digest(path)
    return paths


def _fetch(dataset: HubDataset, names: Sequence[str], what: str) -> None:
    from huggingface_hub import hf_hub_download

    commit = dataset.folder.name
    size = sum(dataset.sizes[name] for name in names)
    say(f"{what}: downloading {size:,} bytes")
    with Progress(f"download {what}", size, "bytes") as progress:
        for name in names:
            hf_hub_download(dataset.id, name, repo_type="dataset", revision=commit)
            progress.advance(dataset.sizes[name])


def _check_digest(path: Path) -> None:
    """Remove a file that was damaged on its way or in the cache, or it would stay for ever. The cache
    keeps a file whose sha256 the hub names under this name.
    """
    blob = path.resolve()
    if re.fullmatch("[0-9a-f]{64}", blob.name) and digest_source(path) != blob.name:
        blob.unlink()
        raise UserError(
            f"{path}: was damaged (its sha256 was not {blob.name}) and is removed; run the same command "
            "again, which downloads it; if it is damaged again, so is the hub's copy"
        )
