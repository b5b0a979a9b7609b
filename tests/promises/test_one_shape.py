"""One shape for every micro-batch of a run: whatever the lengths, the epoch and the number of
ranks, and nearly full.

Code for a GPU is compiled and recorded for that shape, so a second one would cost minutes or end
the run.
"""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import mark
from support.rings import amount

from nmt.config import Grouping, TrainingConfig
from nmt.data.batch import BatchShape
from nmt.data.plan import (
    choose_shape,
    deal_pairs,
    divide_tokens,
    fit_rows,
    plan_epoch,
    swap_until_fit,
)

UPDATE = 25_000
CONFIG = TrainingConfig(src_tokens=UPDATE, tgt_tokens=UPDATE)


def draw_lengths(kind: str, n: int) -> np.ndarray:
    """Draw the lengths of n sources and targets: of news, as in WMT14, where targets are a sixth longer;
    of even sides, so that both of each micro-batch are full; or of many short and unrelated ones.
    """
    random = np.random.default_rng(1)
    if kind == "news":
        src = np.exp(random.normal(3.1, 0.6, n))
        sides = np.stack((src, src * random.normal(1.15, 0.12, n)))
    elif kind == "even":
        sides = np.exp(random.normal(3.2, 0.7, n)) * np.exp(random.normal(0, 0.2, (2, n)))
    else:
        sides = random.geometric(0.12, (2, n))
    return sides.round().clip(2, 256).astype(np.int64)


@mark.parametrize("kind", ["news", "even", "unrelated"])
@mark.parametrize("n_ranks", [1, 3, 16])
@mark.parametrize("grouping", ["random", "length"])
def test_ranks_are_nearly_full(grouping: Grouping, n_ranks: int, kind: str) -> None:
    (src, tgt), micro_tokens = draw_lengths(kind, 5_400), divide_tokens(UPDATE, n_ranks)
    shape = choose_shape(src, tgt, micro_tokens, None, grouping)
    config = replace(CONFIG, grouping=grouping)
    useful = []
    for epoch in range(amount(1, 8)):
        plan = plan_epoch(src, tgt, 1, epoch, config, micro_tokens, shape)
        for number in range(len(plan)):
            n_rounds = -(-len(plan.micros(number)) // n_ranks)
            n_tokens = max(plan.n_tokens(number))
            if n_tokens > 0.95 * UPDATE:  # one of an epoch is what is left over
                useful.append(n_tokens / (n_rounds * n_ranks * shape.tgt_tokens))
    assert np.mean(useful) >= 0.97
    assert min(useful) > 0.9  # no update takes a second round


@mark.parametrize("n_ranks", [1, 8])
@mark.parametrize("sparse", [0, 1])
def test_rows_that_one_side_never_fills_are_left_out_and_updates_still_fit(
    n_ranks: int, sparse: int
) -> None:
    lengths = draw_lengths("news", 60_000)
    src, tgt = lengths[::-1] if sparse else lengths
    micro_tokens = divide_tokens(UPDATE, n_ranks)
    full = choose_shape(src, tgt, micro_tokens)
    shape = fit_rows(full, plan_epoch(src, tgt, 1, 0, CONFIG, micro_tokens, full))
    rows, n_rows = (shape.src_tokens, shape.tgt_tokens), full.tgt_tokens
    assert rows[1 - sparse] == n_rows and rows[sparse] < 0.93 * n_rows
    dead, n_rounds = [], []
    for epoch in (1, 2):  # not those that it was chosen by
        plan = plan_epoch(src, tgt, 1, epoch, CONFIG, micro_tokens, shape)
        for number in range(len(plan) - 1):
            n_rounds.append(-(-len(plan.micros(number)) // n_ranks))
            dead.append(1 - plan.n_tokens(number)[sparse] / (n_ranks * rows[sparse]))
    assert np.mean(n_rounds) <= 1.01 and np.mean(dead) < 0.06


def test_rows_that_only_some_updates_fill_stay() -> None:
    """About as many sources are longer than their targets as shorter."""
    src, tgt = draw_lengths("even", 20_000)
    full = choose_shape(src, tgt, UPDATE)
    assert fit_rows(full, plan_epoch(src, tgt, 1, 0, CONFIG, UPDATE, full)) == full


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 9, 60, 400]),
    st.sampled_from([1, 40, 200, 1_000]),
    st.sampled_from(["random", "length"]),
)
def test_no_lengths_ask_for_a_second_shape(
    seed: int, longest: int, micro_tokens: int, grouping: Grouping
) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, longest + 2, (2, 200))
    lengths[1, random.random(200) < 0.5] = 2
    src, tgt = lengths
    config = TrainingConfig(src_tokens=1_500, tgt_tokens=1_200, grouping=grouping)
    shape = choose_shape(src, tgt, micro_tokens, None, grouping)
    shape = fit_rows(shape, plan_epoch(src, tgt, seed, 0, config, micro_tokens, shape))
    plan = plan_epoch(src, tgt, seed, 0, config, micro_tokens, shape)
    micros = [pairs for number in range(len(plan)) for pairs in plan.micros(number)]
    for pairs in micros:
        n_src, n_tgt = lengths[:, pairs].sum(1)
        assert n_src <= shape.src_tokens and n_tgt <= shape.tgt_tokens
        assert len(pairs) <= shape.sentences and lengths[:, pairs].max() <= shape.longest
    assert sorted(np.concatenate(micros)) == list(range(200))


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(0, 40))
def test_swapping_keeps_every_pair_and_only_reports_what_holds(
    seed: int, n: int, spare: int
) -> None:
    random = np.random.default_rng(seed)
    lengths = np.sort(random.integers(1, 40, (2, 60)), axis=1)[:, ::-1].copy()
    random.shuffle(lengths[0])
    capacity = -(-lengths.sum(1, keepdims=True) // n) + spare  # of each side
    micro = deal_pairs(lengths, n)
    sizes = np.bincount(micro, minlength=n)
    fits = swap_until_fit(lengths, micro, n, capacity)
    held = np.stack([np.bincount(micro, side, n) for side in lengths])
    assert fits == bool((held <= capacity).all())
    # A swap changes no number of sentences
    assert np.array_equal(np.bincount(micro, minlength=n), sizes)


def test_the_shape_is_decided_by_lengths_and_share_alone() -> None:
    src, tgt = np.array([4, 10, 31]), np.array([5, 5, 5])
    assert choose_shape(src, tgt, 100) == BatchShape(128, 128, 76, 31)
    assert choose_shape(src, tgt, 20) == BatchShape(64, 64, 64, 31)  # the longest sentence must fit
    # As segmentation may yet draw it
    assert choose_shape(src, tgt, 20, max_pieces=99) == BatchShape(128, 128, 76, 100)
