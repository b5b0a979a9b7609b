"""From raw corpora to a sealed store: the stages one after the other, then one rename.

The store appears complete or not at all. What a killed run has finished stays in `STORE.work/`, and the next run ends
with the same bytes. The ledger accounts for every line, and its digest of the store depends neither on the machine nor
on the number of workers.
"""

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import DataConfig, VocabConfig
from nmt.corpus.ledger import (
    SOURCES,
    check_same,
    command,
    ledger_table,
    settings,
    store_digest,
    versions,
)
from nmt.corpus.reader import describe, local_files
from nmt.corpus.stages import (
    Collected,
    Encoded,
    Job,
    Meter,
    Part,
    collect,
    encode,
    find_repeats,
    given_model,
    hold_out,
    learn_bpe,
)
from nmt.data.store import SideWriter
from nmt.system.errors import UserError
from nmt.system.files import digest, lock, make_folder, seal, stamp, sync, write_json
from nmt.system.progress import say
from nmt.system.run_folder import LEDGER_FILE, MANIFEST_FILE, VOCAB_FILE, dev_text_file

MARK = ".nmt-prepare"  # says that a folder is ours to remove
PACKED = (".gz", ".xz", ".zst", ".tgz", ".parquet")
Json = dict[str, Any]


def prepare(data: DataConfig, vocab: VocabConfig, seed: int) -> bool:
    """Make `data.store` unless it is there: True if work was done, `UserError` if it was made with other settings."""
    store = Path(data.store).resolve()
    work = store.with_name(f"{store.name}.work")
    if (store / MANIFEST_FILE).is_file():
        check_same(store, data, vocab)
        _remove(work)  # left by a run killed after its last rename
        return False
    if store.is_file() or (store.is_dir() and any(store.iterdir())):
        raise UserError(
            f"{store}: exists and is not a prepared store; give another data.store=DIR or remove it"
        )
    parts = _parts(data)
    for part in parts:
        local_files(part.corpus, data)  # what is missing is told now, not after an hour
    given_model(data, vocab)
    make_folder(store.parent)
    with lock(store, "preparing", f".{store.name}.lock"):
        if (store / MANIFEST_FILE).is_file():  # another process was faster
            return False
        if work.is_symlink() or (any(work.glob("[!.]*")) and not (work / MARK).is_file()):
            raise UserError(
                f"{work}: is not of nmt-prepare, which needs this name; give another data.store=DIR"
            )
        if any(work.glob("[!.]*")):
            say(f"going on with what {work} holds")
        needed = sum(_needed(part, data) for part in parts)
        if (
            shutil.disk_usage(store.parent).free + _used(work) < needed // 2
        ):  # not even room for the text
            raise UserError(_full(work, needed))
        try:
            (make_folder(work) / MARK).touch()
            _build(store, parts, Job(work, data, vocab, seed, Meter()))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(_full(work, needed)) from None
        finally:
            if not any(work.rglob("?????.json")):  # nothing to go on from
                _remove(work)
    return True


def _remove(work: Path) -> None:
    if (work / MARK).is_file():  # never what somebody else has put there
        shutil.rmtree(work, ignore_errors=True)


def _needed(part: Part, data: DataConfig) -> int:
    """About how many bytes the work takes: the text, its ids, which are half as large, and these again in the store."""
    text = sum(
        file.stat().st_size * (3 if file.suffix in PACKED else 1)
        for file in local_files(part.corpus, data)
    )
    return text + text // 2 + part.corpus.repeat * text // 2


def _used(work: Path) -> int:
    return sum(file.stat().st_size for file in work.rglob("*.*"))


def _full(work: Path, needed: int) -> str:
    return (
        f"{work.parent}: the disk is full: about {needed:,} bytes are needed, {_used(work):,} of them are "
        f"written and {shutil.disk_usage(work.parent).free:,} are free; make room or give another data.store=DIR, "
        "and run it again: what is finished is kept"
    )


def _parts(data: DataConfig) -> list[Part]:
    """The dev set comes first: the training text is held against it."""
    if not data.train:
        raise UserError(
            "data.train: no corpus given; for example data.train=[{src: train.en, tgt: train.de}]"
        )
    train = [Part(f"train-{i}", corpus, data.clean) for i, corpus in enumerate(data.train)]
    return ([Part("valid", replace(data.valid, repeat=1), None)] if data.valid else []) + train


def _build(store: Path, parts: list[Part], job: Job) -> None:
    collected = {part: collect(job, part, None) for part in parts if not part.rules}
    sets, test = hold_out(job, next(iter(collected.values()), None))
    collected |= {part: collect(job, part, sets) for part in parts if part.rules}
    train = [each for part, each in collected.items() if part.rules]
    job.meter.tell("collect")
    repeats, counts = find_repeats(job, train)
    job.meter.tell("repeats")
    marks = repeats if job.data.clean.duplicates else None
    bpe, account = learn_bpe(job, train, marks)
    job.meter.tell("learn")
    encoded = {part: encode(job, each, bpe, marks) for part, each in collected.items()}
    job.meter.tell("encode")
    if not all(encoded[part].account["kept"] for part in parts if not part.rules):
        raise UserError(
            "data.valid: no pair of it can be read; look at the file, or leave the dev set out"
        )
    if not any(encoded[each.part].account["kept"] for each in train):
        raise UserError(
            "data.train: no pair is left after cleaning; look at data.clean and at the corpora"
        )
    in_order = sorted(parts, key=lambda part: part.split)  # training first
    corpora = [_account(collected[part], encoded[part], counts) for part in in_order]
    ledger: Json = {
        "settings": settings(job.data, job.vocab),
        "corpora": corpora,
        "test": test,
        "bpe": account,
        "versions": versions(),
        "command": command(),
    }
    folder = job.work / "store"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(bpe / VOCAB_FILE, folder / VOCAB_FILE)
    for part, each in collected.items():
        if not part.rules:
            _write_text(folder, each)
    for split in ("train", "valid"):
        _write_ids(
            folder,
            split,
            [(part.corpus.repeat, encoded[part]) for part in parts if part.split == split],
        )
    roots = [
        (each["name"], Path(job.data.root) / each["name"])
        for corpus in (*corpora, *([test] if test else []))
        for each in corpus["files"]
    ]
    write_json(
        folder / SOURCES, {name: [str(path.resolve()), *stamp(path)] for name, path in roots}
    )
    _publish(store, folder, ledger)
    _remove(job.work)
    job.meter.n_lines = sum(2 * corpus["kept"] for corpus in ledger["corpora"])
    job.meter.tell("seal")
    say(ledger_table(ledger))


def _account(collected: Collected, encoded: Encoded, repeats: dict[str, int]) -> Json:
    """A corpus in the ledger."""
    part, first, then = collected.part, collected.account, encoded.account
    account = {
        "corpus": describe(part.corpus),
        "split": part.split,
        "repeat": part.corpus.repeat,
        "files": first["files"],
        "lines": first["lines"],
        "kept": then["kept"],
        "tokens": [n * part.corpus.repeat for n in then["tokens"]],
        "dropped": first["dropped"] | then["dropped"],
        "samples": first["samples"] | then["samples"],
    }
    if part.rules:
        account |= {"duplicates": repeats[part.name], "held_out": first["held_out"]}
    return account


def _write_ids(folder: Path, split: str, parts: Sequence[tuple[int, Encoded]]) -> None:
    if not parts:
        return
    with (
        closing(SideWriter(folder, split, "src")) as src,
        closing(SideWriter(folder, split, "tgt")) as tgt,
    ):
        for repeat, encoded in parts:
            for file in encoded.files() * repeat:
                with np.load(file) as arrays:
                    src.append(arrays["src"], arrays["src_lengths"])
                    tgt.append(arrays["tgt"], arrays["tgt_lengths"])


def _write_text(folder: Path, valid: Collected) -> None:
    lines = [line + b"\n" for text in valid.texts(None) for line in text.lines()]
    for i, side in enumerate(("src", "tgt")):
        (folder / dev_text_file(side)).write_bytes(b"".join(lines[i::2]))


def _publish(store: Path, folder: Path, ledger: Json) -> None:
    ledger["data"] = {
        file.name: digest(file) for file in sorted(folder.iterdir()) if file.name != SOURCES
    }
    ledger["store"] = store_digest(ledger["data"])
    write_json(folder / LEDGER_FILE, ledger)
    seal(folder, known=ledger["data"])
    os.rename(folder, store)
    sync(store.parent)
