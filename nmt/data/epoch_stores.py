"""The training text in the pieces that BPE-dropout draws for each epoch: one token store per epoch.

An epoch's plan needs all of its lengths, so several processes draw the whole epoch when it begins.
It appears beside the store by one rename, once for all ranks and runs that share the store, and is
removed when it is no longer needed. It depends only on (store, rate, seed, epoch). A sentence that
would have more than `max_pieces` pieces keeps its stored ones.
"""

import math
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from nmt.data.bpe_dropout import MergeTable, segment
from nmt.data.mixture import make_random
from nmt.data.store import SideWriter, TokenRow, TokenStore, gather_runs, open_store
from nmt.data.vocab import Vocabulary
from nmt.system.errors import UserError
from nmt.system.files import (
    check_own_folder,
    digest_file,
    lock,
    make_folder,
    read_bytes,
    read_manifest,
    remove_entry,
    remove_folder,
    remove_leftovers,
    write_bytes,
    write_folder,
)
from nmt.system.pool import map_in_order, use_processes
from nmt.system.progress import Progress
from nmt.system.run_folder import MANIFEST_FILE, find_vocab_files

CHECKED = 500  # pairs that must come back unchanged at rate 0
Merges = tuple[MergeTable, MergeTable]  # of the source and of the target


# ---- drawing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What, with the text, decides the pieces of an epoch."""

    merges: Merges
    rate: float
    seed: int
    max_pieces: int | None
    epoch: int = 0


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
    rows = []
    for side, (ids, counts) in enumerate((pairs.src, pairs.tgt)):
        random = make_random(draw.seed, draw.epoch, pairs.first, side)
        drawn, drawn_counts = segment(draw.merges[side], ids, counts, draw.rate, random)
        if draw.max_pieces is not None:
            drawn, drawn_counts = _restore_long(ids, counts, drawn, drawn_counts, draw.max_pieces)
        rows.append((drawn, drawn_counts))
    return rows


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
    """`stores(epoch)` is the token store of that epoch; without BPE-dropout, always the store itself."""

    pairs_per_draw = 8_192  # from one seed: another size draws other segmentations
    few_pairs = 200_000  # that one process draws before others would have started and drawn them

    def __init__(
        self,
        store: Path,
        rate: float,
        seed: int,
        max_pieces: int | None,
        workers: int,
        vocab: Vocabulary | None = None,
    ) -> None:
        self.folder = store.resolve()
        self.workers, self.vocab = workers, vocab
        self._stored = open_store(store, "train", vocab)
        identity = digest_file(store / MANIFEST_FILE)[:12]
        name = f"{identity}-{rate}-{seed}-{max_pieces}"
        self.epochs = self.folder.with_name(f"{self.folder.name}.epochs") / name
        self._draw = None
        if rate:
            self._draw = Draw(_read_merges(self.folder, self._stored), rate, seed, max_pieces)

    def __call__(self, epoch: int) -> TokenStore:
        if self._draw is None:
            return self._stored
        for folder in (self.epochs.parent, self.epochs):
            check_own_folder(folder, inside=folder.parent)
        path = self._path(epoch)
        # The first rank or run that comes draws the epoch; others wait here, and find it.
        with lock(make_folder(self.epochs), "drawing an epoch", patience_s=math.inf):
            if not path.exists():
                self._remove_before(epoch - 1)
                write_folder(path, partial(self._fill, replace(self._draw, epoch=epoch)))
            return open_store(path, "train", self.vocab)

    def _path(self, epoch: int) -> Path:
        return self.epochs / f"epoch-{epoch:06d}"

    def _remove_before(self, epoch: int) -> None:
        """Remove what is no longer needed: older epochs, and what killed processes left."""
        remove_leftovers(self.epochs)
        for old in self.epochs.glob(f"epoch-{'[0-9]' * 6}"):
            if old < self._path(epoch):
                remove_folder(old)

    def _fill(self, draw: Draw, folder: Path) -> None:
        """Write the whole epoch into `folder`."""
        for name in find_vocab_files(read_manifest(self.folder)):
            write_bytes(folder / name, read_bytes(self.folder / name))
        executor = use_processes(self.workers if len(self._stored) > self.few_pairs else 1)
        drawn = map_in_order(partial(draw_block, draw), self._blocks(), executor)
        with (
            closing(drawn),  # after an error too, the processes end here
            closing(SideWriter(folder, "train", "src")) as src,
            closing(SideWriter(folder, "train", "tgt")) as tgt,
            Progress(f"draw epoch {draw.epoch}", len(self._stored), "pairs") as progress,
        ):
            for src_row, tgt_row in drawn:
                src.append(*src_row)
                tgt.append(*tgt_row)
                progress.advance(len(src_row[1]))

    def _blocks(self) -> Iterator[StoredPairs]:
        n = len(self._stored)
        for first in range(0, n, self.pairs_per_draw):
            end = min(first + self.pairs_per_draw, n)
            src = self._stored.src.read_rows(first, end)
            yield StoredPairs(first, src, self._stored.tgt.read_rows(first, end))

    def remove(self) -> None:
        """Remove all epochs at the end of a run, which no longer needs them."""
        remove_entry(self.epochs)
        with suppress(OSError):  # other runs have theirs there
            self.epochs.parent.rmdir()
