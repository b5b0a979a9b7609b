"""The training text drawn anew for each epoch, as BPE-dropout and data.augment need: one token store
per epoch.

An epoch's plan needs all of its lengths, so several processes draw the whole epoch when it begins.
It appears beside the store by one rename, once for all ranks and runs that share the store, and is
removed when it is no longer needed. It depends only on (store, rates, seed, epoch). A sentence that
would have more than `max_pieces` pieces keeps its stored ones.
"""

import math
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from nmt.config import AugmentConfig
from nmt.data.bpe_dropout import MergeTable, segment
from nmt.data.letter_case import CaseChanger
from nmt.data.store import SideWriter, TokenStore, gather_runs, open_store
from nmt.data.vocab import Vocabulary, load_vocab
from nmt.system.errors import UserError
from nmt.system.files import (
    FolderInUse,
    check_own_folder,
    digest_file,
    lock,
    make_folder,
    read_bytes,
    read_manifest,
    remove_folder,
    remove_leftovers,
    write_bytes,
    write_folder,
)
from nmt.system.pool import map_in_order, use_processes
from nmt.system.progress import Progress
from nmt.system.run_folder import MANIFEST_FILE, find_vocab_files

PAIRS_PER_DRAW = 8_192  # pairs drawn from one seed: another size draws other segmentations
CHECKED = 500  # pairs that must come back unchanged at rate 0
POLL_S = 0.2
NO_AUGMENT = AugmentConfig()
TokenRow = tuple[np.ndarray, np.ndarray]  # ids end to end, and how many each sentence has
Merges = tuple[MergeTable, MergeTable]  # of the source and of the target


# ---- drawing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """The settings that, with the text, decide what is drawn for an epoch."""

    merges: Merges | None  # at rate 0
    rate: float
    changer: CaseChanger | None  # None if data.augment is off
    seed: int
    max_pieces: int | None
    epoch: int = 0

    @property
    def is_needed(self) -> bool:
        return self.merges is not None or self.changer is not None

    def start_random(self, first: int, number: int) -> np.random.Generator:
        """Start the numbers for the source (0), the target (1) or the letters (2) of a block."""
        key = (self.seed, self.epoch, first, number)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@dataclass(frozen=True)
class StoredPairs:
    """Consecutive pairs as the store holds them."""

    first: int
    src: TokenRow
    tgt: TokenRow


def draw_block(draw: Draw, pairs: StoredPairs) -> list[TokenRow]:
    """Both sides of some pairs as the epoch has them. It runs in other processes, so it is given
    all that it reads.
    """
    sides = _change_letters(draw, pairs) if draw.changer else [pairs.src, pairs.tgt]
    if draw.merges is None:
        return sides
    rows = []
    for number, (ids, counts) in enumerate(sides):
        random = draw.start_random(pairs.first, number)
        drawn, drawn_counts = segment(draw.merges[number], ids, counts, draw.rate, random)
        if draw.max_pieces is not None:
            drawn, drawn_counts = _restore_long(ids, counts, drawn, drawn_counts, draw.max_pieces)
        rows.append((drawn, drawn_counts))
    return rows


def _change_letters(draw: Draw, pairs: StoredPairs) -> list[TokenRow]:
    assert draw.changer is not None
    rows = [np.split(ids, np.cumsum(counts)[:-1]) for ids, counts in (pairs.src, pairs.tgt)]
    limit = math.inf if draw.max_pieces is None else draw.max_pieces
    draw.changer.change_share(rows, limit, draw.start_random(pairs.first, 2))
    return [(np.concatenate(side), np.array([len(row) for row in side])) for side in rows]


def _restore_long(
    ids: np.ndarray, counts: np.ndarray, drawn: np.ndarray, drawn_counts: np.ndarray, limit: int
) -> TokenRow:
    """Return what was drawn, except for sentences of more than `limit` pieces: these keep the
    stored ones.
    """
    is_long = drawn_counts > limit
    stored_starts = np.cumsum(counts) - counts
    drawn_starts = np.cumsum(drawn_counts) - drawn_counts
    starts = np.where(is_long, stored_starts, len(ids) + drawn_starts)
    kept_counts = np.where(is_long, counts, drawn_counts)
    return gather_runs(np.concatenate((ids, drawn)), starts, kept_counts), kept_counts


def _read_merges(folder: Path, store: TokenStore) -> Merges:
    """Read the merges of a store's BPE models, if drawing at rate 0 gives what the store holds."""
    names = find_vocab_files(read_manifest(folder))
    tables = [MergeTable(read_bytes(folder / name)) for name in names]
    both = tables[0], tables[-1]
    for side, merges, name in zip((store.src, store.tgt), both, (names[0], names[-1]), strict=True):
        ids, counts = side.read_rows(0, min(CHECKED, len(side)))
        again, _ = segment(merges, ids, counts, 0.0, np.random.default_rng(0))
        if not np.array_equal(again, ids):
            raise UserError(
                f"{folder / name}: is not a BPE model that merges letters within words, as nmt-prepare "
                "learns, so BPE-dropout does not work with it; set vocab.bpe_dropout=0"
            )
    return both


# ---- epochs on disk ----------------------------------------------------------------------------------------------


class EpochStores:
    """`stores(epoch)` is the token store of that epoch; if nothing is drawn, always the store
    itself. Close it to stop drawing.
    """

    def __init__(
        self,
        store: Path,
        rate: float,
        seed: int,
        max_pieces: int | None,
        workers: int,
        vocab: Vocabulary | None = None,
        augment: AugmentConfig = NO_AUGMENT,
    ) -> None:
        self.folder = store.resolve()
        self.workers, self.vocab = workers, vocab
        self._stored = open_store(store, "train", vocab)
        identity = digest_file(store / MANIFEST_FILE)[:12]
        name = f"{identity}-{rate}-{seed}-{max_pieces}"
        if augment.is_on:
            name += f"-{augment.upper}-{augment.title}"
        self.epochs = self.folder.with_name(f"{self.folder.name}.epochs") / name
        merges = _read_merges(self.folder, self._stored) if rate else None
        known = vocab or load_vocab(self.folder)
        changer = CaseChanger(known, augment) if augment.is_on else None
        self._draw = Draw(merges, rate, changer, seed, max_pieces)
        self._closed = threading.Event()

    def __call__(self, epoch: int) -> TokenStore:
        if not self._draw.is_needed:
            return self._stored
        draw = replace(self._draw, epoch=epoch)
        while (store := self._find(epoch)) is None:
            self._stop_if_closed()
            for folder in (self.epochs.parent, self.epochs):
                check_own_folder(folder, inside=folder.parent)
            try:
                with lock(make_folder(self.epochs), "drawing an epoch"):
                    self._make(draw)
            except FolderInUse:  # another rank or run is drawing it
                self._closed.wait(POLL_S)
        return store

    def _path(self, epoch: int) -> Path:
        return self.epochs / f"epoch-{epoch:06d}"

    def _find(self, epoch: int) -> TokenStore | None:
        path = self._path(epoch)
        try:
            return open_store(path, "train", self.vocab) if path.exists() else None
        except UserError:
            if path.exists():
                raise
            return None  # a process that is ahead has removed it meanwhile: it is made again

    def _make(self, draw: Draw) -> None:
        """Draw an epoch unless it exists, and remove those no longer needed."""
        remove_leftovers(self.epochs)
        for old in self.epochs.glob(f"epoch-{'[0-9]' * 6}"):
            if int(old.name.removeprefix("epoch-")) < draw.epoch - 1:
                remove_folder(old)
        if not self._path(draw.epoch).exists():
            write_folder(self._path(draw.epoch), partial(self._fill, draw))

    def _stop_if_closed(self) -> None:
        if self._closed.is_set():
            raise CancelledError

    def _fill(self, draw: Draw, folder: Path) -> None:
        """Write the whole epoch into `folder`."""
        for name in find_vocab_files(read_manifest(self.folder)):
            write_bytes(folder / name, read_bytes(self.folder / name))
        drawn = map_in_order(partial(draw_block, draw), self._blocks(), use_processes(self.workers))
        with (
            closing(drawn),  # after an error too, the processes end here
            closing(SideWriter(folder, "train", "src")) as src,
            closing(SideWriter(folder, "train", "tgt")) as tgt,
            Progress(f"draw epoch {draw.epoch}", len(self._stored), "pairs") as progress,
        ):
            for src_row, tgt_row in drawn:
                self._stop_if_closed()
                src.append(*src_row)
                tgt.append(*tgt_row)
                progress.advance(len(src_row[1]))

    def _blocks(self) -> Iterator[StoredPairs]:
        n = len(self._stored)
        for first in range(0, n, PAIRS_PER_DRAW):
            end = min(first + PAIRS_PER_DRAW, n)
            src = self._stored.src.read_rows(first, end)
            yield StoredPairs(first, src, self._stored.tgt.read_rows(first, end))

    def __enter__(self) -> "EpochStores":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def remove(self) -> None:
        """Remove all epochs at the end of a run, which no longer needs them."""
        if self._draw.is_needed:
            shutil.rmtree(self.epochs, ignore_errors=True)
            with suppress(OSError):  # other runs have theirs there
                self.epochs.parent.rmdir()
