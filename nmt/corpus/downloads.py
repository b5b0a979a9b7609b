"""Known test sets: sacreBLEU's own, which it may download, or files beside the corpora.

Its server is not under our control, so its failures are reported quickly, in one line that says how to
use local files instead. With HF_HUB_OFFLINE set, the network is never used.
"""

import difflib
import os
import socket
from pathlib import Path

from nmt.config import DataConfig
from nmt.corpus.hub import is_offline
from nmt.known_test_sets import OUR_NAMES, SACREBLEU_NAMES
from nmt.system.errors import UserError, describe_error
from nmt.system.files import COMPRESSED

SERVER_TIMEOUT_S = 5.0  # how long a server may stay silent before it counts as unreachable


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
    files = [known._get_txt_file_path(langpair, field) for field in known.fieldnames(langpair)]
    if is_offline() and not all(map(os.path.exists, files)):
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
