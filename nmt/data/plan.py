"""Which pairs form which update: a pure function of (seed, epoch, lengths).

An epoch is one shuffle, cut into updates of so many source and target tokens; the pairs of an update are dealt to as
few micro-batches as hold them, all about equally full. So the pairs of update k do not depend on how many ranks there
are or how much fits on each, and a position in the data is two integers. No pair is dropped and none comes twice.
(Section 5.1.)
"""

from dataclasses import dataclass

import numpy as np

from nmt.config import TrainingConfig

Array = np.ndarray
PIECE = 1 << 20  # pairs whose running sums are in memory at a time


@dataclass(frozen=True)
class Cursor:
    """The whole data position: the next update is number `update` of epoch `epoch`."""

    epoch: int = 0
    update: int = 0


def cut(src_lengths: Array, tgt_lengths: Array, src_budget: int, tgt_budget: int) -> Array:
    """Boundaries of consecutive runs that hold at most so many tokens a side (a longer pair stands alone)."""
    bounds, piece = [0], max(PIECE, src_budget + 1)  # more pairs than a run can hold: each has its mark
    while (start := bounds[-1]) < len(src_lengths):
        src_ends = np.cumsum(src_lengths[start:start + piece], dtype=np.int64)
        tgt_ends = np.cumsum(tgt_lengths[start:start + piece], dtype=np.int64)
        first, src_before, tgt_before = 0, 0, 0
        while first < len(src_ends):
            end = min(int(src_ends.searchsorted(src_before + src_budget, side="right")),
                      int(tgt_ends.searchsorted(tgt_before + tgt_budget, side="right")))
            first = max(end, first + 1)
            if first == len(src_ends) and start + first < len(src_lengths):
                break  # the run may go on in the next piece
            bounds.append(start + first)
            src_before, tgt_before = int(src_ends[first - 1]), int(tgt_ends[first - 1])
    return np.array(bounds, dtype=np.int64)


def deal(src_lengths: Array, tgt_lengths: Array, n: int) -> Array:
    """For each pair, given longest first, which of n micro-batches it goes to: round by round, the longest of a round
    to the emptiest. Both sides of all come out alike, so that shapes can be constant and little of them is empty."""
    longer = np.maximum(src_lengths, tgt_lengths)
    dealt, held = np.empty(len(longer), dtype=np.int64), np.zeros((2, n), dtype=np.int64)
    for first in range(0, len(longer), n):
        order = first + np.argsort(longer[first:first + n], kind="stable")[::-1]
        emptiest = np.argsort(held.max(0), kind="stable")[:len(order)]
        dealt[order] = emptiest
        held[0, emptiest] += src_lengths[order]
        held[1, emptiest] += tgt_lengths[order]
    return dealt


@dataclass(frozen=True)
class EpochPlan:
    """The updates of one epoch. Lengths count the sentence mark that each side carries."""

    src_lengths: Array
    tgt_lengths: Array
    order: Array  # the epoch's shuffle, uint32
    bounds: Array  # where updates begin and end in it
    micro_tokens: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def micros(self, update: int) -> list[Array]:
        """The pairs of an update's micro-batches, in global order, each from its longest target to its shortest; a pair
        that is longer than a micro-batch may be stands alone."""
        ids = self.order[self.bounds[update]:self.bounds[update + 1]]
        src, tgt = self.src_lengths[ids].astype(np.int64), self.tgt_lengths[ids].astype(np.int64)
        order = np.lexsort((ids, src, tgt))[::-1]
        ids, src, tgt = ids[order], src[order], tgt[order]
        fits = np.maximum(src, tgt) <= self.micro_tokens
        alone = [ids[i:i + 1] for i in np.flatnonzero(~fits)]
        ids, src, tgt = ids[fits], src[fits], tgt[fits]
        n = -(-max(int(src.sum()), int(tgt.sum())) // self.micro_tokens)
        while n:
            dealt = deal(src, tgt, n)
            if max(np.bincount(dealt, src).max(), np.bincount(dealt, tgt).max()) <= self.micro_tokens:
                break
            n += 1
        return alone + [ids[dealt == number] for number in range(n)]

    def n_tokens(self, update: int) -> tuple[int, int]:
        """Source and target tokens of an update, over all ranks."""
        ids = self.order[self.bounds[update]:self.bounds[update + 1]]
        return int(self.src_lengths[ids].sum()), int(self.tgt_lengths[ids].sum())


def plan_epoch(src_pieces: Array, tgt_pieces: Array, seed: int, epoch: int, config: TrainingConfig) -> EpochPlan:
    """The plan of epoch `epoch` over pairs with so many pieces a side."""
    order = np.arange(len(src_pieces), dtype=np.uint32)
    np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).shuffle(order)
    src_lengths, tgt_lengths = _marked(src_pieces), _marked(tgt_pieces)
    bounds = cut(src_lengths[order], tgt_lengths[order], config.src_tokens, config.tgt_tokens)
    return EpochPlan(src_lengths, tgt_lengths, order, bounds, config.sized)


def _marked(pieces: Array) -> Array:
    """One more each, in the smallest type that holds them."""
    return pieces.astype(np.min_scalar_type(int(pieces.max(initial=0)) + 1)) + np.uint8(1)
