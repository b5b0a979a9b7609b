"""The plan against one made pair by pair, its properties over random lengths, and how full its
updates are.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch, mark

from nmt.config import TrainingConfig
from nmt.data import plan as plan_module
from nmt.data.plan import classify_lengths, plan_epoch

MICRO_TOKENS = 250
CONFIG = TrainingConfig(src_tokens=900, tgt_tokens=800)
GROUPED = TrainingConfig(src_tokens=900, tgt_tokens=800, grouping="length")


def runs(
    pairs: list[int], src: list[int], tgt: list[int], src_budget: int, tgt_budget: int
) -> Iterator[list[int]]:
    """Pair by pair: a run ends where the next pair would not fit."""
    run: list[int] = []
    n_src = n_tgt = 0
    for pair in pairs:
        if run and (n_src + src[pair] > src_budget or n_tgt + tgt[pair] > tgt_budget):
            yield run
            run, n_src, n_tgt = [], 0, 0
        run, n_src, n_tgt = [*run, pair], n_src + src[pair], n_tgt + tgt[pair]
    yield run


@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 300) | st.just(3_000),
    st.integers(0, 9),
    st.sampled_from([1, 9, 250, 255, 300, 70_000]),
    st.sampled_from([1, 1_000, 10_000]),
    st.integers(20, 400),
)
def test_as_if_made_pair_by_pair(
    seed: int, n: int, epoch: int, longest: int, piece: int, micro_tokens: int
) -> None:
    """The updates do not depend on what a micro-batch holds."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.integers(1, 60, (2, n)), longest).astype(np.int32)
    lengths[rng.integers(2), rng.integers(n)] = longest
    with MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "SPAN", piece)
        plan = plan_epoch(lengths[0], lengths[1], seed, epoch, CONFIG, micro_tokens)
    order = (
        np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
        .permutation(n)
        .tolist()
    )
    src, tgt = lengths.tolist()
    updates = list(runs(order, src, tgt, 900, 800))
    assert len(plan) == len(updates)
    for number, update in enumerate(updates):
        micros = [micro.tolist() for micro in plan.micros(number)]
        assert sorted(pair for micro in micros for pair in micro) == sorted(update)
        assert all(micro == sorted(micro, key=lambda i: (-tgt[i], -src[i], -i)) for micro in micros)
        for micro in micros:
            assert len(micro) == 1 or lengths[:, micro].sum(1).max() <= micro_tokens
        assert plan.n_tokens(number) == (sum(src[i] for i in update), sum(tgt[i] for i in update))


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(1, 3_000))
def test_updates_grouped_by_length_hold_every_pair_once_beside_its_like(
    seed: int, epoch: int, n: int
) -> None:
    src, tgt = np.random.default_rng(seed).integers(1, 60, (2, n))
    plan = plan_epoch(src, tgt, seed, epoch, GROUPED, MICRO_TOKENS)
    updates = [plan.order[a:b] for a, b in itertools.pairwise(plan.bounds)]
    assert sorted(np.concatenate(updates)) == list(range(n))

    # no class of lengths lies between the lowest and the highest of an update, but in it
    classes = classify_lengths(np.maximum(src, tgt))
    lowest = np.array([classes[update].min() for update in updates])
    highest = np.array([classes[update].max() for update in updates])
    by_length = np.lexsort((highest, lowest))
    assert (highest[by_length][:-1] <= lowest[by_length][1:]).all()
    for number in range(len(plan)):
        n_src, n_tgt = plan.n_tokens(number)
        assert (n_src <= 900 and n_tgt <= 800) or len(updates[number]) == 1


def test_updates_grouped_by_length_come_in_random_order_and_anew_in_each_epoch() -> None:
    src, tgt = np.random.default_rng(0).integers(1, 60, (2, 10_000))
    longer = np.maximum(src, tgt)
    seen = []
    for epoch in range(3):
        plan = plan_epoch(src, tgt, 1, epoch, GROUPED, MICRO_TOKENS)
        again = plan_epoch(src, tgt, 1, epoch, GROUPED, 77)
        assert np.array_equal(plan.order, again.order) and np.array_equal(plan.bounds, again.bounds)
        updates = [plan.order[a:b] for a, b in itertools.pairwise(plan.bounds)]
        means = np.array([longer[update].mean() for update in updates])
        neighbours = np.corrcoef(means[:-1], means[1:])[0, 1]
        assert abs(neighbours) < 0.2 and means.std() > 10
        seen.append({frozenset(update.tolist()) for update in updates})
    assert not seen[0] & seen[1] and not seen[1] & seen[2]


def test_classes_of_length() -> None:
    lengths = np.arange(1, 301)
    classes = classify_lengths(lengths)
    assert (np.diff(classes.astype(int)) >= 0).all()
    assert len(set(classes[:10])) == 10
    for number in set(classes):
        of_class = lengths[classes == number]
        assert of_class.max() <= 1.1 * of_class.min()


@mark.parametrize("longest, kind", [(255, np.uint8), (256, np.uint16), (65_536, np.uint32)])
def test_small_types_hold_what_they_must(longest: int, kind: type) -> None:
    lengths = np.array([longest, 3])
    plan = plan_epoch(lengths, lengths, 1, 0, CONFIG, MICRO_TOKENS)
    assert plan.lengths.tolist() == [[longest, 3]] * 2 and plan.lengths.dtype == kind
    assert plan.order.dtype == np.uint32
