"""Which pairs form which update: a pure function of (seed, epoch, lengths).

An epoch is one shuffle, cut into updates of so many source and target tokens; within an update, pairs are sorted by
length and cut into micro-batches. So the pairs of update k do not depend on how many ranks there are or how much fits
on each, and a position in the data is two integers. No pair is dropped and none comes twice. (Section 5.1.)
"""

from dataclasses import dataclass

import numpy as np

from nmt.config import TrainingConfig

Array = np.ndarray


@dataclass(frozen=True)
class Cursor:
    """The whole data position: the next update is number `update` of epoch `epoch`."""

    epoch: int = 0
    update: int = 0


def cut(src_lengths: Array, tgt_lengths: Array, src_budget: int, tgt_budget: int) -> Array:
    """Boundaries of consecutive runs that hold at most so many tokens a side (a longer pair stands alone)."""
    src_ends, tgt_ends = np.cumsum(src_lengths, dtype=np.int64), np.cumsum(tgt_lengths, dtype=np.int64)
    bounds, first, n = [0], 0, len(src_ends)
    while first < n:
        src_before = src_ends[first - 1] if first else 0
        tgt_before = tgt_ends[first - 1] if first else 0
        end = min(np.searchsorted(src_ends, src_before + src_budget, side="right"),
                  np.searchsorted(tgt_ends, tgt_before + tgt_budget, side="right"))
        first = max(int(end), first + 1)
        bounds.append(first)
    return np.array(bounds, dtype=np.int64)


@dataclass(frozen=True)
class EpochPlan:
    """The updates of one epoch. Lengths count the sentence mark that each side carries."""

    src_lengths: Array
    tgt_lengths: Array
    order: Array  # the epoch's shuffle
    bounds: Array  # where updates begin and end in it
    micro_tokens: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def micros(self, update: int) -> list[Array]:
        """The pairs of an update's micro-batches, in global order, each of similar lengths."""
        ids = self.order[self.bounds[update]:self.bounds[update + 1]]
        ids = ids[np.lexsort((ids, self.src_lengths[ids], self.tgt_lengths[ids]))]
        src, tgt = self.src_lengths[ids], self.tgt_lengths[ids]
        bounds = cut(src, tgt, self.micro_tokens, self.micro_tokens)
        even = max(int(src.sum()), int(tgt.sum())) // (len(bounds) - 1) + max(int(src.max()), int(tgt.max()))
        if even < self.micro_tokens:  # the last one need not be a crumb
            bounds = min(bounds, cut(src, tgt, even, even), key=len)
        return [ids[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]

    def n_tokens(self, update: int) -> tuple[int, int]:
        """Source and target tokens of an update, over all ranks."""
        ids = self.order[self.bounds[update]:self.bounds[update + 1]]
        return int(self.src_lengths[ids].sum()), int(self.tgt_lengths[ids].sum())


def plan_epoch(src_pieces: Array, tgt_pieces: Array, seed: int, epoch: int, config: TrainingConfig) -> EpochPlan:
    """The plan of epoch `epoch` over pairs with so many pieces a side."""
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).permutation(len(src_pieces))
    src_lengths, tgt_lengths = src_pieces.astype(np.int32) + 1, tgt_pieces.astype(np.int32) + 1
    bounds = cut(src_lengths[order], tgt_lengths[order], config.src_tokens, config.tgt_tokens)
    return EpochPlan(src_lengths, tgt_lengths, order, bounds, config.micro_tokens)
