"""Plans which pairs form which update, as a pure function of (seed, epoch, lengths).

An epoch is one shuffle, split into updates by a budget of source and target tokens (section 5.1).
If pairs are grouped by length, each update has pairs of about the same length, and it is the order
of updates that is random. The pairs of an update are dealt to as few micro-batches as can hold
them, all about equally full. So the pairs of update k do not depend on the number of ranks or on
what fits on each, a position in the data is two integers, and each epoch has every pair once, or as
often as the weights of the corpora say (`nmt/data/mixture.py`). If
all micro-batches must have one shape, dealing respects its limits, so no data ever needs a second
shape. Lengths always include bos or eos, as in `Side.lengths`.
"""

from dataclasses import dataclass, replace

import numpy as np

from nmt.config import Grouping, TrainingConfig
from nmt.data.batch import BatchShape
from nmt.data.mixture import Mixture, make_random
from nmt.system.records import COUNT, default

Array = np.ndarray
SPAN = 1 << 20  # pairs whose running sums are in memory at a time
# Numbers of tokens are rounded up to this: it suits the kernels, and memory is reused when sizes
# recur.
ROW_MULTIPLE = 64
SHORT_SHARE = 0.01  # of all tokens
FITTING = 0.995  # of all updates: they fit into the rows; the others take another micro-batch
SPARE_TOKENS = 32  # added to an equal share of an update, because pairs cannot be split evenly


@dataclass(frozen=True)
class Cursor:
    """The whole data position: the next update is number `update` of epoch `epoch`."""

    epoch: int = default(0, COUNT)
    update: int = default(0, COUNT)


# ---- the order of an epoch ---------------------------------------------------------------------------------------


def classify_lengths(lengths: Array) -> Array:
    """Return for each length the number of its class; lengths of a class differ by a tenth at most.

    Up to ten tokens each length is a class of its own.
    """
    starts = [1]
    longest = int(lengths.max(initial=1))
    while starts[-1] <= longest:
        starts.append(max(starts[-1] + 1, int(1.1 * starts[-1])))
    return np.searchsorted(np.array(starts), lengths, side="right").astype(np.uint8)


def sort_by_length(order: Array, lengths: Array) -> Array:
    """Sort the pairs of a shuffle by the class of their longer side; a class stays shuffled."""
    classes = classify_lengths(lengths.max(0))
    return order[np.argsort(classes[order], kind="stable")]


def shuffle_updates(
    order: Array, bounds: Array, random: np.random.Generator
) -> tuple[Array, Array]:
    """Return the pairs with their updates in random order, and the boundaries of the updates there."""
    updates = np.split(order, bounds[1:-1])
    shuffled = [updates[number] for number in random.permutation(len(updates))]
    return np.concatenate(shuffled), np.cumsum([0, *map(len, shuffled)])


# ---- an epoch into updates ---------------------------------------------------------------------------------------


def split_pairs(src_lengths: Array, tgt_lengths: Array, src_budget: int, tgt_budget: int) -> Array:
    """Return the boundaries of consecutive groups of pairs within both budgets; a pair beyond a
    budget is its own group.
    """
    bounds = [0]
    # A span has more pairs than a group can hold, because each pair has at least one token.
    span = max(SPAN, src_budget + 1)
    while (start := bounds[-1]) < len(src_lengths):
        src_ends = np.cumsum(src_lengths[start : start + span], dtype=np.int64)
        tgt_ends = np.cumsum(tgt_lengths[start : start + span], dtype=np.int64)
        first, src_before, tgt_before = 0, 0, 0
        while first < len(src_ends):
            src_end = int(src_ends.searchsorted(src_before + src_budget, side="right"))
            tgt_end = int(tgt_ends.searchsorted(tgt_before + tgt_budget, side="right"))
            first = max(min(src_end, tgt_end), first + 1)
            if first == len(src_ends) and start + first < len(src_lengths):
                break  # this group may continue beyond the span, so the next span begins with it
            bounds.append(start + first)
            src_before, tgt_before = int(src_ends[first - 1]), int(tgt_ends[first - 1])
    return np.array(bounds, dtype=np.int64)


# ---- an update into micro-batches --------------------------------------------------------------------------------


def deal_pairs(lengths: Array, n: int) -> Array:
    """Assign each pair, given longest first, to one of n micro-batches; `lengths` are (2, pairs).

    In each round, the longest pair goes to the emptiest micro-batch. On both sides all
    micro-batches end up about equally full, so shapes can be constant with little padding.
    """
    longer = lengths.max(0)
    n_pairs = len(longer)
    if n == 1:
        return np.zeros(n_pairs, dtype=np.int64)
    owner = np.empty(n_pairs, dtype=np.int64)
    held = np.zeros((2, n), dtype=np.int64)  # tokens of each side in each micro-batch
    for first in range(0, n_pairs, n):
        longest_first = first + np.argsort(longer[first : first + n], kind="stable")[::-1]
        emptiest = np.argsort(held.max(0), kind="stable")[: len(longest_first)]
        owner[longest_first] = emptiest
        held[:, emptiest] += lengths[:, longest_first]
    return owner


def swap_until_fit(lengths: Array, owner: Array, n: int, capacity: Array) -> bool:
    """Swap pairs between the n micro-batches, in place, until none has more tokens on a side than
    its `capacity`.

    `lengths` are (2, pairs), the capacity is (2, 1), `owner` is from `deal_pairs`. Return whether it
    succeeded.
    """
    held = np.stack([np.bincount(owner, side, n) for side in lengths]).astype(np.int64)  # (2, n)
    while (held > capacity).any():
        side, fullest = np.unravel_index((held - capacity).argmax(), held.shape)
        for other in np.argsort(held[side], kind="stable"):
            swap = _find_best_swap(lengths, owner, held, int(fullest), int(other), capacity)
            if swap is not None:
                break
        else:
            return False
        given, taken = swap
        owner[given], owner[taken] = other, fullest
        moved = lengths[:, given] - lengths[:, taken]
        held[:, fullest] -= moved
        held[:, other] += moved
    return True


def _find_best_swap(
    lengths: Array, owner: Array, held: Array, a: int, b: int, capacity: Array
) -> tuple[int, int] | None:
    """Find the pair of micro-batch `a` and the pair of `b` whose swap leaves the fewest tokens
    above the capacity.

    Return None if no swap reduces their number.
    """
    of_a = _pick_one_per_size(lengths, owner == a)
    of_b = _pick_one_per_size(lengths, owner == b)
    moved = lengths[:, of_a, None] - lengths[:, None, of_b]  # (2, pairs of a, pairs of b)
    excess = held - capacity  # (2, n)
    above_a = np.maximum(excess[:, a, None, None] - moved, 0)
    above_b = np.maximum(excess[:, b, None, None] + moved, 0)
    above = (above_a + above_b).sum(0)  # (pairs of a, pairs of b)
    above_now = np.maximum(excess[:, [a, b]], 0).sum()
    i, j = np.unravel_index(above.argmin(), above.shape)
    if above[i, j] >= above_now:
        return None
    return int(of_a[i]), int(of_b[j])


def _pick_one_per_size(lengths: Array, is_chosen: Array) -> Array:
    """Return the first of the chosen pairs for each combination of source and target length."""
    pairs = np.flatnonzero(is_chosen)
    sizes = lengths[0, pairs] << 32 | lengths[1, pairs]  # one number for both, faster to sort
    _, firsts = np.unique(sizes, return_index=True)
    return pairs[np.sort(firsts)]


# ---- sizes -------------------------------------------------------------------------------------------------------


def divide_tokens(tokens: int, n: int) -> int:
    """Return how many tokens a micro-batch must hold so that n of them hold an update of `tokens`."""
    if n == 1:
        return tokens
    return -(-tokens // n) + SPARE_TOKENS


def limit_tokens(micro_tokens: int) -> BatchShape:
    """Return what a micro-batch holds at most where shapes may vary: `micro_tokens` on each side."""
    return BatchShape(micro_tokens, micro_tokens, micro_tokens, micro_tokens)


def choose_shape(
    src_lengths: Array,
    tgt_lengths: Array,
    micro_tokens: int,
    max_pieces: int | None = None,
    grouping: Grouping = "random",
) -> BatchShape:
    """Choose the one shape of a run's micro-batches.

    It holds `micro_tokens` per side, or the longest sentence if that is more. It has room for one and
    a half times as many sentences as that many tokens usually contain or, if pairs are grouped by
    length, for as many as a micro-batch of short ones contains. If each epoch encodes its text anew,
    lengths differ between epochs, up to `max_pieces`.
    """
    sides = (src_lengths, tgt_lengths)
    longest = max(int(side.max(initial=1)) for side in sides)
    if max_pieces is not None:
        longest = max(longest, max_pieces + 1)
    tokens = round_up(max(micro_tokens, longest))
    if not len(src_lengths):
        return BatchShape(tokens, tokens, tokens, longest)
    if grouping == "length":
        most_sentences = tokens / find_short_length(src_lengths, tgt_lengths)
    else:
        mean_length = max(float(side.mean()) for side in sides)
        most_sentences = 1.5 * tokens / mean_length
    sentences = min(tokens, int(most_sentences) + ROW_MULTIPLE)
    return BatchShape(tokens, tokens, sentences, longest)


def find_short_length(src_lengths: Array, tgt_lengths: Array) -> int:
    """Return the length of a pair, by its longer side, below which SHORT_SHARE of all tokens lie.

    Micro-batches of shorter pairs reach the limit of sentences first, but there are few of them.
    """
    longer = np.sort(np.maximum(src_lengths, tgt_lengths))
    ends = np.cumsum(longer, dtype=np.int64)
    return int(longer[ends.searchsorted(SHORT_SHARE * ends[-1])])


def round_up(rows: int) -> int:
    """Round up to a multiple of ROW_MULTIPLE."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


# ---- the plan ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpochPlan:
    """The updates of one epoch."""

    lengths: Array  # (2, pairs), of sources and of targets
    order: Array  # the epoch's shuffle, uint32
    bounds: Array  # boundaries of the updates in `order`
    room: BatchShape  # of a micro-batch

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def _pairs(self, update: int) -> Array:
        return self.order[self.bounds[update] : self.bounds[update + 1]]

    def n_tokens(self, update: int) -> tuple[int, int]:
        """Count the source and target tokens of an update, over all ranks."""
        n_src, n_tgt = self.lengths[:, self._pairs(update)].sum(1).tolist()
        return n_src, n_tgt

    def micros(self, update: int) -> list[Array]:
        """Return the pairs of each micro-batch of an update, in global order.

        Within a micro-batch they are sorted from the longest target to the shortest. A pair that is
        too long for a micro-batch gets one of its own.
        """
        pairs = self._pairs(update)
        lengths = self.lengths[:, pairs].astype(np.int64)  # (2, pairs)
        longest_first = np.lexsort((pairs, *lengths))[::-1]
        pairs, lengths = pairs[longest_first], lengths[:, longest_first]

        capacity = np.array([[self.room.src_tokens], [self.room.tgt_tokens]])
        is_small = (lengths <= capacity).all(0)
        micros = [pairs[i : i + 1] for i in np.flatnonzero(~is_small)]
        pairs, lengths = pairs[is_small], lengths[:, is_small]
        if len(pairs):
            owner, n = self._deal(lengths, capacity)
            micros += [pairs[owner == number] for number in range(n)]
        return micros

    def _deal(self, lengths: Array, capacity: Array) -> tuple[Array, int]:
        """Assign pairs to as few micro-batches as can hold them; return each pair's micro-batch and
        how many there are.
        """
        n = int(-(-lengths.sum(1) // capacity[:, 0]).max())
        while True:
            owner = deal_pairs(lengths, n)
            has_room = np.bincount(owner).max() <= self.room.sentences
            if has_room and swap_until_fit(lengths, owner, n, capacity):
                return owner, n
            n += 1


def plan_epoch(
    src_lengths: Array,
    tgt_lengths: Array,
    seed: int,
    epoch: int,
    config: TrainingConfig,
    micro_tokens: int,
    shape: BatchShape | None = None,
    mixture: Mixture | None = None,
) -> EpochPlan:
    """Plan epoch `epoch` for pairs of these lengths: each of them once, or as often as the mixture
    has it.

    A micro-batch holds at most `micro_tokens` per side or, if there is a fixed shape, as much as
    the shape allows.
    """
    random = make_random(seed, epoch)
    order = np.arange(len(src_lengths), dtype=np.uint32)
    if mixture is not None:
        order = mixture.draw_rows(seed, epoch)
    random.shuffle(order)
    lengths = _stack((src_lengths, tgt_lengths))
    is_grouped = config.grouping == "length"
    if is_grouped:
        order = sort_by_length(order, lengths)
    src, tgt = lengths[:, order]
    bounds = split_pairs(src, tgt, config.src_tokens, config.tgt_tokens)
    if is_grouped:
        order, bounds = shuffle_updates(order, bounds, random)
    return EpochPlan(lengths, order, bounds, shape or limit_tokens(micro_tokens))


def _stack(sides: tuple[Array, Array]) -> Array:
    """Convert to the smallest integer type that holds the values: a plan of 36 million pairs stays
    in memory.
    """
    longest = max(int(side.max(initial=0)) for side in sides)
    return np.stack(sides, dtype=np.min_scalar_type(longest), casting="unsafe")


def fit_rows(shape: BatchShape, plan: EpochPlan) -> BatchShape:
    """Return the shape without the rows that one side of the plan's updates always leaves empty: most
    texts take more tokens in one language.

    Each row less is computed less. But an update that does not fit takes one micro-batch more, so
    nearly all must fit.
    """
    needs = np.array([plan.n_tokens(update) for update in range(len(plan))])
    shares = needs / needs.max(1, keepdims=True)  # of the rows that the fuller side takes
    rows = shape.tgt_tokens * np.quantile(shares, FITTING, 0, method="higher")
    src_tokens, tgt_tokens = (round_up(max(shape.longest, int(n))) for n in rows)
    return replace(shape, src_tokens=src_tokens, tgt_tokens=tgt_tokens)
