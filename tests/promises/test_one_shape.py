"""One shape for every micro-batch of a run: whatever the lengths, the epoch and the number of
ranks, and nearly full.

Code for a GPU is compiled and recorded for that shape, so a second one would cost minutes or end
the run.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from nmt.data.store import Side, TokenStore

UPDATE = 25_000
CONFIG = TrainingConfig(src_tokens=UPDATE, tgt_tokens=UPDATE)
RANKS = (1, 3, 16)
N_EPOCHS = amount(3, 8)


def news(random: np.random.Generator, n: int) -> list[np.ndarray]:
    """Lengths in pieces like those of WMT14: targets a sixth longer than sources."""
    src = np.exp(random.normal(3.1, 0.6, n))
    return [src, src * random.normal(1.15, 0.12, n)]


def even(random: np.random.Generator, n: int) -> list[np.ndarray]:
    """Both sides equally long on average, so both sides of each micro-batch are full."""
    middle = np.exp(random.normal(3.2, 0.7, n))
    return [middle * np.exp(random.normal(0, 0.2, n)) for _ in range(2)]


def unrelated(random: np.random.Generator, n: int) -> list[np.ndarray]:
    """Many short sentences, and the length of a source says nothing about its target."""
    return [random.geometric(0.12, n).astype(float) for _ in range(2)]


LENGTHS = {"news": news, "even": even, "unrelated": unrelated}


@cache
def store_of(name: str, n: int = 2_700) -> TokenStore:
    random = np.random.default_rng(1)
    sides = []
    for lengths in LENGTHS[name](random, n):
        offsets = np.concatenate(
            ([0], np.cumsum(np.clip(lengths.round(), 1, 255).astype(np.int64)))
        )
        sides.append(Side(random.integers(4, 90, int(offsets[-1])).astype(np.uint16), offsets))
    return TokenStore(sides[0], sides[1])


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("n_ranks", RANKS)
@pytest.mark.parametrize("grouping", ["random", "length"])
def test_epochs_have_one_shape_and_nearly_full_ranks(
    grouping: Grouping, name: str, n_ranks: int
) -> None:
    store, micro_tokens = store_of(name), divide_tokens(UPDATE, n_ranks)
    src, tgt = store.src.lengths, store.tgt.lengths
    shape = choose_shape(src, tgt, micro_tokens, None, grouping)
    config = replace(CONFIG, grouping=grouping)
    useful = []
    for epoch in range(N_EPOCHS):
        plan = plan_epoch(src, tgt, 1, epoch, config, micro_tokens, shape)
        for number in range(len(plan)):
            micros = plan.micros(number)
            for pairs in micros:
                assert len(pairs) <= shape.sentences
                n_src, n_tgt = plan.lengths[:, pairs].sum(1)
                assert n_src <= shape.src_tokens and n_tgt <= shape.tgt_tokens
            n_rounds = -(-len(micros) // n_ranks)
            n_tokens = max(plan.n_tokens(number))
            if n_tokens > 0.95 * UPDATE:  # one of an epoch is what is left over
                useful.append(n_tokens / (n_rounds * n_ranks * shape.tgt_tokens))
    assert np.mean(useful) >= 0.97
    assert min(useful) > 0.9  # no update takes a second round


def in_pieces(lengths: list[np.ndarray]) -> list[np.ndarray]:
    return [side.round().clip(1, 255).astype(np.int64) for side in lengths]


@pytest.mark.parametrize("n_ranks", [1, 8])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_rows_that_one_side_never_fills_are_left_out_and_updates_still_fit(
    n_ranks: int, is_swapped: bool
) -> None:
    src, tgt = in_pieces(news(np.random.default_rng(1), 60_000))
    sparse = 0
    if is_swapped:
        src, tgt, sparse = tgt, src, 1
    micro_tokens = divide_tokens(UPDATE, n_ranks)
    full = choose_shape(src, tgt, micro_tokens)
    shape = fit_rows(full, plan_epoch(src, tgt, 1, 0, CONFIG, micro_tokens, full))
    assert shape == fit_rows(full, plan_epoch(src, tgt, 1, 0, CONFIG, micro_tokens, full))
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
    src, tgt = in_pieces(even(np.random.default_rng(1), 20_000))
    full = choose_shape(src, tgt, UPDATE)
    assert fit_rows(full, plan_epoch(src, tgt, 1, 0, CONFIG, UPDATE, full)) == full


@settings(max_examples=30)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 9, 60, 400]),
    st.sampled_from([1, 40, 200, 1_000]),
)
def test_no_lengths_ask_for_a_second_shape(seed: int, longest: int, micro_tokens: int) -> None:
    random = np.random.default_rng(seed)
    src, tgt = random.integers(2, longest + 2, (2, 200))
    tgt[random.random(200) < 0.5] = 2
    shape = choose_shape(src, tgt, micro_tokens)
    config = TrainingConfig(src_tokens=1_500, tgt_tokens=1_200)
    shape = fit_rows(shape, plan_epoch(src, tgt, seed, 0, config, micro_tokens, shape))
    plan = plan_epoch(src, tgt, seed, 0, config, micro_tokens, shape)
    seen = []
    for number in range(len(plan)):
        for pairs in plan.micros(number):
            assert len(pairs) <= shape.sentences
            assert src[pairs].sum() <= shape.src_tokens and tgt[pairs].sum() <= shape.tgt_tokens
            assert max(src[pairs].max(), tgt[pairs].max()) <= shape.longest
            seen.extend(pairs.tolist())
    assert sorted(seen) == list(range(200))


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
