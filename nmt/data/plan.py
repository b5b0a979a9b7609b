"""Which pairs form which update: a pure function of (seed, epoch, lengths).

An epoch is one shuffle, cut into updates of so many source and target tokens; the pairs of an update are dealt to as
few micro-batches as hold them, all about equally full. So the pairs of update k do not depend on how many ranks there
are or how much fits on each, and a position in the data is two integers. No pair is dropped and none comes twice.
Where micro-batches must all have one shape, its sizes bound what is dealt, so no data can ask for a second shape.
(Section 5.1.)
"""

from dataclasses import dataclass

import numpy as np

from nmt.config import TrainingConfig
from nmt.data.batch import BatchShape
from nmt.system.records import COUNT, default

Array = np.ndarray
PIECE = 1 << 20  # pairs whose running sums are in memory at a time
ROW_MULTIPLE = (
    64  # rows of tokens: what kernels take at a time; freed memory of few sizes fits again
)
SPARE_TOKENS = (
    32  # of a micro-batch that is an equal share of an update: pairs do not divide evenly
)


@dataclass(frozen=True)
class Cursor:
    """The whole data position: the next update is number `update` of epoch `epoch`."""

    epoch: int = default(0, COUNT)
    update: int = default(0, COUNT)


def cut(src_lengths: Array, tgt_lengths: Array, src_budget: int, tgt_budget: int) -> Array:
    """Boundaries of consecutive runs that hold at most so many tokens a side (a longer pair stands alone)."""
    bounds, piece = (
        [0],
        max(PIECE, src_budget + 1),
    )  # more pairs than a run can hold: each has its mark
    while (start := bounds[-1]) < len(src_lengths):
        src_ends = np.cumsum(src_lengths[start : start + piece], dtype=np.int64)
        tgt_ends = np.cumsum(tgt_lengths[start : start + piece], dtype=np.int64)
        first, src_before, tgt_before = 0, 0, 0
        while first < len(src_ends):
            end = min(
                int(src_ends.searchsorted(src_before + src_budget, side="right")),
                int(tgt_ends.searchsorted(tgt_before + tgt_budget, side="right")),
            )
            first = max(end, first + 1)
            if first == len(src_ends) and start + first < len(src_lengths):
                break  # the run may go on in the next piece
            bounds.append(start + first)
            src_before, tgt_before = int(src_ends[first - 1]), int(tgt_ends[first - 1])
    return np.array(bounds, dtype=np.int64)


def deal(src_lengths: Array, tgt_lengths: Array, n: int) -> Array:
    """For each pair, given longest first, which of n micro-batches it goes to: round by round, the longest of a round
    to the emptiest. Both sides of all come out alike, so that shapes can be constant and little of them is empty."""
    if n == 1:
        return np.zeros(len(src_lengths), dtype=np.int64)
    longer = np.maximum(src_lengths, tgt_lengths)
    dealt, held = np.empty(len(longer), dtype=np.int64), np.zeros((2, n), dtype=np.int64)
    for first in range(0, len(longer), n):
        order = first + np.argsort(longer[first : first + n], kind="stable")[::-1]
        emptiest = np.argsort(held.max(0), kind="stable")[: len(order)]
        dealt[order] = emptiest
        held[0, emptiest] += src_lengths[order]
        held[1, emptiest] += tgt_lengths[order]
    return dealt


def exchange(lengths: Array, dealt: Array, n: int, capacity: int) -> bool:
    """Swap pairs between the n micro-batches of `dealt`, in place, until none holds more than `capacity` tokens of a
    side. `lengths` are (2, pairs). Returns whether that succeeded."""
    held = np.stack([np.bincount(dealt, side, n) for side in lengths]).astype(np.int64)  # (2, n)
    while (held > capacity).any():
        side, fullest = np.unravel_index(held.argmax(), held.shape)
        for other in np.argsort(held[side], kind="stable"):
            swap = _best_swap(lengths, dealt, held, int(fullest), int(other), capacity)
            if swap is not None:
                break
        else:
            return False
        mine, its = swap
        dealt[mine], dealt[its] = other, fullest
        moved = lengths[:, mine] - lengths[:, its]
        held[:, fullest] -= moved
        held[:, other] += moved
    return True


def _best_swap(
    lengths: Array, dealt: Array, held: Array, a: int, b: int, capacity: int
) -> tuple[int, int] | None:
    """The pair of micro-batch `a` and the pair of `b` whose exchange leaves the fewest tokens above the capacity; None
    if none leaves fewer than there are."""
    mine, its = _one_of_each_size(lengths, dealt == a), _one_of_each_size(lengths, dealt == b)
    moved = lengths[:, mine, None] - lengths[:, None, its]  # (2, pairs of a, pairs of b)
    above_a = np.maximum(held[:, a, None, None] - moved - capacity, 0)
    above_b = np.maximum(held[:, b, None, None] + moved - capacity, 0)
    above = (above_a + above_b).sum(0)
    i, j = np.unravel_index(above.argmin(), above.shape)
    if above[i, j] >= np.maximum(held[:, [a, b]] - capacity, 0).sum():
        return None
    return int(mine[i]), int(its[j])


def _one_of_each_size(lengths: Array, chosen: Array) -> Array:
    """One of the chosen pairs for each combination of lengths that they have."""
    pairs = np.flatnonzero(chosen)
    _, firsts = np.unique(lengths[0, pairs] << 32 | lengths[1, pairs], return_index=True)
    return pairs[np.sort(firsts)]


def equal_share(tokens: int, n: int) -> int:
    """The tokens that a micro-batch must hold so that an update of `tokens` goes into n of them."""
    return tokens if n == 1 else -(-tokens // n) + SPARE_TOKENS


def fixed_shape(
    src_lengths: Array, tgt_lengths: Array, micro_tokens: int, max_pieces: int | None = None
) -> BatchShape:
    """The one shape of a run's micro-batches: they hold `micro_tokens` a side or the longest sentence, if that is
    more, and half as many sentences again as are usual for so many tokens.

    With BPE-dropout other epochs have other lengths, which `max_pieces` bounds.
    """
    sides = (src_lengths, tgt_lengths)
    most_tokens = max(int(side.max(initial=1)) for side in sides)
    if max_pieces is not None:
        most_tokens = max(most_tokens, max_pieces + 1)
    rows = max(micro_tokens, most_tokens)
    tokens = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    mean_tokens = max(float(side.mean()) for side in sides) if len(src_lengths) else 1.0
    usual = tokens / mean_tokens
    sentences = min(tokens, int(1.5 * usual) + ROW_MULTIPLE)
    return BatchShape(tokens, sentences, most_tokens)


@dataclass(frozen=True)
class EpochPlan:
    """The updates of one epoch."""

    src_lengths: Array
    tgt_lengths: Array
    order: Array  # the epoch's shuffle, uint32
    bounds: Array  # where updates begin and end in it
    micro_tokens: int
    micro_sentences: int | None = None  # at most; None: as many as fit

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def micros(self, update: int) -> list[Array]:
        """The pairs of an update's micro-batches, in global order, each from its longest target to its shortest; a pair
        that is longer than a micro-batch may be stands alone."""
        ids = self.order[self.bounds[update] : self.bounds[update + 1]]
        src, tgt = self.src_lengths[ids].astype(np.int64), self.tgt_lengths[ids].astype(np.int64)
        order = np.lexsort((ids, src, tgt))[::-1]
        ids, src, tgt = ids[order], src[order], tgt[order]
        fits = np.maximum(src, tgt) <= self.micro_tokens
        alone = [ids[i : i + 1] for i in np.flatnonzero(~fits)]
        ids, lengths = ids[fits], np.stack((src, tgt))[:, fits]
        if not len(ids):
            return alone
        n = -(-int(lengths.sum(1).max()) // self.micro_tokens)
        while True:
            dealt = deal(lengths[0], lengths[1], n)
            has_few = (
                self.micro_sentences is None or np.bincount(dealt).max() <= self.micro_sentences
            )
            if has_few and exchange(lengths, dealt, n, self.micro_tokens):
                return alone + [ids[dealt == number] for number in range(n)]
            n += 1

    def n_tokens(self, update: int) -> tuple[int, int]:
        """Source and target tokens of an update, over all ranks."""
        ids = self.order[self.bounds[update] : self.bounds[update + 1]]
        return int(self.src_lengths[ids].sum()), int(self.tgt_lengths[ids].sum())


def plan_epoch(
    src_lengths: Array,
    tgt_lengths: Array,
    seed: int,
    epoch: int,
    config: TrainingConfig,
    micro_tokens: int,
    shape: BatchShape | None = None,
) -> EpochPlan:
    """The plan of epoch `epoch` over pairs of these lengths. A micro-batch holds at most `micro_tokens` a side or, where
    there is a fixed shape, what that holds."""
    order = np.arange(len(src_lengths), dtype=np.uint32)
    np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).shuffle(order)
    src_lengths, tgt_lengths = _shrink(src_lengths), _shrink(tgt_lengths)
    bounds = cut(src_lengths[order], tgt_lengths[order], config.src_tokens, config.tgt_tokens)
    if shape is not None:
        return EpochPlan(src_lengths, tgt_lengths, order, bounds, shape.tokens, shape.sentences)
    return EpochPlan(src_lengths, tgt_lengths, order, bounds, micro_tokens)


def _shrink(lengths: Array) -> Array:
    """The same numbers in the smallest type that holds them: a plan of 36 million pairs stays in memory for an epoch."""
    return lengths.astype(np.min_scalar_type(int(lengths.max(initial=0))))
