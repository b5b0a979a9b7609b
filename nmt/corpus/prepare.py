"""Builds a sealed store from raw corpora: runs the stages in order, then moves the result into place.

A folder is a store once it has a manifest, which is moved last, so a store is always complete.
A killed run leaves its finished stages in `STORE/.nmt-prepare`; the next run reuses them and
produces the same bytes. The ledger accounts for every line. The store's digest depends neither on
the machine nor on the number of workers.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from nmt.agreement import check_corpus
from nmt.config import DataConfig, VocabConfig
from nmt.corpus.learn_bpe import list_bpe_parts
from nmt.corpus.ledger import (
    SOURCES_FILE,
    CorpusAccount,
    Ledger,
    check_same,
    digest_store,
    format_command,
    format_ledger,
    list_settings,
    list_versions,
    stamp_sources,
)
from nmt.corpus.reader import describe_corpus, fetch_files
from nmt.corpus.shards import SIDES
from nmt.corpus.stages import (
    DONE_FILE,
    NOTHING_LEFT,
    CollectedPart,
    EncodedPart,
    Part,
    Preparation,
    collect_part,
    encode_part,
    gather_held_out,
    learn_bpe,
    mark_duplicates,
)
from nmt.data.mixture import compute_weights
from nmt.data.store import SideWriter
from nmt.system.errors import UserError
from nmt.system.files import (
    COMPRESSED,
    digest_file,
    has_plain_file,
    list_own_names,
    lock,
    make_folder,
    move_sealed_files,
    remove_entry,
    seal,
    write_json,
)
from nmt.system.pool import Executor, use_processes
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


def prepare(
    data: DataConfig,
    vocab: VocabConfig,
    seed: int,
    executor: Executor | None = None,
    patience_s: float = 0.0,
) -> bool:
    """Make `data.store` and return True, or return False if it exists; `UserError` if it has other
    settings. If another process is making it, wait for that, but no longer than `patience_s`.
    """
    store = Path(data.store).resolve()
    work = store / WORK_FOLDER
    if work.is_symlink():
        raise UserError(f"{work}: is a link; remove it")

    # an existing store is kept
    if _is_complete(store):
        check_same(store, data, vocab)
        remove_entry(work)  # left by a run that was killed at its very end
        return False
    is_free = not os.path.lexists(store) or (store.is_dir() and not list_own_names(store))
    if not is_free and not work.is_dir():
        raise UserError(
            f"{store}: exists but is not a prepared store; give another data.store=DIR, such as "
            f"{store / 'store'}"
        )

    # detect mistakes in the config now, not after an hour of work
    parts = list_parts(data)
    n_bytes = estimate_text(parts, data)
    for bpe_part in list_bpe_parts(vocab):
        bpe_part.load_given(data)

    try:
        make_folder(work)
        with lock(work, "preparing", patience_s=patience_s):
            if _is_complete(store):  # another process has finished it meanwhile
                remove_entry(work)
                return False
            try:
                # Refuse if not even the text fits; part of it may already be on the disk.
                n_written = sum(file.stat().st_size for file in work.rglob("*.*"))
                if shutil.disk_usage(store).free + n_written < n_bytes:
                    raise UserError(_describe_full_disk(store, n_bytes, "not enough disk space"))
                job = Preparation(work, data, vocab, seed, executor or use_processes(data.workers))
                _build(store, parts, job)
            finally:
                # only under the lock: without it, the work is another process's
                _remove_what_is_not_needed(store, work)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(_describe_full_disk(store, n_bytes, error.strerror)) from None
    return True


def _remove_what_is_not_needed(store: Path, work: Path) -> None:
    """Remove the work folder, but not finished stages of a store that is incomplete."""
    if not _is_complete(store) and any(work.glob(f"*/{DONE_FILE}")):
        return
    remove_entry(work)
    with contextlib.suppress(OSError):  # the store is not empty, or it is a mount point
        store.rmdir()


def _is_complete(store: Path) -> bool:
    return has_plain_file(store / MANIFEST_FILE)


def list_parts(data: DataConfig) -> list[Part]:
    """List the corpora; the dev set comes first, because the training text is searched for its
    sentences.
    """
    if not data.train:
        raise UserError(
            "data.train: no corpus given; for example data.train=[{src: train.en, tgt: train.de}]"
        )
    check_corpus("data.valid.", data.valid, data)
    parts = []
    if data.valid is not None:
        if data.valid == data.test:
            say(
                "warning: data.valid and data.test are one corpus: its score chooses the checkpoint, so it is no test"
            )
        parts.append(Part("valid", data.valid, None))
    for i, corpus in enumerate(data.train):
        check_corpus(f"data.train[{i}].", corpus, data)
        parts.append(Part(f"train-{i}", corpus, data.clean))
    return parts


def estimate_text(parts: list[Part], data: DataConfig) -> int:
    """Estimate the bytes of all text, unpacked, after fetching what is on the hub."""
    n_bytes = 0
    for part in parts:
        for path in fetch_files(part.corpus, data):
            factor = 3 if path.name.endswith(COMPRESSED_SUFFIXES) else 1
            n_bytes += factor * path.stat().st_size
    return n_bytes


def _describe_full_disk(store: Path, n_bytes: int, fault: str | None) -> str:
    folder = store if store.exists() else store.parent  # the store may be a disk of its own
    return (
        f"{store}: {fault}: about {2 * n_bytes:,} bytes are needed in all, and "
        f"{shutil.disk_usage(folder).free:,} are free; free some space, or raise ulimit -f, and run the "
        "same command again, which keeps finished work, or give another data.store=DIR"
    )


# ---- the stages -------------------------------------------------------------------------------------------------


def _build(store: Path, parts: list[Part], job: Preparation) -> None:
    if any(job.work.glob(f"*/{DONE_FILE}")):
        say(f"reusing the finished work in {job.work}")

    # read and clean every corpus, and search training text for dev and test sentences
    dev = [collect_part(job, part, {}) for part in parts if part.split == "valid"]
    held_out, test = gather_held_out(job, dev[0] if dev else None)
    train = [collect_part(job, part, held_out) for part in parts if part.split == "train"]

    # mark duplicate pairs across all training corpora; they are counted even if they are kept
    duplicates, n_duplicates = mark_duplicates(job, train)
    unwanted = duplicates if job.data.clean.duplicates else None

    # learn the BPE, and encode
    bpes = [learn_bpe(job, part, train, unwanted) for part in list_bpe_parts(job.vocab)]
    encoded_dev = [encode_part(job, part, bpes, None) for part in dev]
    encoded_train = [encode_part(job, part, bpes, unwanted) for part in train]
    if encoded_dev and not encoded_dev[0].report.n_kept:
        raise UserError(
            "data.valid: it contains no usable pair; check the files, or leave data.valid unset"
        )
    n_kept = [encoded.report.n_kept for encoded in encoded_train]
    if not any(n_kept):
        raise UserError(NOTHING_LEFT)

    # write the data files into a new folder
    folder = job.work / "store"
    remove_entry(folder)  # left by a run killed while it wrote
    folder.mkdir()
    names = (VOCAB_FILE,) if len(bpes) == 1 else SIDE_VOCAB_FILES
    for name, bpe in zip(names, bpes, strict=True):
        shutil.copyfile(bpe.model, folder / name)
    _write_ids(folder, "train", encoded_train)
    if dev:
        _write_ids(folder, "valid", encoded_dev)
        _write_dev_text(folder, dev[0])
    digests = {file.name: digest_file(file) for file in sorted(folder.iterdir())}

    # account for every line of the corpora, and seal
    weights = compute_weights(job.data, n_kept) if job.data.is_mixed else [None] * len(train)
    corpora = [
        _account_for(encoded, n_duplicates[encoded.text.part.name], weight)
        for encoded, weight in zip(encoded_train, weights, strict=True)
    ]
    corpora += map(_account_for, encoded_dev)
    ledger = Ledger(
        settings=list_settings(job.data, job.vocab),
        corpora=corpora,
        test=test,
        bpe=bpes[0].account,
        tgt_bpe=None if job.vocab.joint else bpes[1].account,
        versions=list_versions(),
        command=format_command(),
        data=digests,
        store=digest_store(digests),
    )
    write_json(folder / SOURCES_FILE, stamp_sources(ledger, job.data.root))
    write_json(folder / LEDGER_FILE, ledger.to_plain())
    seal(folder, known=digests)
    move_sealed_files(folder, store)
    for line in format_ledger(ledger).split("\n"):
        say(line)


def _account_for(
    encoded: EncodedPart, n_duplicates: int | None = None, weight: float | None = None
) -> CorpusAccount:
    """Return the ledger's account of one corpus; a dev set has no duplicates to count."""
    part, before, after = encoded.text.part, encoded.text.report, encoded.report
    return CorpusAccount(
        corpus=describe_corpus(part.corpus),
        split=part.split,
        files=encoded.text.files,
        lines=before.lines,
        kept=after.n_kept,
        tokens=after.tokens,
        dropped=before.dropped | after.dropped,
        samples=before.samples | after.samples,
        duplicates=n_duplicates,
        held_out=None if n_duplicates is None else before.held_out,
        tag=part.corpus.tag,
        weight=weight,
    )


def _write_ids(folder: Path, split: str, parts: Sequence[EncodedPart]) -> None:
    with (
        closing(SideWriter(folder, split, "src")) as src,
        closing(SideWriter(folder, split, "tgt")) as tgt,
    ):
        for encoded in parts:
            for file in encoded.files:
                with np.load(file) as arrays:
                    src.append(arrays["src"], arrays["src_lengths"])
                    tgt.append(arrays["tgt"], arrays["tgt_lengths"])


def _write_dev_text(folder: Path, valid: CollectedPart) -> None:
    shards = [shard.read() for shard in valid.list_shards(None)]
    for i, side in enumerate(SIDES):
        with open(folder / dev_text_file(side), "wb") as file:
            for shard in shards:
                file.writelines(line + b"\n" for line in shard[i])
