"""Plan + store -> micro-batches on the device, made one update ahead in a thread.

Each update comes with the `Cursor` that follows it, which is all a checkpoint must hold to continue. Micro-batches are
numbered over the whole update and dealt to ranks by stride; a rank left without one in the last round gets a copy whose
labels do not count, so that all ranks take part in every sum of gradients.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from nmt.config import TrainingConfig
from nmt.data.batch import Batch, BatchShape, Packed
from nmt.data.plan import ROW_MULTIPLE, Array, Cursor, plan_epoch
from nmt.data.store import Side, TokenStore
from nmt.data.vocab import BOS, EOS
from nmt.system.ranks import World

AHEAD = 2
Stores = Callable[[int], TokenStore]  # epoch -> what it trains on


@dataclass(frozen=True)
class Micro:
    number: int  # within the update, over all ranks
    batch: Batch


@dataclass(frozen=True)
class Update:
    micros: list[Micro]  # this rank's share
    n_src: int  # tokens of the whole update
    n_tgt: int
    after: Cursor
    at: Cursor = Cursor()
    pairs: Sequence[Array] = ()  # those of each micro-batch of the whole update


def _packed(side: Side, ids: Array, shape: BatchShape | None) -> Packed:
    """Sentences `ids` end to end, each opened by bos; in the given shape, if they fit into it."""
    firsts = np.asarray(side.offsets)[ids]
    lengths = np.asarray(side.offsets)[ids + 1] - firsts + 1  # bos, then the pieces
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    places = np.arange(offsets[-1]) + np.repeat(firsts - 1 - offsets[:-1], lengths)
    n_live, longest = len(places), int(lengths.max())
    n_rows = -(-n_live // ROW_MULTIPLE) * ROW_MULTIPLE
    if (
        shape is not None
        and n_live <= shape.tokens
        and len(ids) <= shape.sentences
        and longest <= shape.longest
    ):
        n_rows, longest = shape.tokens, shape.longest
        offsets = np.pad(offsets, (0, shape.sentences - len(ids)), mode="edge")
    tokens = np.zeros(n_rows, np.int64)
    tokens[:n_live] = np.asarray(side.ids)[places]
    begins = offsets[: len(ids)]
    tokens[begins] = BOS  # where the piece before the sentence stood
    return Packed(torch.from_numpy(tokens), torch.from_numpy(offsets), longest, n_live)


def _closed(sentences: Packed) -> torch.Tensor:
    """The same sentences closed by eos instead of opened by bos."""
    tokens = sentences.tokens.roll(-1)
    tokens[sentences.offsets[1:] - 1] = EOS
    return tokens


def make_batch(store: TokenStore, ids: Array, shape: BatchShape | None = None) -> Batch:
    """The pairs `ids`: the source closed by eos, the target opened by bos, the labels closed by eos."""
    src, tgt = _packed(store.src, ids, shape), _packed(store.tgt, ids, shape)
    labels = _closed(tgt)
    labels[tgt.n_live :] = -1
    return Batch(replace(src, tokens=_closed(src)), tgt, labels, tgt.n_live)


def dealt(
    store: TokenStore, micros: list[Array], world: World, shape: BatchShape | None = None
) -> list[Micro]:
    """This rank's micro-batches of an update: numbers rank, rank + size, rank + 2 size, ..."""
    numbers = range(world.rank, len(micros), world.size)
    mine = [Micro(n, make_batch(store, micros[n], shape).to(world.device)) for n in numbers]
    rounds = -(-len(micros) // world.size)
    if len(mine) < rounds:
        one = make_batch(store, micros[0][:1], shape).to(world.device)
        blank = replace(one, labels=torch.full_like(one.labels, -1), n_tokens=0)
        mine.append(Micro(len(micros) + world.rank, blank))
    return mine


def _updates(
    stores: Stores,
    config: TrainingConfig,
    micro_tokens: int,
    seed: int,
    cursor: Cursor,
    world: World,
    shape: BatchShape | None,
) -> Iterator[Update]:
    epoch, first = cursor.epoch, cursor.update
    while True:
        store = stores(epoch)
        plan = plan_epoch(
            store.src.lengths, store.tgt.lengths, seed, epoch, config, micro_tokens, shape
        )
        for number in range(first, len(plan)):
            is_last = number + 1 == len(plan)
            after = Cursor(epoch + 1, 0) if is_last else Cursor(epoch, number + 1)
            pairs = plan.micros(number)
            mine = dealt(store, pairs, world, shape)
            yield Update(mine, *plan.n_tokens(number), after, Cursor(epoch, number), pairs)
        epoch, first = epoch + 1, 0


class Loader:
    """The endless stream of updates from `cursor` on, in one shape if it is given. Close it, or use it in a `with`, to
    end its thread."""

    def __init__(
        self,
        stores: Stores,
        config: TrainingConfig,
        micro_tokens: int,
        seed: int,
        cursor: Cursor,
        world: World,
        shape: BatchShape | None = None,
    ) -> None:
        self._ready: queue.Queue[Update | BaseException] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        source = _updates(stores, config, micro_tokens, seed, cursor, world, shape)
        self._thread = threading.Thread(target=self._fill, args=(source,), daemon=True)
        self._thread.start()

    def _fill(self, source: Iterator[Update]) -> None:
        try:
            for update in source:
                self._put(update)
                if self._closed.is_set():
                    return
        except BaseException as error:  # handed to the trainer, who raises it
            self._put(error)

    def _put(self, item: Update | BaseException) -> None:
        while not self._closed.is_set():
            try:
                return self._ready.put(item, timeout=0.2)
            except queue.Full:
                continue

    def __next__(self) -> Update:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
