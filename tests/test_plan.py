"""Properties of the plan over random lengths: nothing lost, nothing doubled, budgets kept, a pure function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.config import TrainingConfig
from nmt.data.plan import cut, plan_epoch

LENGTHS = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).integers(1, 60, size=(2, 300)))
CONFIG = TrainingConfig(src_tokens=900, tgt_tokens=800, micro_tokens=250)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 1000), st.integers(0, 50))
def test_every_pair_once_and_within_budget(lengths: np.ndarray, seed: int, epoch: int) -> None:
    plan = plan_epoch(lengths[0], lengths[1], seed, epoch, CONFIG)
    seen = []
    for update in range(len(plan)):
        micros = plan.micros(update)
        ids = np.concatenate(micros)
        n_src, n_tgt = int((lengths[0][ids] + 1).sum()), int((lengths[1][ids] + 1).sum())
        assert (n_src, n_tgt) == plan.n_tokens(update)
        assert n_src <= 900 and n_tgt <= 800
        assert all((lengths[side][m] + 1).sum() <= 250 for m in micros for side in (0, 1))
        seen.append(ids)
    assert sorted(np.concatenate(seen)) == list(range(300))


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(20, 400))
def test_updates_do_not_depend_on_the_size_of_micro_batches(lengths: np.ndarray, micro_tokens: int) -> None:
    import dataclasses

    a = plan_epoch(lengths[0], lengths[1], 1, 0, CONFIG)
    b = plan_epoch(lengths[0], lengths[1], 1, 0, dataclasses.replace(CONFIG, micro_tokens=micro_tokens))
    assert len(a) == len(b)
    for update in range(len(a)):
        assert sorted(np.concatenate(a.micros(update))) == sorted(np.concatenate(b.micros(update)))


def test_pure_function_of_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=(2, 3000))
    first = plan_epoch(lengths[0], lengths[1], 1, 0, CONFIG)
    assert np.array_equal(first.order, plan_epoch(lengths[0], lengths[1], 1, 0, CONFIG).order)
    for seed, epoch in ((2, 0), (1, 1)):
        other = plan_epoch(lengths[0], lengths[1], seed, epoch, CONFIG)
        assert (first.order != other.order).mean() > 0.99


def test_updates_are_nearly_full_and_micro_batches_of_like_length() -> None:
    rng = np.random.default_rng(0)
    src = np.clip(rng.lognormal(3.1, 0.6, 20_000), 1, 250).astype(np.int32)
    tgt = np.clip(src * rng.normal(1.0, 0.1, 20_000), 1, 250).astype(np.int32)
    config = TrainingConfig(src_tokens=25_000, tgt_tokens=25_000, micro_tokens=3_200)
    plan = plan_epoch(src, tgt, 1, 0, config)
    fills = [max(plan.n_tokens(u)) / 25_000 for u in range(len(plan) - 1)]
    assert min(fills) > 0.98
    padded = [len(m) * (tgt[m].max() + 1) for m in plan.micros(0)]
    assert plan.n_tokens(0)[1] / sum(padded) > 0.7  # at random it is 0.2


@pytest.mark.parametrize(("src", "tgt", "expected"), [
    ([3, 3, 3], [1, 1, 1], [0, 2, 3]),  # the source fills first
    ([1, 1, 1], [3, 3, 3], [0, 2, 3]),  # the target fills first
    ([1, 99, 1], [1, 1, 1], [0, 1, 2, 3]),  # a pair too long for the budget stands alone
    ([6], [6], [0, 1]),
])
def test_cut(src: list[int], tgt: list[int], expected: list[int]) -> None:
    assert cut(np.array(src), np.array(tgt), 6, 6).tolist() == expected
