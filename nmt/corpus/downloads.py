"""What may come over the network: datasets of the Hugging Face hub and sacreBLEU's test sets.

Neither is under our control, so their failures are reported quickly, in one line that says how to use
local files instead. With HF_HUB_OFFLINE set, the network is never used: only their caches, and files
below data.root in the hub's layout, are read.
"""

import contextlib
import difflib
import gc
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.file_formats import ROWS_PER_BATCH, read_parquet_tables
from nmt.corpus.hub import (
    SERVER_TIMEOUT_S,
    HubDataset,
    download_files,
    find_on_hub,
    is_offline,
    show_as_folder,
)
from nmt.known_test_sets import OUR_NAMES, SACREBLEU_NAMES
from nmt.system.errors import UserError, describe_error
from nmt.system.extras import import_extra
from nmt.system.files import COMPRESSED

if TYPE_CHECKING:
    import pyarrow


# ---- Hugging Face -----------------------------------------------------------------------------------------------


def find_dataset_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """The files on this machine behind a split: none if it comes from the hub."""
    saved = _find_saved_split(corpus, data)
    if saved is not None:
        arrow_files = sorted(saved.glob("*.arrow"))
        for file in arrow_files:
            if not file.is_file():  # a pipe would be waited for
                raise UserError(f"{file}: is not a file; download it again")
        return arrow_files
    folder = _dataset_folder(corpus, data)
    return _find_split(folder, corpus) if folder.is_dir() else []


def list_hub_files(corpus: CorpusConfig, data: DataConfig) -> dict[str, int]:
    """List the hub's files of a split and their sizes, without fetching them: none if the corpus is on
    this machine.
    """
    if corpus.dataset is None or _dataset_folder(corpus, data).is_dir():
        return {}
    dataset = _find_on_hub(corpus)
    with show_as_folder(dataset) as view:
        names = [path.relative_to(view).as_posix() for path in _find_split(view, corpus)]
        return {name: dataset.sizes[name] for name in names}


def fetch_hub_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """Fetch the same files into the cache, and return them."""
    files = list_hub_files(corpus, data)
    if not files:  # not of the hub
        return []
    with _explain_failures(corpus):
        return download_files(
            _find_on_hub(corpus), list(files), f"dataset {describe_dataset(corpus)}"
        )


def read_dataset_tables(
    paths: list[Path], corpus: CorpusConfig, data: DataConfig
) -> Iterator["pyarrow.Table"]:
    """Read a split, whose files are here by now."""
    if {path.suffix for path in paths} == {".parquet"}:
        for path in paths:
            yield from read_parquet_tables(path, data)
        return
    saved = _find_saved_split(corpus, data)
    folder = _dataset_folder(corpus, data)
    try:
        with contextlib.ExitStack() as stack:
            if not folder.is_dir():
                folder = stack.enter_context(show_as_folder(_find_on_hub(corpus)))
            datasets = stack.enter_context(_open_datasets(corpus))
            if saved is not None:
                rows = datasets.load_from_disk(str(saved))
            else:
                # Streaming reads a folder as it is, without copies in a cache.
                rows = datasets.load_dataset(
                    **_choose_subset(folder, corpus), split=corpus.split or "train", streaming=True
                )
            yield from rows.with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
    finally:
        # Arrow's threads must end now: at the end of the interpreter they abort it (apache/arrow
        # 45214).
        rows = None
        gc.collect()


def _dataset_folder(corpus: CorpusConfig, data: DataConfig) -> Path:
    """Return the dataset's folder if it is not on the hub."""
    return Path(data.root) / str(corpus.dataset)


def describe_dataset(corpus: CorpusConfig) -> str:
    parts = (corpus.dataset, corpus.subset, corpus.split or "train")
    return " ".join(filter(None, parts))


def _find_on_hub(corpus: CorpusConfig) -> HubDataset:
    with _explain_failures(corpus):
        dataset = find_on_hub(str(corpus.dataset), corpus.revision)
    if dataset is None:
        why = "HF_HUB_OFFLINE is set" if is_offline() else "Hugging Face cannot be reached"
        raise UserError(
            f"dataset {corpus.dataset}: {why}, and it is not in the local cache; give local "
            "files instead, data.train=[{src: FILE, tgt: FILE}], or parquet files in the hub's layout, "
            f"FOLDER/{corpus.subset or 'data'}/{corpus.split or 'train'}-00000-of-00001.parquet, as dataset: FOLDER"
        )
    return dataset


def _find_split(folder: Path, corpus: CorpusConfig) -> list[Path]:
    """The files of a split in a folder in the hub's layout."""
    with _open_datasets(corpus) as datasets:
        builder = datasets.load_dataset_builder(**_choose_subset(folder, corpus))
        files = builder.config.data_files or {}
    split = corpus.split or "train"
    if split not in files:
        raise _explain_missing_split(corpus, files)
    paths = sorted(Path(name) for name in files[split])
    folders = sorted({path.parent.name for path in paths})
    if corpus.subset is None and len(folders) > 1:
        raise UserError(
            f"dataset {corpus.dataset}: holds several subsets; give subset: {' or '.join(folders)}"
        )
    _check_all_parts(paths)
    return paths


def _explain_missing_split(corpus: CorpusConfig, splits: Iterable[str]) -> UserError:
    return UserError(
        f"dataset {corpus.dataset}: has no split {corpus.split or 'train'!r}; "
        f"give one of {', '.join(map(repr, splits))}"
    )


def _check_all_parts(paths: list[Path]) -> None:
    """Refuse missing files: `train-00002-of-00030.parquet` says how many there must be."""
    numbers_found: dict[tuple[Path, str, str, int], set[int]] = {}
    for path in paths:
        name = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)", path.name)
        if name is not None:
            stem, number, n, ending = name.groups()
            numbers_found.setdefault((path.parent, stem, ending, int(n)), set()).add(int(number))
    for (folder, stem, ending, n), numbers in numbers_found.items():
        missing = set(range(n)) - numbers
        if missing:
            raise UserError(
                f"{folder}: {len(missing)} of {n} files are missing, the first is "
                f"{stem}-{min(missing):05d}-of-{n:05d}{ending}; download them"
            )


def _find_saved_split(corpus: CorpusConfig, data: DataConfig) -> Path | None:
    """The folder of a split that `save_to_disk` of `datasets` wrote; None if it did not write this
    dataset.
    """
    folder = _dataset_folder(corpus, data)
    is_dict = (folder / "dataset_dict.json").is_file()  # of splits, each in a folder of its name
    if not is_dict and not (folder / "state.json").is_file():
        return None
    if corpus.subset or (corpus.split and not is_dict):
        key = "subset" if corpus.subset else "split"
        raise UserError(
            f"dataset {corpus.dataset}: was written by save_to_disk and has no {key}; leave out {key}:"
        )
    if not is_dict:
        return folder
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    if (corpus.split or "train") not in splits:
        raise _explain_missing_split(corpus, splits)
    return folder / (corpus.split or "train")


def _choose_subset(folder: Path, corpus: CorpusConfig) -> dict[str, Any]:
    """Choose the subset to ask `datasets` for."""
    has_readme = (folder / "README.md").is_file()  # without it `datasets` knows no subsets
    if corpus.subset and (folder / corpus.subset).is_dir() and not has_readme:
        return {"path": str(folder / corpus.subset)}
    return {"path": str(folder), "name": corpus.subset}


@contextlib.contextmanager
def _open_datasets(corpus: CorpusConfig) -> Iterator[Any]:
    """`datasets`, quiet, its failures reported in one line."""
    datasets = import_extra("datasets")
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    with _explain_failures(corpus):
        yield datasets


@contextlib.contextmanager
def _explain_failures(corpus: CorpusConfig) -> Iterator[None]:
    """Report in one line a refusal of the hub, and whatever a user's dataset can do wrong."""
    import_extra("huggingface_hub")
    from huggingface_hub import errors

    reasons = {
        errors.RevisionNotFoundError: f"the hub has no revision {corpus.revision!r} of it; give one of its "
        "commits or branches as revision:, or leave it out",
        errors.RepositoryNotFoundError: "the hub has no such dataset, or its owner restricts "
        "access; check the id, or log in with `hf auth login`",
        errors.LocalEntryNotFoundError: "Hugging Face cannot be reached any more; run the same command again",
    }
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        for kind, reason in reasons.items():
            if isinstance(error, kind):
                raise UserError(f"dataset {corpus.dataset}: {reason}") from None
        remedy = "check its id, subset, split and revision"
        if isinstance(error, OSError) and error.errno:
            remedy = f"check {error.filename or 'the disk'}"
        raise UserError(
            f"dataset {describe_dataset(corpus)}: {describe_error(error)}; {remedy}"
        ) from None


# ---- sacreBLEU --------------------------------------------------------------------------------------------------


def find_test_set_files(name: str, data: DataConfig) -> tuple[Path, Path]:
    """The two files of a known test set: sacreBLEU's own, otherwise NAME.LANG or NAME-src.LANG and
    NAME-ref.LANG beside the corpora.
    """
    try:
        return _find_files_of_sacrebleu(name, data)
    except UserError as error:
        problem = error
    files = find_files_beside(name, data)
    if files is not None:
        return files
    stem = OUR_NAMES.get(name, name)
    raise UserError(
        f"{problem} (or put {stem}.{data.src} and {stem}.{data.tgt} into {data.root})"
    ) from None


def find_files_beside(name: str, data: DataConfig) -> tuple[Path, Path] | None:
    """Return the two files of a known test set that are beside the corpora, if they are."""
    for folder in _list_folders(data):
        for stem in (name, OUR_NAMES.get(name, name)):
            src = _find_side(folder, stem, "src", data.src)
            ref = _find_side(folder, stem, "ref", data.tgt)
            if src and ref:
                return src, ref
    return None


def _list_folders(data: DataConfig) -> list[Path]:
    """data.root and the folders of the corpora, each once."""
    root = Path(data.root)
    folders = [root]
    for corpus in (data.test, data.valid, *data.train):
        if corpus is None:
            continue
        for name in (corpus.archive or corpus.src, corpus.file):
            if name is not None:
                folders.append((root / name).parent)
    return list(dict.fromkeys(folders))


def _find_side(folder: Path, stem: str, side: str, language: str) -> Path | None:
    for name in (f"{stem}.{language}", f"{stem}-{side}.{language}"):
        for ending in ("", *COMPRESSED):
            path = folder / f"{name}{ending}"
            if path.is_file():
                return path
    return None


def _find_files_of_sacrebleu(name: str, data: DataConfig) -> tuple[Path, Path]:
    """Source and first reference of a test set, downloaded by sacreBLEU if it has to be and may be."""
    import sacrebleu
    from sacrebleu.dataset import DATASETS

    given_name = name
    name = SACREBLEU_NAMES.get(name, name)
    if name not in DATASETS:
        names = [*SACREBLEU_NAMES, *DATASETS]
        close = difflib.get_close_matches(given_name.lower(), names, 3) or ["newstest2014"]
        raise UserError(
            f"sacrebleu: unknown test set {given_name!r}; did you mean {' or '.join(close)}?"
        )
    known = DATASETS[name]
    langpair = f"{data.src}-{data.tgt}"
    if langpair not in known.langpairs:
        raise UserError(
            f"sacrebleu: {name} does not have {langpair}; set data.src and data.tgt to one of "
            f"{', '.join(known.langpairs)}"
        )
    remedy = "give local files instead, {src: FILE, tgt: FILE}"
    if is_offline() and not is_test_set_cached(name, data):
        raise UserError(
            f"sacrebleu: {name} is not in sacreBLEU's cache and cannot be downloaded, because "
            f"HF_HUB_OFFLINE is set; {remedy}"
        )
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SERVER_TIMEOUT_S)  # sacreBLEU sets none
    try:
        src = known.get_source_file(langpair)
        return Path(src), Path(known.get_reference_files(langpair)[0])
    except (Exception, SystemExit) as error:  # it exits if a download is damaged
        raise UserError(
            f"sacrebleu: {name} cannot be downloaded ({describe_error(error)}); {remedy}, or, if "
            f"{Path(sacrebleu.SACREBLEU_DIR, name)} is incomplete, remove it and try again"
        ) from None
    finally:
        socket.setdefaulttimeout(timeout)


def is_test_set_cached(name: str, data: DataConfig) -> bool:
    """Whether sacreBLEU's cache has a set, which sacreBLEU knows by this name."""
    from sacrebleu.dataset import DATASETS

    known, langpair = DATASETS[name], f"{data.src}-{data.tgt}"
    fields = known.fieldnames(langpair)
    return all(os.path.exists(known._get_txt_file_path(langpair, field)) for field in fields)
