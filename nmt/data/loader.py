"""Plan + store -> micro-batches on the device, made ahead of training in a thread.

Each update comes with the `Cursor` that follows it, which is all that a checkpoint needs to
continue. Micro-batches are numbered over the whole update and dealt to ranks by stride. A rank that
has none in the last round gets a blank one, whose labels do not count, because all ranks must take
part in every sum of gradients.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from nmt.config import TrainingConfig
from nmt.data.batch import Batch, BatchShape, Packed
from nmt.data.mixture import Mixture
from nmt.data.plan import Array, Cursor, limit_tokens, plan_epoch, round_up
from nmt.data.store import Side, TokenStore, find_bounds
from nmt.data.vocab import BOS, EOS
from nmt.system.ranks import World

UPDATES_AHEAD = 3  # how many are made before they are needed
Stores = Callable[[int], TokenStore]  # epoch -> the store to train on


@dataclass(frozen=True)
class MicroBatch:
    number: int  # within the update, over all ranks
    batch: Batch


@dataclass(frozen=True)
class Update:
    micros: list[MicroBatch]  # this rank's share
    n_src: int  # tokens of the whole update
    n_tgt: int
    next_cursor: Cursor  # where a run that stops after this update continues
    cursor: Cursor = Cursor()
    pairs: Sequence[Array] = ()  # of each micro-batch of the whole update


# ---- one batch ---------------------------------------------------------------------------------------------------


def make_batch(store: TokenStore, pairs: Array, shape: BatchShape | None = None) -> Batch:
    """Make a batch of pairs: sources end with eos, targets begin with bos, labels end with eos.

    It has the given shape if the pairs fit into it.
    """
    shape = shape or limit_tokens(0)  # into which nothing fits
    src = _pack_with_bos(store.src, pairs, shape, shape.src_tokens)
    tgt = _pack_with_bos(store.tgt, pairs, shape, shape.tgt_tokens)
    labels = _shift_to_eos(tgt)
    labels[tgt.n_live :] = -1
    return Batch(replace(src, tokens=_shift_to_eos(src)), tgt, labels, tgt.n_live)


def _pack_with_bos(side: Side, pairs: Array, shape: BatchShape, room: int) -> Packed:
    """Concatenate the sentences of `pairs`, with a bos before each; `room` is what the shape holds of this
    side.
    """
    ids, counts = side.read_sentences(pairs)
    lengths = counts + 1  # bos, then the pieces
    offsets = find_bounds(lengths)
    n_live, longest = int(offsets[-1]), int(lengths.max())
    is_piece = np.ones(n_live, bool)
    is_piece[offsets[:-1]] = False

    n_rows = round_up(n_live)
    if n_live <= room and len(pairs) <= shape.sentences and longest <= shape.longest:
        n_rows, longest = room, shape.longest
        offsets = np.pad(offsets, (0, shape.sentences - len(pairs)), mode="edge")
    tokens = np.zeros(n_rows, np.int64)
    tokens[:n_live][is_piece] = ids
    tokens[:n_live][~is_piece] = BOS
    return Packed(torch.from_numpy(tokens), torch.from_numpy(offsets), longest, n_live)


def _shift_to_eos(sentences: Packed) -> torch.Tensor:
    """Return the same sentences with an eos at the end instead of a bos at the beginning."""
    tokens = sentences.tokens.roll(-1)
    tokens[sentences.offsets[1:] - 1] = EOS
    return tokens


# ---- the updates of a rank ---------------------------------------------------------------------------------------


def make_micro_batches(
    store: TokenStore, micros: list[Array], world: World, shape: BatchShape | None
) -> list[MicroBatch]:
    """Make this rank's micro-batches of an update: numbers rank, rank + size, rank + 2 size, ..."""
    mine = []
    for number in range(world.rank, len(micros), world.size):
        batch = make_batch(store, micros[number], shape).to(world.device)
        mine.append(MicroBatch(number, batch))
    n_rounds = -(-len(micros) // world.size)
    if len(mine) < n_rounds:
        smallest = make_batch(store, micros[0][:1], shape).to(world.device)
        blank = replace(smallest, labels=torch.full_like(smallest.labels, -1), n_tokens=0)
        mine.append(MicroBatch(len(micros) + world.rank, blank))
    return mine


def make_updates(
    stores: Stores,
    config: TrainingConfig,
    micro_tokens: int,
    seed: int,
    cursor: Cursor,
    world: World,
    shape: BatchShape | None = None,
    mixture: Mixture | None = None,
) -> Iterator[Update]:
    """Yield this rank's share of each update from `cursor` on, without end; with `shape`, all batches
    have it.
    """
    epoch, first = cursor.epoch, cursor.update
    while True:
        store = stores(epoch)
        plan = plan_epoch(
            store.src.lengths, store.tgt.lengths, seed, epoch, config, micro_tokens, shape, mixture
        )
        for number in range(first, len(plan)):
            is_last = number + 1 == len(plan)
            next_cursor = Cursor(epoch + 1, 0) if is_last else Cursor(epoch, number + 1)
            pairs = plan.micros(number)
            micros = make_micro_batches(store, pairs, world, shape)
            n_src, n_tgt = plan.n_tokens(number)
            yield Update(micros, n_src, n_tgt, next_cursor, Cursor(epoch, number), pairs)
        epoch, first = epoch + 1, 0


class Loader:
    """Makes updates in a thread, a few ahead. Close it, or use it in a `with`, to end the thread."""

    def __init__(self, updates: Iterator[Update]) -> None:
        self._updates = updates
        self._thread = ThreadPoolExecutor(1)
        self._ahead = deque(self._thread.submit(next, updates) for _ in range(UPDATES_AHEAD))

    def __next__(self) -> Update:
        """Return the next update, or raise what its making raised."""
        self._ahead.append(self._thread.submit(next, self._updates))
        return self._ahead.popleft().result()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
