"""The training text segmented anew for each epoch, as BPE-dropout asks: one token store an epoch, made one ahead.

An epoch's plan needs all its lengths, so the whole epoch is drawn before it begins, by other processes, while the one
before it trains. It appears beside the store by one rename, once for all ranks and runs on it, and goes when it is left
behind. It follows from (store, rate, seed, epoch) alone. A sentence that would have more than `max_pieces` pieces keeps
its stored ones.
"""

import fcntl
import functools
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path

import numpy as np

from nmt.data.merges import Merges, gathered
from nmt.data.store import SideWriter, TokenStore, open_store
from nmt.system.errors import UserError
from nmt.system.files import digest, make_folder, remove_folder, sweep, write_folder
from nmt.system.pool import ordered
from nmt.system.progress import Progress
from nmt.system.run_folder import MANIFEST_FILE, VOCAB_FILE

BLOCK = 8_192  # pairs drawn from one seed: another size draws other segmentations
CHECKED = 500  # pairs that must come back as they are at rate 0
POLL_S = 0.2
Row = tuple[np.ndarray, np.ndarray]  # ids end to end, and how many are of each sentence


@dataclass(frozen=True)
class Recipe:
    """All that decides what is drawn."""

    store: Path
    identity: str  # the digest of the store's manifest
    rate: float
    seed: int
    max_pieces: int | None

    @property
    def folder(self) -> Path:
        name = f"{self.identity[:12]}-{self.rate}-{self.seed}-{self.max_pieces}"
        return self.store.with_name(f"{self.store.name}.epochs") / name


class Segmentations:
    """`segmentations(epoch)` is the token store of that epoch; the next one is begun. Close it to end that work."""

    def __init__(
        self, store: Path, rate: float, seed: int, max_pieces: int | None, workers: int
    ) -> None:
        self.recipe = Recipe(store.resolve(), digest(store / MANIFEST_FILE), rate, seed, max_pieces)
        self.workers = workers
        self._stored = open_store(store, "train")
        self._closed = threading.Event()
        self._background = ThreadPoolExecutor(1)
        self._ahead: Future[None] | None = None

    def __call__(self, epoch: int) -> TokenStore:
        if not self.recipe.rate:
            return self._stored
        if self._ahead:
            self._ahead.result()  # raises what went wrong
        while (store := self._find(epoch)) is None:
            self._make(epoch, is_awaited=True)
        self._ahead = self._background.submit(self._make, epoch + 1, is_awaited=False)
        return store

    def _path(self, epoch: int) -> Path:
        return self.recipe.folder / f"epoch-{epoch:06d}"

    def _find(self, epoch: int) -> TokenStore | None:
        path = self._path(epoch)
        try:
            return open_store(path, "train") if path.exists() else None
        except UserError:
            if path.exists():
                raise
            return None  # taken away, for another process is further on: it is made again

    def _make(self, epoch: int, is_awaited: bool) -> None:
        with self._alone():
            sweep(self.recipe.folder)
            for old in self.recipe.folder.glob("epoch-*"):
                if int(old.name.removeprefix("epoch-")) < epoch - 1:
                    remove_folder(old)
            if not self._path(epoch).exists():
                write_folder(
                    self._path(epoch), lambda folder: self._fill(folder, epoch, is_awaited)
                )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Only one process works in the folder; the kernel lets the next one in when it dies."""
        with open(make_folder(self.recipe.folder) / ".lock", "a") as file:
            while True:
                self._go_on()
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._closed.wait(POLL_S)
            yield

    def _go_on(self) -> None:
        if self._closed.is_set():
            raise CancelledError

    def _fill(self, folder: Path, epoch: int, is_awaited: bool) -> None:
        (folder / VOCAB_FILE).write_bytes((self.recipe.store / VOCAB_FILE).read_bytes())
        n = len(self._stored)
        work = functools.partial(draw_block, self.recipe, epoch)
        blocks = ((first, min(first + BLOCK, n)) for first in range(0, n, BLOCK))
        with (
            closing(SideWriter(folder, "train", "src")) as src,
            closing(SideWriter(folder, "train", "tgt")) as tgt,
            closing(
                Progress(f"segment epoch {epoch}", n, "pairs", is_shown=is_awaited)
            ) as progress,
        ):
            for rows in ordered(
                work, blocks, max(2, self.workers)
            ):  # with 1 all would be done in this process
                self._go_on()
                for side, row in zip((src, tgt), rows, strict=True):
                    side.append(*row)
                progress.advance(len(rows[0][1]))

    def __enter__(self) -> "Segmentations":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remove(self) -> None:
        """At the end of a recipe, when nobody will train on it again."""
        if self.recipe.rate:
            shutil.rmtree(self.recipe.folder, ignore_errors=True)
            with suppress(OSError):  # other runs have theirs there
                self.recipe.folder.parent.rmdir()

    def close(self) -> None:
        self._closed.set()
        self._background.shutdown(cancel_futures=True)


def draw_block(recipe: Recipe, epoch: int, block: tuple[int, int]) -> list[Row]:
    """Pairs `block[0]` to `block[1]` as an epoch has them, source and target."""
    if parent_process() is not None:
        os.setpriority(os.PRIO_PROCESS, 0, 19)  # training goes first
    store, merges = _opened(recipe.store, recipe.identity)
    first, end = block
    rows = []
    for number, side in enumerate((store.src, store.tgt)):
        random = np.random.Generator(
            np.random.Philox(np.random.SeedSequence((recipe.seed, epoch, first, number)))
        )
        offsets = np.asarray(side.offsets[first : end + 1])
        ids, lengths = np.asarray(side.ids[offsets[0] : offsets[-1]]), np.diff(offsets)
        drawn, counts = merges.segment(ids, lengths, recipe.rate, random)
        is_kept = counts > (recipe.max_pieces or len(drawn))
        starts = np.where(is_kept, offsets[:-1] - offsets[0], len(ids) + np.cumsum(counts) - counts)
        counts = np.where(is_kept, lengths, counts)
        rows.append((gathered(np.concatenate((ids, drawn)), starts, counts), counts))
    return rows


@functools.lru_cache(1)
def _opened(folder: Path, identity: str) -> tuple[TokenStore, Merges]:
    store, merges = open_store(folder, "train"), Merges((folder / VOCAB_FILE).read_bytes())
    for side in (store.src, store.tgt):
        offsets = np.asarray(side.offsets[: CHECKED + 1])
        again, _ = merges.segment(
            np.asarray(side.ids[: offsets[-1]]), np.diff(offsets), 0.0, np.random.default_rng(0)
        )
        if not np.array_equal(again, side.ids[: offsets[-1]]):
            raise UserError(
                f"{folder / VOCAB_FILE}: not a BPE that merges letters within words, as nmt-prepare learns it; "
                "with this model set vocab.bpe_dropout=0"
            )
    return store, merges
