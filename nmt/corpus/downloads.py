"""What may come over the network: datasets of the Hugging Face hub and sacreBLEU's test sets.

Both are foreign, so their failures are told in one line, soon, and with the local way out. With HF_HUB_OFFLINE set
nothing touches the network: only what lies in their caches, or below data.root in the hub's layout, is read.
"""

import contextlib
import difflib
import gc
import os
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.tables import ROWS
from nmt.corpus.text_files import TextFile, reason
from nmt.system.errors import UserError

if TYPE_CHECKING:
    import pyarrow

PATIENCE_S = 5.0  # how long a server may stay silent
# WMT's sets by their own names. That of 2014 is the full one; wmt14 alone is what is left of it after filtering.
SACREBLEUS = {f"newstest{year}": f"wmt{year % 100:02}" for year in range(2008, 2022)} | {
    "newstest2014": "wmt14/full"
}
NEWSTEST_OF = {theirs: name for name, theirs in SACREBLEUS.items()}


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


# ---- Hugging Face -----------------------------------------------------------------------------------------------


def files_of_dataset(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """The files on this machine behind a split: none where it comes from the hub."""
    is_local, arguments = _arguments(corpus, data)
    if not is_local:
        return []
    with _hub(corpus, is_local) as datasets:
        files = datasets.load_dataset_builder(**arguments).config.data_files or {}
    paths = sorted(Path(name) for name in files.get(corpus.split or "train", []))
    folders = sorted({path.parent.name for path in paths})
    if corpus.subset is None and len(folders) > 1:
        raise UserError(
            f"dataset {corpus.dataset}: holds several subsets; give subset: {' or '.join(folders)}"
        )
    _check_complete(paths)
    return paths


def _check_complete(paths: list[Path]) -> None:
    """`train-00002-of-00030.parquet` says how many there are."""
    found: dict[tuple[Path, str, int], set[int]] = {}
    for path in paths:
        if part := re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)", path.name):
            found.setdefault((path.parent, part[1] + part[4], int(part[3])), set()).add(
                int(part[2])
            )
    for (folder, name, n), numbers in found.items():
        if missing := set(range(n)) - numbers:
            stem, _, ending = name.rpartition(".")
            raise UserError(
                f"{folder}: {len(missing)} of {n} files missing, the first is "
                f"{stem}-{min(missing):05d}-of-{n:05d}.{ending}; fetch it"
            )


def tables_of_dataset(corpus: CorpusConfig, data: DataConfig) -> Iterator["pyarrow.Table"]:
    is_local, arguments = _arguments(corpus, data)
    try:
        with _hub(
            corpus, is_local
        ) as datasets:  # streaming reads a local folder as it lies, without copies in a cache
            rows = datasets.load_dataset(
                **arguments, split=corpus.split or "train", streaming=is_local
            )
            yield from rows.with_format("arrow").iter(batch_size=ROWS)
    finally:
        rows = None
        gc.collect()  # arrow's threads must end now: at the end of the interpreter they abort it (apache/arrow 45214)


def _arguments(corpus: CorpusConfig, data: DataConfig) -> tuple[bool, dict[str, Any]]:
    """What `datasets` is asked for: a folder below data.root if there is one of that name, else an id of the hub."""
    folder = Path(data.root) / str(corpus.dataset)
    if not folder.is_dir():
        return False, {"path": corpus.dataset, "name": corpus.subset, "revision": corpus.revision}
    if corpus.subset and (folder / corpus.subset).is_dir() and not (folder / "README.md").is_file():
        return True, {
            "path": str(folder / corpus.subset)
        }  # only a README can tell `datasets` of subsets
    return True, {"path": str(folder), "name": corpus.subset}


@contextlib.contextmanager
def _hub(corpus: CorpusConfig, is_local: bool) -> Iterator[Any]:
    """`datasets`, quiet, its failures told in one line. If the hub does not answer at once only its cache is used:
    left to itself, `datasets` tries for 23 seconds."""
    import datasets
    import huggingface_hub

    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    if is_local or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    settings = huggingface_hub.constants
    if is_offline() or not (is_local or _answers(settings.ENDPOINT)):
        settings.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield datasets
    except UserError:
        raise
    except ConnectionError:
        why = "HF_HUB_OFFLINE is set" if is_offline() else "Hugging Face cannot be reached"
        raise UserError(
            f"dataset {corpus.dataset}: {why} and there is no copy in its cache; give local "
            "files instead, data.train=[{src: FILE, tgt: FILE}], or parquet files in the hub's layout, "
            f"FOLDER/{corpus.subset or 'data'}/{corpus.split or 'train'}-00000-of-00001.parquet, as dataset: FOLDER"
        ) from None
    except Exception as error:  # whatever a foreign dataset can do wrong, in its own words
        name = " ".join(part for part in (corpus.dataset, corpus.subset, corpus.split) if part)
        raise UserError(f"dataset {name}: {reason(error)}") from None


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=PATIENCE_S
        ).close()
    except urllib.error.HTTPError:
        return True  # an answer, if not a friendly one
    except OSError:
        return False
    return True


# ---- sacreBLEU --------------------------------------------------------------------------------------------------


def texts_of_test_set(name: str, langpair: str) -> tuple[TextFile, TextFile]:
    """Source and first reference of a test set, downloaded by sacreBLEU if it has to be and may be."""
    import sacrebleu
    from sacrebleu.dataset import DATASETS

    asked, name = name, SACREBLEUS.get(name, name)
    if name not in DATASETS:
        close = difflib.get_close_matches(asked.lower(), [*SACREBLEUS, *DATASETS], 3) or [
            "newstest2014"
        ]
        raise UserError(
            f"sacrebleu: {asked!r} is not a test set it knows; did you mean {' or '.join(close)}?"
        )
    known = DATASETS[name]
    if langpair not in known.langpairs:
        raise UserError(f"sacrebleu: {name} has no {langpair}, only {', '.join(known.langpairs)}")
    remedy = "give local files instead, {src: FILE, tgt: FILE}"
    if is_offline() and cached_test_set(name, langpair) is None:
        raise UserError(
            f"sacrebleu: {name} is not in its cache and HF_HUB_OFFLINE forbids a download; {remedy}"
        )
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_S)  # sacreBLEU sets none
    try:
        src, tgt = known.get_source_file(langpair), known.get_reference_files(langpair)[0]
    except (Exception, SystemExit) as error:  # it exits where a download is damaged
        raise UserError(
            f"sacrebleu: {name} cannot be had ({reason(error)}); {remedy}, or remove "
            f"{Path(sacrebleu.SACREBLEU_DIR, name)}, if it holds half, and try again"
        ) from None
    finally:
        socket.setdefaulttimeout(patience)
    return TextFile(Path(src)), TextFile(Path(tgt))


def cached_test_set(name: str, langpair: str) -> tuple[TextFile, TextFile] | None:
    """The same, of a set that sacreBLEU knows, if it lies in its cache already."""
    from sacrebleu.dataset import DATASETS

    known = DATASETS[name]
    if not all(
        os.path.exists(known._get_txt_file_path(langpair, field))
        for field in known.fieldnames(langpair)
    ):
        return None
    return TextFile(Path(known.get_source_file(langpair))), TextFile(
        Path(known.get_reference_files(langpair)[0])
    )
