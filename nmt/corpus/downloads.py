"""What may come over the network: datasets of the Hugging Face hub and sacreBLEU's test sets.

Both are other people's, so their failures are reported in one line, soon, and with the local way
out. With HF_HUB_OFFLINE set nothing touches the network: only what is in their caches, or below
data.root in the hub's layout, is read.
"""

import contextlib
import difflib
import gc
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.file_formats import ROWS_PER_BATCH
from nmt.corpus.text_files import TextFile, describe_error
from nmt.known_test_sets import SACREBLEU_NAMES
from nmt.system.errors import UserError
from nmt.system.extras import import_extra
from nmt.system.progress import is_terminal

if TYPE_CHECKING:
    import pyarrow

SERVER_TIMEOUT_S = 5.0  # how long a server may stay silent


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


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
    is_local, arguments = _choose_dataset(corpus, data)
    if not is_local:
        return []
    with _open_hub(corpus, is_local) as datasets:
        files = datasets.load_dataset_builder(**arguments).config.data_files or {}
    paths = sorted(Path(name) for name in files.get(corpus.split or "train", []))
    folders = sorted({path.parent.name for path in paths})
    if corpus.subset is None and len(folders) > 1:
        raise UserError(
            f"dataset {corpus.dataset}: holds several subsets; give subset: {' or '.join(folders)}"
        )
    _check_all_parts(paths)
    return paths


def _check_all_parts(paths: list[Path]) -> None:
    """`train-00002-of-00030.parquet` says how many files there are."""
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


def read_dataset_tables(corpus: CorpusConfig, data: DataConfig) -> Iterator["pyarrow.Table"]:
    saved = _find_saved_split(corpus, data)
    is_local, arguments = _choose_dataset(corpus, data)
    split = corpus.split or "train"
    try:
        with _open_hub(corpus, is_local) as datasets:
            if saved is not None:
                rows = datasets.load_from_disk(str(saved))
            else:
                # Streaming reads a local folder as it is, without copies in a cache.
                rows = datasets.load_dataset(**arguments, split=split, streaming=is_local)
            yield from rows.with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
    finally:
        # Arrow's threads must end now: at the end of the interpreter they abort it (apache/arrow
        # 45214).
        rows = None
        gc.collect()


def _find_saved_split(corpus: CorpusConfig, data: DataConfig) -> Path | None:
    """The folder of a split that `save_to_disk` of `datasets` wrote; None if it did not write this
    dataset.
    """
    folder = Path(data.root) / str(corpus.dataset)
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
        raise UserError(
            f"dataset {corpus.dataset}: has no split {corpus.split or 'train'!r}; "
            f"give one of {', '.join(map(repr, splits))}"
        )
    return folder / (corpus.split or "train")


def _choose_dataset(corpus: CorpusConfig, data: DataConfig) -> tuple[bool, dict[str, Any]]:
    """Whether it is a folder below data.root rather than an id of the hub, and what `datasets` is
    asked for.
    """
    folder = Path(data.root) / str(corpus.dataset)
    if not folder.is_dir():
        return False, {"path": corpus.dataset, "name": corpus.subset, "revision": corpus.revision}
    has_readme = (folder / "README.md").is_file()  # without it `datasets` knows no subsets
    if corpus.subset and (folder / corpus.subset).is_dir() and not has_readme:
        return True, {"path": str(folder / corpus.subset)}
    return True, {"path": str(folder), "name": corpus.subset}


@contextlib.contextmanager
def _open_hub(corpus: CorpusConfig, is_local: bool) -> Iterator[Any]:
    """`datasets`, quiet, its failures reported in one line.

    If the hub does not answer at once only its cache is used: left to itself, `datasets` tries for
    23 seconds.
    """
    datasets = import_extra("datasets")
    import huggingface_hub

    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    if is_local or not is_terminal():
        datasets.disable_progress_bars()
    settings = huggingface_hub.constants
    if is_offline() or not (is_local or _is_reachable(settings.ENDPOINT)):
        settings.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield datasets
    except UserError:
        raise
    except ConnectionError:
        why = "HF_HUB_OFFLINE is set" if is_offline() else "Hugging Face cannot be reached"
        raise UserError(
            f"dataset {corpus.dataset}: {why}, and it is not in the local cache; give local "
            "files instead, data.train=[{src: FILE, tgt: FILE}], or parquet files in the hub's layout, "
            f"FOLDER/{corpus.subset or 'data'}/{corpus.split or 'train'}-00000-of-00001.parquet, as dataset: FOLDER"
        ) from None
    except Exception as error:  # whatever somebody's dataset can do wrong, in its own words
        name = " ".join(part for part in (corpus.dataset, corpus.subset, corpus.split) if part)
        raise UserError(
            f"dataset {name}: {describe_error(error)}; check its id, subset, split and revision"
        ) from None


def _is_reachable(url: str) -> bool:
    request = urllib.request.Request(url, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True  # an answer, if not a friendly one
    except OSError:
        return False
    return True


# ---- sacreBLEU --------------------------------------------------------------------------------------------------


def find_test_set_files(name: str, langpair: str) -> tuple[TextFile, TextFile]:
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
    if langpair not in known.langpairs:
        raise UserError(
            f"sacrebleu: {name} does not have {langpair}; set data.src and data.tgt to one of "
            f"{', '.join(known.langpairs)}"
        )
    remedy = "give local files instead, {src: FILE, tgt: FILE}"
    if is_offline() and find_cached_test_set(name, langpair) is None:
        raise UserError(
            f"sacrebleu: {name} is not in sacreBLEU's cache and cannot be downloaded, because "
            f"HF_HUB_OFFLINE is set; {remedy}"
        )
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SERVER_TIMEOUT_S)  # sacreBLEU sets none
    try:
        return _list_files(known, langpair)
    except (Exception, SystemExit) as error:  # it exits if a download is damaged
        raise UserError(
            f"sacrebleu: {name} cannot be downloaded ({describe_error(error)}); {remedy}, or, if "
            f"{Path(sacrebleu.SACREBLEU_DIR, name)} is incomplete, remove it and try again"
        ) from None
    finally:
        socket.setdefaulttimeout(timeout)


def find_cached_test_set(name: str, langpair: str) -> tuple[TextFile, TextFile] | None:
    """The same, of a set that sacreBLEU knows, if it is in its cache already."""
    from sacrebleu.dataset import DATASETS

    known = DATASETS[name]
    for field in known.fieldnames(langpair):
        if not os.path.exists(known._get_txt_file_path(langpair, field)):
            return None
    return _list_files(known, langpair)


def _list_files(known: Any, langpair: str) -> tuple[TextFile, TextFile]:
    src = known.get_source_file(langpair)
    ref = known.get_reference_files(langpair)[0]
    return TextFile(Path(src)), TextFile(Path(ref))
