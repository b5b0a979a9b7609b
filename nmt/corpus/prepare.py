"""Builds a sealed store from raw corpora: runs the stages in order, then moves the result into place.

A folder is a store once it has a manifest, which is moved last, so a store is complete or is none.
A killed run leaves its finished stages in `STORE/.nmt-prepare`; the next run reuses them and
produces the same bytes. The ledger accounts for every line. The store's digest depends neither on
the machine nor on the number of workers.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nmt.config import DataConfig, VocabConfig
from nmt.corpus.ledger import (
    SOURCES_FILE,
    CorpusAccount,
    Ledger,
    TestSetAccount,
    check_same,
    digest_store,
    format_command,
    format_ledger,
    list_settings,
    list_versions,
    stamp_sources,
)
from nmt.corpus.reader import describe_corpus, find_local_files
from nmt.corpus.shards import SIDES
from nmt.corpus.stages import (
    DONE_FILE,
    NOTHING_LEFT,
    CollectedPart,
    EncodedPart,
    LearnedBpe,
    Part,
    Preparation,
    StageClock,
    collect_part,
    encode_part,
    gather_held_out,
    learn_bpe,
    list_bpe_parts,
    mark_duplicates,
)
from nmt.corpus.text_files import COMPRESSED
from nmt.data.mixture import compute_weights
from nmt.data.store import SideWriter
from nmt.system.errors import UserError
from nmt.system.files import (
    digest_file,
    has_plain_file,
    list_own_names,
    lock,
    make_folder,
    move_sealed_files,
    seal,
    write_json,
)
from nmt.system.progress import say
from nmt.system.run_folder import (
    LEDGER_FILE,
    MANIFEST_FILE,
    SIDE_VOCAB_FILES,
    VOCAB_FILE,
    dev_text_file,
)

WORK_FOLDER = ".nmt-prepare"  # in the folder of the store
# About a third of the size of their text
COMPRESSED_SUFFIXES = (*COMPRESSED, ".tgz", ".parquet")


def prepare(data: DataConfig, vocab: VocabConfig, seed: int) -> bool:
    """Make `data.store` and return True, or return False if it is there; `UserError` if it has
    other settings.
    """
    store = Path(data.store).resolve()
    work = store / WORK_FOLDER
    if work.is_symlink():
        raise UserError(f"{work}: is a link; remove it")

    # an existing store is kept
    if _is_complete(store):
        check_same(store, data, vocab)
        shutil.rmtree(work, ignore_errors=True)  # left by a run that was killed at its very end
        return False
    is_free = not os.path.lexists(store) or (store.is_dir() and not list_own_names(store))
    if not is_free and not work.is_dir():
        raise UserError(
            f"{store}: exists but is not a prepared store; give another data.store=DIR, such as "
            f"{store / 'store'}"
        )

    # detect mistakes in the config now, not after an hour of work
    parts = _list_parts(data)
    n_bytes = sum(_estimate_bytes(part, data) for part in parts)
    for bpe_part in list_bpe_parts(vocab):
        bpe_part.load_given(data)

    try:
        make_folder(work)
        with lock(work, "preparing"):
            if _is_complete(store):  # another process has finished it meanwhile
                shutil.rmtree(work, ignore_errors=True)
                return False
            try:
                _build(store, parts, n_bytes, Preparation(work, data, vocab, seed, StageClock()))
            finally:
                # only under the lock: without it, the work is another process's
                _remove_what_is_not_needed(store, work)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(_describe_full_disk(work, n_bytes)) from None
    return True


def _remove_what_is_not_needed(store: Path, work: Path) -> None:
    """Remove the work folder, but not finished stages of a store that is incomplete."""
    if not _is_complete(store) and any(work.glob(f"*/{DONE_FILE}")):
        return
    shutil.rmtree(work, ignore_errors=True)
    with contextlib.suppress(OSError):  # the store is not empty, or it is a mount point
        store.rmdir()


def _is_complete(store: Path) -> bool:
    return has_plain_file(store / MANIFEST_FILE)


def _list_parts(data: DataConfig) -> list[Part]:
    """List the corpora; the dev set comes first, because the training text is searched for its
    sentences.
    """
    if not data.train:
        raise UserError(
            "data.train: no corpus given; for example data.train=[{src: train.en, tgt: train.de}]"
        )
    parts = []
    if data.valid is not None:
        parts.append(Part("valid", replace(data.valid, repeat=1), None))
    for i, corpus in enumerate(data.train):
        parts.append(Part(f"train-{i}", corpus, data.clean))
    return parts


def _estimate_bytes(part: Part, data: DataConfig) -> int:
    """Estimate the bytes that a part takes: its text, its ids, half as large, and these again in
    the store.
    """
    text = 0
    for file in find_local_files(part.corpus, data):
        factor = 3 if file.suffix in COMPRESSED_SUFFIXES else 1
        text += factor * file.stat().st_size
    return text + text // 2 + part.corpus.repeat * text // 2


def _count_bytes(work: Path) -> int:
    return sum(file.lstat().st_size for file in work.rglob("*.*"))


def _describe_full_disk(work: Path, n_bytes: int) -> str:
    free = shutil.disk_usage(work.parent).free
    return (
        f"{work.parent}: not enough disk space: about {n_bytes:,} bytes are needed, of which "
        f"{_count_bytes(work):,} are already written, and {free:,} are free; free some space and run "
        "the same command again, which keeps finished work, or give another data.store=DIR"
    )


# ---- the stages -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageResults:
    """What the stages leave in the work folder; the store is written from it."""

    train: list[CollectedPart]
    dev: list[CollectedPart]  # one or none
    encoded_train: list[EncodedPart]
    encoded_dev: list[EncodedPart]
    n_duplicates: Mapping[str, int]  # of each training part
    test: TestSetAccount | None
    bpes: list[LearnedBpe]  # the joint one, or those of the source and of the target


def _build(store: Path, parts: list[Part], n_bytes: int, job: Preparation) -> None:
    # The text is about half of the estimate; refuse if not even that fits.
    if shutil.disk_usage(store).free + _count_bytes(job.work) < n_bytes // 2:
        raise UserError(_describe_full_disk(job.work, n_bytes))
    if any(job.work.glob(f"*/{DONE_FILE}")):
        say(f"reusing the finished work in {job.work}")
    results = _run_stages(parts, job)
    folder = job.work / "store"
    _write_data(folder, results)
    ledger = _make_ledger(folder, results, job)
    write_json(folder / SOURCES_FILE, stamp_sources(ledger, job.data.root))
    write_json(folder / LEDGER_FILE, ledger.to_plain())
    seal(folder, known=ledger.data)
    move_sealed_files(folder, store)
    job.clock.n_done = sum(corpus.kept for corpus in ledger.corpora)
    job.clock.finish("seal")
    for line in format_ledger(ledger).split("\n"):
        say(line)


def _run_stages(parts: list[Part], job: Preparation) -> StageResults:
    dev_parts = [part for part in parts if part.split == "valid"]
    train_parts = [part for part in parts if part.split == "train"]

    # collect: read and clean every corpus, and search training text for dev and test sentences
    dev = [collect_part(job, part, None) for part in dev_parts]
    held_out, test = gather_held_out(job, dev[0] if dev else None)
    train = [collect_part(job, part, held_out) for part in train_parts]
    job.clock.finish("collect")

    # mark duplicate pairs across all training corpora; they are counted even if they are kept
    duplicates, n_duplicates = mark_duplicates(job, train)
    unwanted = duplicates if job.data.clean.duplicates else None
    job.clock.finish("repeats")

    # learn the BPE
    bpes = [learn_bpe(job, part, train, unwanted) for part in list_bpe_parts(job.vocab)]
    job.clock.finish("learn", "lines")

    # encode
    encoded_dev = [encode_part(job, part, bpes, unwanted) for part in dev]
    encoded_train = [encode_part(job, part, bpes, unwanted) for part in train]
    job.clock.finish("encode")
    if encoded_dev and not encoded_dev[0].report.n_kept:
        raise UserError(
            "data.valid: it contains no usable pair; check the files, or leave data.valid unset"
        )
    if not any(encoded.report.n_kept for encoded in encoded_train):
        raise UserError(NOTHING_LEFT)
    return StageResults(train, dev, encoded_train, encoded_dev, n_duplicates, test, bpes)


def _write_data(folder: Path, results: StageResults) -> None:
    """Write the data files of the store into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)  # left by a run killed while it wrote
    folder.mkdir()
    names = (VOCAB_FILE,) if len(results.bpes) == 1 else SIDE_VOCAB_FILES
    for name, bpe in zip(names, results.bpes, strict=True):
        shutil.copyfile(bpe.model, folder / name)
    repetitions = [collected.part.corpus.repeat for collected in results.train]
    _write_ids(folder, "train", results.encoded_train, repetitions)
    if results.dev:
        _write_ids(folder, "valid", results.encoded_dev, [1])
        _write_dev_text(folder, results.dev[0])


def _make_ledger(folder: Path, results: StageResults, job: Preparation) -> Ledger:
    """Account for every line of the corpora and for the files written from them."""
    corpora = []
    collected_parts = [*results.train, *results.dev]
    encoded_parts = [*results.encoded_train, *results.encoded_dev]
    weights: list[float | None] = [None] * len(collected_parts)
    if job.data.is_mixed:  # training parts come first
        sizes = [encoded.report.n_kept for encoded in results.encoded_train]
        weights[: len(sizes)] = compute_weights(job.data, sizes)
    for collected, encoded, weight in zip(collected_parts, encoded_parts, weights, strict=True):
        account = _account_for(collected, encoded, results.n_duplicates)
        corpora.append(replace(account, weight=weight))
    digests = {file.name: digest_file(file) for file in sorted(folder.iterdir())}
    return Ledger(
        settings=list_settings(job.data, job.vocab),
        corpora=corpora,
        test=results.test,
        bpe=results.bpes[0].account,
        tgt_bpe=None if job.vocab.joint else results.bpes[1].account,
        versions=list_versions(),
        command=format_command(),
        data=digests,
        store=digest_store(digests),
    )


def _account_for(
    collected: CollectedPart, encoded: EncodedPart, n_duplicates: Mapping[str, int]
) -> CorpusAccount:
    """Return the ledger's account of one corpus."""
    part = collected.part
    is_train = part.split == "train"
    before, after = collected.report, encoded.report
    return CorpusAccount(
        corpus=describe_corpus(part.corpus),
        split=part.split,
        repeat=part.corpus.repeat,
        files=collected.files,
        lines=before.lines,
        kept=after.n_kept,
        tokens=[n * part.corpus.repeat for n in after.tokens],
        dropped=before.dropped.counts | after.dropped.counts,
        samples=before.dropped.samples | after.dropped.samples,
        duplicates=n_duplicates[part.name] if is_train else None,
        held_out=before.held_out if is_train else None,
        tag=part.corpus.tag,
    )


def _write_ids(
    folder: Path, split: str, parts: Sequence[EncodedPart], repetitions: Sequence[int]
) -> None:
    with (
        closing(SideWriter(folder, split, "src")) as src,
        closing(SideWriter(folder, split, "tgt")) as tgt,
    ):
        for encoded, repeat in zip(parts, repetitions, strict=True):
            for file in encoded.files * repeat:
                with np.load(file) as arrays:
                    src.append(arrays["src"], arrays["src_lengths"])
                    tgt.append(arrays["tgt"], arrays["tgt_lengths"])


def _write_dev_text(folder: Path, valid: CollectedPart) -> None:
    shards = [shard.read() for shard in valid.list_shards(None)]
    for i, side in enumerate(SIDES):
        with open(folder / dev_text_file(side), "wb") as file:
            for shard in shards:
                file.writelines(line + b"\n" for line in shard[i])
