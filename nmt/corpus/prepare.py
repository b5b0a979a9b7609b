"""Builds a sealed store from raw corpora: runs the stages in order, then publishes the result with
one rename.

The store appears complete or not at all. A killed run leaves its finished work in `STORE.work/`, or
in `STORE/.work/` where something is mounted at STORE, such as a Docker volume; the next run reuses
it and produces the same bytes. The ledger accounts for every line. The store's
digest depends neither on the machine nor on the number of workers.
"""

import contextlib
import errno
import io
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
from nmt.corpus.reader import COMPRESSED, describe_corpus, find_local_files
from nmt.corpus.shards import SIDES, read_whole
from nmt.corpus.stages import (
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
from nmt.data.mixture import compute_weights
from nmt.data.store import SideWriter
from nmt.system.errors import UserError
from nmt.system.files import (
    digest_file,
    has_plain_file,
    is_fixed,
    list_own_names,
    lock,
    make_folder,
    move_sealed_files,
    open_plain_file,
    read_bytes,
    remove_entry,
    seal,
    sync_to_disk,
    write_bytes,
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

WORK_MARK = ".nmt-prepare"  # marks a folder as ours to remove
# About a third of the size of their text
COMPRESSED_SUFFIXES = (*COMPRESSED, ".tgz", ".parquet")


def prepare(data: DataConfig, vocab: VocabConfig, seed: int) -> bool:
    """Make `data.store` and return True, or return False if it is there; `UserError` if it has
    other settings.
    """
    store = Path(data.store).resolve()
    if is_fixed(store):
        work, lock_name = store / ".work", None
    else:
        work, lock_name = store.with_name(f"{store.name}.work"), f".{store.name}.lock"

    # an existing store is kept
    if _is_complete(store):
        check_same(store, data, vocab)
        _remove_leftovers(store, work, lock_name)
        return False
    if not _is_free(store, work):
        raise UserError(
            f"{store}: exists but is not a prepared store; give another data.store=DIR, such as "
            f"{store / 'store'}"
        )

    # detect mistakes in the config now, not after an hour of work
    parts = _list_parts(data)
    for part in parts:
        find_local_files(part.corpus, data)
    for bpe_part in list_bpe_parts(vocab):
        bpe_part.load_given(data)
    make_folder(work.parent)

    with lock(store, "preparing", lock_name):
        if _is_complete(store):  # another process finished it before this one took the lock
            return False
        _claim_work(work)
        n_bytes = sum(_estimate_bytes(part, data) for part in parts)
        # The text is about half of the estimate; refuse if not even that fits.
        if shutil.disk_usage(work.parent).free + _count_bytes(work) < n_bytes // 2:
            raise UserError(_describe_full_disk(work, n_bytes))
        try:
            make_folder(work)
            open_plain_file(work / WORK_MARK, "a+b").close()
            _build_store(store, parts, Preparation(work, data, vocab, seed, StageClock()))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(_describe_full_disk(work, n_bytes)) from None
        finally:
            # No shard report (00000.json, ...): no finished work to keep
            if not any(work.rglob("?????.json")):
                _remove_work(work)
    return True


def _is_complete(store: Path) -> bool:
    return has_plain_file(store / MANIFEST_FILE)


def _is_free(store: Path, work: Path) -> bool:
    """Whether a store can be written here: nothing is there, or only what this command left."""
    if not os.path.lexists(store):
        return True
    if not store.is_dir():
        return False
    if work.parent != store:  # the store will take the place of this folder
        return not any(store.iterdir())
    # A run that was killed while it moved its files into the store left some of them beside these.
    is_half_moved = has_plain_file(work / WORK_MARK)
    return is_half_moved or list_own_names(store) <= {".lock", work.name}


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


# ---- the work folder --------------------------------------------------------------------------------------------


def _claim_work(work: Path) -> None:
    """Raise UserError if nmt-prepare did not make this folder; print a line if earlier work in it
    is reused.
    """
    is_used = any(work.glob("[!.]*"))
    if work.is_symlink() or (is_used and not has_plain_file(work / WORK_MARK)):
        raise UserError(
            f"{work}: was not made by nmt-prepare, which needs this name for its work folder; "
            "give another data.store=DIR or move it away"
        )
    if is_used:
        say(f"reusing the finished work in {work}")


def _remove_leftovers(store: Path, work: Path, lock_name: str | None) -> None:
    """Remove what a run left that was killed after the store had its name."""
    _remove_work(work)
    if lock_name and store.with_name(lock_name).exists():
        # Whoever takes a lock removes its file in the end.
        with contextlib.suppress(UserError, OSError), lock(store, "clearing up", lock_name):
            pass


def _remove_work(work: Path) -> None:
    mark = work / WORK_MARK
    if not mark.is_file():  # never remove a folder that nmt-prepare did not make
        return
    # The mark goes last, so that the rest is known as ours if this process is killed meanwhile.
    for path in work.iterdir():
        if path != mark:
            remove_entry(path)
    shutil.rmtree(work, ignore_errors=True)


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


def _build_store(store: Path, parts: list[Part], job: Preparation) -> None:
    results = _run_stages(parts, job)
    folder = job.work / "store"
    _write_data(folder, results)
    ledger = _make_ledger(folder, results, job)
    _publish(store, folder, ledger, job.data.root)
    _remove_work(job.work)
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
    if encoded_dev and not encoded_dev[0].report.kept:
        raise UserError(
            "data.valid: it contains no usable pair; check the files, or leave data.valid unset"
        )
    if not any(encoded.report.kept for encoded in encoded_train):
        raise UserError(NOTHING_LEFT)
    return StageResults(train, dev, encoded_train, encoded_dev, n_duplicates, test, bpes)


def _write_data(folder: Path, results: StageResults) -> None:
    """Write the data files of the store into a new folder."""
    remove_entry(folder)  # left by a run killed while it wrote
    folder.mkdir()
    names = (VOCAB_FILE,) if len(results.bpes) == 1 else SIDE_VOCAB_FILES
    for name, bpe in zip(names, results.bpes, strict=True):
        write_bytes(folder / name, read_bytes(bpe.model))
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
        sizes = [encoded.report.kept for encoded in results.encoded_train]
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


def _publish(store: Path, folder: Path, ledger: Ledger, root: str) -> None:
    """Seal the finished folder and give it its name, with one rename where that is possible."""
    write_json(folder / SOURCES_FILE, stamp_sources(ledger, root))
    write_json(folder / LEDGER_FILE, ledger.to_plain())
    seal(folder, known=ledger.data)
    if is_fixed(store):
        move_sealed_files(folder, store)
        return
    os.rename(folder, store)
    sync_to_disk(store.parent)


def _account_for(
    collected: CollectedPart, encoded: EncodedPart, n_duplicates: Mapping[str, int]
) -> CorpusAccount:
    """Return the ledger's account of one corpus."""
    part = collected.part
    is_train = part.split == "train"
    collect_report = collected.report
    encode_report = encoded.report
    return CorpusAccount(
        corpus=describe_corpus(part.corpus),
        split=part.split,
        repeat=part.corpus.repeat,
        files=collected.files,
        lines=collect_report.lines,
        kept=encode_report.kept,
        tokens=[n * part.corpus.repeat for n in encode_report.tokens],
        dropped=collect_report.dropped.counts | encode_report.dropped.counts,
        samples=collect_report.dropped.samples | encode_report.dropped.samples,
        duplicates=n_duplicates[part.name] if is_train else None,
        held_out=collect_report.held_out if is_train else None,
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
            files = list(zip(encoded.files, encoded.report.ids, strict=True))
            for file, sha256 in files * repeat:
                with np.load(io.BytesIO(read_whole(file, sha256))) as arrays:
                    src.append(arrays["src"], arrays["src_lengths"])
                    tgt.append(arrays["tgt"], arrays["tgt_lengths"])


def _write_dev_text(folder: Path, valid: CollectedPart) -> None:
    shards = [text.read() for text in valid.texts(None)]
    for i, side in enumerate(SIDES):
        with open_plain_file(folder / dev_text_file(side), "xb") as file:
            for shard in shards:
                file.writelines(line + b"\n" for line in shard[i])
