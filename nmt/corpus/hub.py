"""Datasets: of the Hugging Face hub, folders in its layout, and folders that `save_to_disk` wrote.

huggingface_hub fetches files into the cache that other programs share: each appears there whole, named
by the hub's sha256 if there is one, as for all large files. It compares no digest, so that is done
here. Then a dataset of the hub is a folder like any other: `datasets` finds the files of a split, and
reads what is neither parquet nor Arrow.
"""

import contextlib
import functools
import gc
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.file_formats import ROWS_PER_BATCH, read_parquet_tables
from nmt.corpus.text_files import digest_source
from nmt.system.errors import UserError, describe_error, explain_missing
from nmt.system.extras import import_extra
from nmt.system.files import read_json
from nmt.system.progress import Progress, say

if TYPE_CHECKING:
    import pyarrow

HUB_ADDRESS = "hf://"
CARD = "README.md"  # says which files are a subset and a split
Patterns = dict[str, list[str]]  # of the files of each split
SAVED_STATE_FILE = "state.json"  # names the files of a split that `save_to_disk` wrote


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def name_hub_file(path: Path) -> str | None:
    """Return the hub's address of a file in the cache, which is the same on all machines."""
    match = re.search(r"/datasets--([^/]+)/snapshots/([0-9a-f]{40})/(.+)", str(path))
    if match is None:
        return None
    return f"{HUB_ADDRESS}datasets/{match[1].replace('--', '/')}@{match[2]}/{match[3]}"


def describe_dataset(corpus: CorpusConfig) -> str:
    return " ".join(filter(None, (corpus.dataset, corpus.subset, _name_split(corpus))))


def find_dataset_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """The files on this machine behind a split: none if it comes from the hub."""
    folder = _name_folder(corpus, data)
    return _find_split(folder, corpus) if folder.is_dir() else []


def fetch_dataset_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """The same files, or those of the hub, which are now in its cache."""
    files = find_dataset_files(corpus, data)
    if not files:
        files = _find_split(fetch_snapshot(corpus), corpus)
        for path in files:
            _check_digest(path)
    return files


def read_dataset_tables(
    paths: list[Path], corpus: CorpusConfig, data: DataConfig
) -> Iterator["pyarrow.Table"]:
    """Read a split, whose files are here by now."""
    if {path.suffix for path in paths} == {".parquet"}:
        for path in paths:
            yield from read_parquet_tables(path, data)
        return
    folder = _name_folder(corpus, data)
    if not folder.is_dir():
        folder = fetch_snapshot(corpus)
    try:
        with _open_datasets(corpus) as datasets:
            # Streaming reads a folder as it is, without copies in a cache.
            builder = datasets.load_dataset_builder(**_choose_files(folder, corpus))
            rows = builder.as_streaming_dataset(split=_name_split(corpus))
            yield from rows.with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
    finally:
        # Arrow's threads must end now: at the end of the interpreter they abort it (apache/arrow
        # 45214).
        rows = None
        gc.collect()


def _name_folder(corpus: CorpusConfig, data: DataConfig) -> Path:
    """Return the dataset's folder if it is not on the hub."""
    return Path(data.root).absolute() / str(corpus.dataset)


def _name_split(corpus: CorpusConfig) -> str:
    return corpus.split or "train"


# ---- on the hub -------------------------------------------------------------------------------------------------


@functools.cache
def fetch_snapshot(corpus: CorpusConfig) -> Path:
    """Fetch the files of a split, and return the folder of their commit in the cache. The hub is asked
    once, and not at all for a given commit that is in the cache.
    """
    with _open_datasets(corpus):
        from huggingface_hub import errors, snapshot_download

        find = partial(snapshot_download, str(corpus.dataset), repo_type="dataset")
        card = [] if is_offline() else [CARD]
        commit = find(revision=corpus.revision, allow_patterns=card, local_files_only=is_offline())
        folder = Path(commit)
        patterns = _list_patterns(folder, corpus)
        if not patterns and corpus.subset:
            patterns = [f"*{corpus.subset}*"]
        try:
            find(revision=folder.name, allow_patterns=patterns or None, local_files_only=True)
        except errors.LocalEntryNotFoundError:
            if is_offline():
                raise
            _download(folder, patterns, corpus)
        return folder


def _download(folder: Path, patterns: list[str], corpus: CorpusConfig) -> None:
    """Download what is missing of a commit, a file at a time, which Ctrl-C ends at once."""
    from huggingface_hub import get_cached_repo_tree, hf_hub_download
    from huggingface_hub.utils import filter_repo_objects

    dataset, revision = str(corpus.dataset), folder.name
    tree = get_cached_repo_tree(dataset, repo_type="dataset", revision=revision)
    sizes = {file.path: file.size for file in tree}
    chosen = filter_repo_objects(sizes, allow_patterns=patterns or None)
    names = [name for name in chosen if not (folder / name).is_file()]
    total = sum(sizes[name] for name in names)
    what = f"dataset {describe_dataset(corpus)}"
    say(f"{what}: downloading {total:,} bytes")
    with Progress(f"download {what}", total, "bytes") as progress:
        for name in names:
            hf_hub_download(dataset, name, repo_type="dataset", revision=revision)
            progress.advance(sizes[name])


def _check_digest(path: Path) -> None:
    """Remove a file that was damaged on its way or in the cache, or it would stay for ever."""
    blob = path.resolve()
    if re.fullmatch("[0-9a-f]{64}", blob.name) and digest_source(path) != blob.name:
        blob.unlink()
        raise UserError(
            f"{path}: was damaged (its sha256 was not {blob.name}) and is removed; run the same command "
            "again, which downloads it; if it is damaged again, so is the hub's copy"
        )


# ---- in a folder ------------------------------------------------------------------------------------------------


def _find_split(folder: Path, corpus: CorpusConfig) -> list[Path]:
    """The files of a split in a folder in the hub's layout."""
    with _open_datasets(corpus) as datasets:
        builder = datasets.load_dataset_builder(**_choose_files(folder, corpus))
        splits = builder.config.data_files or {}
    paths = sorted(map(Path, _choose_split(splits, corpus)))
    folders = sorted({path.parent.name for path in paths})
    if corpus.subset is None and len(folders) > 1:
        raise _explain_choice(corpus, "subset", folders)
    _check_all_parts(paths)
    return paths


def _choose_files(folder: Path, corpus: CorpusConfig) -> dict[str, Any]:
    """Choose what `datasets` reads: what the card says, or else the files of a subset by their names."""
    patterns = _list_patterns(folder, corpus)
    if not patterns and corpus.subset and (folder / corpus.subset).is_dir():
        return _choose_files(folder / corpus.subset, replace(corpus, subset=None))
    names = patterns
    if not patterns and any(folder.rglob("data-*-of-*.arrow")):  # as `save_to_disk` calls them
        names = [SAVED_STATE_FILE]
    for name in names:
        if not has_magic(name) and not (folder / name).is_file():
            raise explain_missing(folder / name, "give the whole folder of the dataset")
    files = {_name_split(corpus): patterns} if patterns else None
    return {"path": str(folder), "name": corpus.subset, "data_files": files}


def _list_patterns(folder: Path, corpus: CorpusConfig) -> list[str]:
    """The patterns of a split's files, if something in the folder says what its splits are."""
    splits = _list_saved_splits(folder) or _read_card(folder, corpus)
    return _choose_split(splits, corpus) if splits else []


def _choose_split(splits: Patterns, corpus: CorpusConfig) -> list[str]:
    name = _name_split(corpus)
    if name not in splits:
        raise _explain_choice(corpus, "split", splits)
    return splits[name]


def _list_saved_splits(folder: Path) -> Patterns:
    """The files that `save_to_disk` of `datasets` wrote: none if it did not write this folder."""
    if (folder / SAVED_STATE_FILE).is_file():
        return {"train": _list_saved_files(folder, "")}
    names = [file.parent.name for file in folder.glob(f"*/{SAVED_STATE_FILE}")]
    return {name: _list_saved_files(folder, name) for name in sorted(names)}


def _list_saved_files(folder: Path, split: str) -> list[str]:
    """The files of a split. Others beside them are of an earlier save, or what `map`, `filter` and
    `shuffle` keep there.
    """
    state = (folder / split / SAVED_STATE_FILE).resolve()  # in the hub's cache it is a link
    try:
        files = read_json(state)["_data_files"]
        # whatever folder a stranger's file names
        return [os.path.join(split, os.path.basename(file["filename"])) for file in files]
    except (LookupError, TypeError):
        raise UserError(
            f"{state}: does not list the files of the dataset; use another copy"
        ) from None


def _read_card(folder: Path, corpus: CorpusConfig) -> Patterns:
    """The patterns of each split of the subset, if the dataset's card has any."""
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    card = folder / CARD
    if not card.is_file():
        return {}
    subsets = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data)
    if not subsets:
        return {}
    subset = corpus.subset or subsets.get_default_config_name()
    if subset not in subsets:
        raise _explain_choice(corpus, "subset", subsets)
    splits: Patterns = sanitize_patterns(subsets[subset].get("data_files", {}))
    for pattern in chain(*splits.values()):
        if re.search(r"^/|(^|/)\.\.(/|$)|:", pattern):
            raise UserError(
                f"dataset {corpus.dataset}: its {CARD} names {pattern!r}, which is not in the dataset; "
                "use another copy"
            )
    return splits


def _explain_choice(corpus: CorpusConfig, key: str, known: Iterable[str]) -> UserError:
    return UserError(
        f"dataset {describe_dataset(corpus)}: has no such {key}; give {key}: {' or '.join(known)}"
    )


def _check_all_parts(paths: list[Path]) -> None:
    """Refuse missing files: `train-00002-of-00030.parquet` says how many there must be."""
    counts = Counter(re.sub(r"-\d{5}(-of-\d{5}\.\w+)$", r"-*\1", str(path)) for path in paths)
    for name, n_found in counts.items():
        match = re.search(r"-\*-of-(\d{5})\.\w+$", name)
        n = int(match[1]) if match else 0
        if n_found < n:
            raise UserError(f"{name}: {n - n_found} of {n} files are missing; download them")


@contextlib.contextmanager
def _open_datasets(corpus: CorpusConfig) -> Iterator[Any]:
    """`datasets`, quiet. A refusal of the hub, and whatever a user's dataset can do wrong, is one line."""
    datasets, hub = import_extra("datasets"), import_extra("huggingface_hub")
    for library in (datasets, hub.utils):
        library.logging.set_verbosity(logging.CRITICAL)
        library.disable_progress_bars()
    try:
        yield datasets
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"dataset {_explain(error, corpus)}") from None


def _explain(error: Exception, corpus: CorpusConfig) -> str:
    from huggingface_hub import errors

    name = corpus.dataset
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{name}: the hub has no revision {corpus.revision!r} of it; give one of its commits or "
            "branches as revision:, or leave it out"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name}: the hub has no such dataset, or its owner restricts access; check the id, or log "
            "in with `hf auth login`"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if is_offline() else "Hugging Face cannot be reached"
        folder = f"FOLDER/{corpus.subset or 'data'}/{_name_split(corpus)}"
        return (
            f"{name}: {why}, and not all of it is in the local cache; give local files instead, "
            "data.train=[{src: FILE, tgt: FILE}], or parquet files in the hub's layout, "
            f"{folder}-00000-of-00001.parquet, as dataset: FOLDER"
        )
    remedy = "check its id, subset, split, revision and files"
    if isinstance(error, OSError) and error.errno:
        remedy = f"check {error.filename or 'the disk'}"
    return f"{describe_dataset(corpus)}: {describe_error(error)}; {remedy}"
