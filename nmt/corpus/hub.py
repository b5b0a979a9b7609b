"""Files of a dataset of the Hugging Face hub, in the cache that other programs share.

huggingface_hub discards a partial file when a connection breaks, and compares no digest. So files
with a sha256, which all large ones have, are fetched here: each continues where it stopped, and enters
the cache only once it has that sha256. Without the hub, only the cache is used.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmt.corpus.text_files import describe_error, digest_source
from nmt.system.errors import UserError
from nmt.system.extras import import_extra
from nmt.system.files import lock, sync_to_disk
from nmt.system.progress import Progress, say

SERVER_TIMEOUT_S = 5.0  # how long a server may stay silent before it counts as unreachable
WAITS_S = (1, 2, 4, 8)  # before each further attempt; four in a row without a byte are the end
PASSING_STATUSES = (408, 429, 500, 502, 503, 504)
HUB_ADDRESS = "hf://"


@dataclass(frozen=True)
class HubFile:
    name: str  # in the dataset
    size: int
    sha256: str | None  # None for small files, which git keeps itself


@dataclass(frozen=True)
class HubDataset:
    """One commit of a dataset: all its files, or those in the cache if the hub cannot be reached."""

    id: str
    commit: str
    store: Path  # its part of the cache
    files: dict[str, HubFile]
    is_reachable: bool

    @property
    def folder(self) -> Path:
        return self.store / "snapshots" / self.commit

    def count_bytes(self, file: HubFile) -> int:
        """How many bytes of the file an earlier attempt has left."""
        for path in (self.store / "blobs" / str(file.sha256), self.partial(file)):
            if path.is_file():
                return path.stat().st_size
        return 0

    def partial(self, file: HubFile) -> Path:
        return self.store / "blobs" / f"{file.sha256}.incomplete"


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def name_hub_file(path: Path) -> str | None:
    """Return the hub's address of a file in the cache, which is the same on all machines."""
    match = re.search(r"/datasets--([^/]+)/snapshots/([0-9a-f]{40})/(.+)", str(path))
    if match is None:
        return None
    return f"{HUB_ADDRESS}datasets/{match[1].replace('--', '/')}@{match[2]}/{match[3]}"


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed, because the connection broke or the server is busy."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code in PASSING_STATUSES
    return isinstance(error, errors.HTTPError | errors.OfflineModeIsEnabled)


# ---- what there is ----------------------------------------------------------------------------------------------


@functools.cache
def find_on_hub(name: str, revision: str | None) -> HubDataset | None:
    """Ask the hub once, or else the cache; None if it is in neither."""
    hub = import_extra("huggingface_hub")
    from huggingface_hub import constants, errors, utils

    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    store = Path(constants.HF_HUB_CACHE).absolute() / f"datasets--{name.replace('/', '--')}"
    api = hub.HfApi()
    files = {}
    try:
        if is_offline():
            raise errors.OfflineModeIsEnabled
        info = api.dataset_info(
            name, revision=revision, files_metadata=True, timeout=SERVER_TIMEOUT_S
        )
        for entry in info.siblings:
            if ".." not in entry.rfilename.split("/") and not entry.rfilename.startswith("/"):
                sha256 = entry.lfs and entry.lfs.sha256
                files[entry.rfilename] = HubFile(entry.rfilename, entry.size or 0, sha256)
        if "README.md" in files:  # says where subsets and splits are
            api.hf_hub_download(name, "README.md", repo_type="dataset", revision=revision)
        return HubDataset(name, info.sha, store, files, is_reachable=True)
    except Exception as error:
        if not _may_pass(error):
            raise
    try:
        folder = api.snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            local_files_only=True,
            allow_patterns=[],
        )
    except errors.LocalEntryNotFoundError:
        return None
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        file_name, blob = path.relative_to(folder).as_posix(), path.resolve()
        sha256 = blob.name if re.fullmatch("[0-9a-f]{64}", blob.name) else None
        files[file_name] = HubFile(file_name, blob.stat().st_size, sha256)
    return HubDataset(name, Path(folder).name, store, files, is_reachable=False)


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
        for name in dataset.files.keys() - left_out:
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


# ---- fetching ---------------------------------------------------------------------------------------------------


def download_files(dataset: HubDataset, files: Sequence[HubFile], what: str) -> list[Path]:
    """Return where the files are in the cache, each with its sha256, after fetching what is missing."""
    missing = [file for file in files if not _is_sound(dataset.folder / file.name, file)]
    if missing and not dataset.is_reachable:
        raise UserError(
            f"{what}: {missing[0].name} is not in the local cache; run the command once with network access"
        )
    if missing:
        (dataset.store / "blobs").mkdir(parents=True, exist_ok=True)
        with lock(dataset.store, "downloading"):
            _fetch(dataset, missing, what)
    return [dataset.folder / file.name for file in files]


def _is_sound(path: Path, file: HubFile) -> bool:
    """Whether the file is there and intact. A damaged one is removed, or it would stay forever."""
    if not path.is_file():
        return False
    if file.sha256 is None or digest_source(path) == file.sha256:
        return True
    say(f"warning: {path}: is damaged (its sha256 is not {file.sha256}); removing it")
    path.resolve().unlink()
    return False


def _fetch(dataset: HubDataset, files: Sequence[HubFile], what: str) -> None:
    from huggingface_hub import HfApi

    size = sum(file.size for file in files)
    n_kept = sum(map(dataset.count_bytes, files))
    kept = f", {n_kept:,} of them kept from an earlier attempt" if n_kept else ""
    try:
        if shutil.disk_usage(dataset.store).free < size - n_kept:
            raise OSError(errno.ENOSPC, "it would not fit")
        say(f"{what}: downloading {size:,} bytes{kept}")
        with Progress(f"download {what}", size, "bytes", start=n_kept) as progress:
            for file in files:
                if file.sha256 and not _is_sound(dataset.store / "blobs" / file.sha256, file):
                    _receive(dataset, file, progress)
                # Gives the blob its name in the dataset; a small file is fetched here.
                HfApi().hf_hub_download(
                    dataset.id, file.name, repo_type="dataset", revision=dataset.commit
                )
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        n_left = size - sum(map(dataset.count_bytes, files))
        raise UserError(
            f"{what}: {dataset.store} needs {n_left:,} bytes more, and "
            f"{shutil.disk_usage(dataset.store).free:,} are free; free some space and run the same "
            "command again, which keeps what was downloaded, or set HF_HOME to a folder on a larger disk"
        ) from None


def _receive(dataset: HubDataset, file: HubFile, progress: Progress) -> None:
    """Fetch one file, trying again as long as each attempt makes progress."""
    place = f"dataset {dataset.id}: {file.name}"
    partial = dataset.partial(file)
    n_fruitless = 0
    while (n_before := dataset.count_bytes(file)) < file.size:
        reason = "the server ended it"
        try:
            _append_rest(dataset, file, progress)
        except Exception as error:
            if not _may_pass(error):
                raise
            reason = describe_error(error)
        n_bytes = dataset.count_bytes(file)
        if n_bytes < file.size:
            came = f"{n_bytes:,} of {file.size:,} bytes"
            stopped = f"{place}: the download stopped after {came} ({reason})"
            n_fruitless = 0 if n_bytes > n_before else n_fruitless + 1
            if n_fruitless == len(WAITS_S):
                raise UserError(f"{stopped}; run the same command again, which continues there")
            say(f"{stopped}; trying again")
            time.sleep(WAITS_S[n_fruitless])
    sha256 = digest_source(partial)
    if sha256 != file.sha256:
        partial.unlink()
        raise UserError(
            f"{place}: arrived damaged, with sha256 {sha256} instead of {file.sha256}, and was removed; run "
            "the same command again; if it is damaged again, so is the hub's copy"
        )
    sync_to_disk(partial)
    os.replace(partial, partial.with_suffix(""))


def _append_rest(dataset: HubDataset, file: HubFile, progress: Progress) -> None:
    from huggingface_hub import constants, get_session, hf_hub_url, utils

    url = hf_hub_url(dataset.id, file.name, repo_type="dataset", revision=dataset.commit)
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with open(dataset.partial(file), "ab") as output:
        n_kept = output.tell()
        asked = {"Range": f"bytes={n_kept}-", "Accept-Encoding": "identity"}
        headers = utils.build_hf_headers() | asked
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            utils.hf_raise_for_status(response)
            if response.status_code == 200:  # a server that sends whole files only
                output.truncate(0)
                progress.advance(-n_kept)
            for block in response.iter_bytes():
                output.write(block)
                progress.advance(len(block))
