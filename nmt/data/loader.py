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

from nmt.batch import Batch, Packed
from nmt.config import TrainingConfig
from nmt.data.plan import Array, Cursor, plan_epoch
from nmt.data.store import Side, TokenStore
from nmt.data.vocab import BOS, EOS
from nmt.dist import World

AHEAD = 2
STEP = 64  # rows of tokens are a multiple: of few sizes, so that freed memory fits again
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


def _power(n: int) -> int:
    """The power of two from n on."""
    return 1 << (n - 1).bit_length()


def _packed(side: Side, ids: Array, room: int) -> Packed:
    """Sentences `ids` end to end, each opened by bos; with room for so many tokens, in one of few shapes."""
    firsts = np.asarray(side.offsets)[ids]
    lengths = np.asarray(side.offsets)[ids + 1] - firsts + 1
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    places = np.arange(offsets[-1]) + np.repeat(firsts - 1 - offsets[:-1], lengths)
    n_live, longest = len(places), int(lengths.max())
    tokens = np.zeros(-(-max(n_live, room) // STEP) * STEP, np.int64)
    tokens[:n_live] = np.asarray(side.ids)[places]
    tokens[offsets[:-1]] = BOS  # where the piece before the sentence stood
    if room:
        offsets = np.pad(offsets, (0, _power(len(ids)) - len(ids)), mode="edge")
        longest = max(32, _power(longest))
    return Packed(torch.from_numpy(tokens), torch.from_numpy(offsets), longest, n_live)


def _closed(sentences: Packed) -> torch.Tensor:
    """The same sentences closed by eos instead of opened by bos."""
    tokens = sentences.tokens.roll(-1)
    tokens[sentences.offsets[1:] - 1] = EOS
    return tokens


def make_batch(store: TokenStore, ids: Array, room: int = 0) -> Batch:
    """The pairs `ids`: the source closed by eos, the target opened by bos, the labels closed by eos. With `room` for so
    many tokens a side, shapes are constant but for the powers of two that bound sentences and their length."""
    src, tgt = _packed(store.src, ids, room), _packed(store.tgt, ids, room)
    labels = _closed(tgt)
    labels[tgt.n_live:] = -1
    return Batch(replace(src, tokens=_closed(src)), tgt, labels, tgt.n_live)


def dealt(store: TokenStore, micros: list[Array], world: World, room: int = 0) -> list[Micro]:
    """This rank's micro-batches of an update: numbers rank, rank + size, rank + 2 size, ..."""
    mine = [Micro(n, make_batch(store, micros[n], room).to(world.device))
            for n in range(world.rank, len(micros), world.size)]
    rounds = -(-len(micros) // world.size)
    if len(mine) < rounds:
        one = make_batch(store, micros[0][:1], room).to(world.device)
        blank = replace(one, labels=torch.full_like(one.labels, -1), n_tokens=0)
        mine.append(Micro(len(micros) + world.rank, blank))
    return mine


def _updates(stores: Stores, config: TrainingConfig, seed: int, cursor: Cursor, world: World) -> Iterator[Update]:
    epoch, first = cursor.epoch, cursor.update
    room = config.room if config.is_compiled(world.device.type) else 0
    while True:
        store = stores(epoch)
        plan = plan_epoch(store.src.lengths, store.tgt.lengths, seed, epoch, config)
        for number in range(first, len(plan)):
            is_last = number + 1 == len(plan)
            after = Cursor(epoch + 1, 0) if is_last else Cursor(epoch, number + 1)
            pairs = plan.micros(number)
            mine = dealt(store, pairs, world, room)
            yield Update(mine, *plan.n_tokens(number), after, Cursor(epoch, number), pairs)
        epoch, first = epoch + 1, 0


class Loader:
    """The endless stream of updates from `cursor` on. Close it, or use it in a `with`, to end its thread."""

    def __init__(self, stores: Stores, config: TrainingConfig, seed: int, cursor: Cursor, world: World) -> None:
        self._ready: queue.Queue[Update | BaseException] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(stores, config, seed, cursor, world), daemon=True)
        self._thread.start()

    def _fill(self, stores: Stores, config: TrainingConfig, seed: int, cursor: Cursor, world: World) -> None:
        try:
            for update in _updates(stores, config, seed, cursor, world):
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
