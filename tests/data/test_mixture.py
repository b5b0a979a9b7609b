"""Weights of corpora against counting: copies, shares drawn anew, and epochs that stay what they are."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx, raises

from nmt.config import CorpusConfig, DataConfig, TrainingConfig
from nmt.data.mixture import CorpusShare, Mixture, compute_weights, make_mixture
from nmt.data.plan import plan_epoch
from nmt.system.errors import UserError

SIZES = (40, 0, 7, 100)
CONFIG = TrainingConfig(src_tokens=90, tgt_tokens=90)


def weighted(*weights: float | None) -> DataConfig:
    corpora = [CorpusConfig(file=f"{i}.tsv", weight=w) for i, w in enumerate(weights)]
    return DataConfig(train=tuple(corpora))


@given(
    st.lists(st.floats(0.2, 4) | st.none(), min_size=4, max_size=4),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_an_epoch_has_whole_copies_and_a_share_of_the_rest(
    weights: list[float | None], seed: int, epoch: int
) -> None:
    counts = Counter(make_mixture(weighted(*weights), SIZES).draw_rows(seed, epoch).tolist())
    first = 0
    for weight, n in zip(weights, SIZES, strict=True):
        w = 1.0 if weight is None else weight
        of_corpus = [counts.pop(row, 0) for row in range(first, first + n)]
        assert sum(of_corpus) == round(w * n)
        if n:
            n_copies = round(w * n) // n
            assert set(of_corpus) <= {n_copies, n_copies + 1}
        first += n
    assert not counts


def test_the_share_is_drawn_anew_in_each_epoch_and_by_each_seed() -> None:
    mixture = make_mixture(weighted(1, 1, 1, 0.5), SIZES)
    draws = {tuple(sorted(mixture.draw_rows(seed, epoch))) for seed in (1, 2) for epoch in range(9)}
    assert len(draws) == 18
    half = Counter(row for epoch in range(400) for row in mixture.draw_rows(1, epoch).tolist())
    of_last = [half[row] for row in range(47, 147)]
    assert min(of_last) > 150 and max(of_last) < 250  # 200 expected, 10 the deviation


def test_weights_of_one_are_the_plan_without_them() -> None:
    lengths = np.random.default_rng(0).integers(1, 9, (2, sum(SIZES))).astype(np.int32)
    mixture = make_mixture(weighted(1, 1.0, None, 1), SIZES)
    for epoch in range(3):
        plain = plan_epoch(lengths[0], lengths[1], 7, epoch, CONFIG, 50)
        same = plan_epoch(lengths[0], lengths[1], 7, epoch, CONFIG, 50, mixture=mixture)
        assert plain.order.dtype == same.order.dtype
        assert plain.order.tolist() == same.order.tolist()
        assert plain.bounds.tolist() == same.bounds.tolist()


@settings(max_examples=20)
@given(st.sampled_from(["random", "length"]), st.integers(0, 2**16))
def test_a_plan_has_every_drawn_pair_once_within_the_budget(grouping: str, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 9, (2, sum(SIZES))).astype(np.int32)
    mixture = make_mixture(weighted(2.5, None, 3, 0.25), SIZES)
    config = TrainingConfig(src_tokens=90, tgt_tokens=90, grouping=grouping)  # type: ignore[arg-type]
    plan = plan_epoch(lengths[0], lengths[1], seed, 1, config, 50, mixture=mixture)
    found: list[int] = []
    for update in range(len(plan)):
        assert max(plan.n_tokens(update)) <= 90
        for micro in plan.micros(update):
            found += micro.tolist()
    assert sorted(found) == sorted(mixture.draw_rows(seed, 1).tolist())
    drawn = np.mean([lengths[1][mixture.draw_rows(seed, epoch)].sum() for epoch in range(300)])
    assert mixture.count_tokens(lengths[1]) == approx(drawn, rel=0.01)


def test_a_temperature_evens_out_and_keeps_the_length_of_an_epoch() -> None:
    def count(temperature: float) -> list[int]:
        data = DataConfig(train=weighted(None, None, None, None).train, temperature=temperature)
        return [share.drawn for share in make_mixture(data, (900, 0, 90, 10)).shares]

    assert count(1) == [900, 0, 90, 10]
    assert count(2) == [703, 0, 222, 74]  # 30 : 9.49 : 3.16
    assert count(1e9) == [333, 0, 333, 333]


def test_a_weight_that_leaves_nothing_is_refused() -> None:
    with raises(UserError, match=r"data\.train\[2\]: 7 pairs with a weight of 0\.05 make up less"):
        make_mixture(weighted(None, None, 0.05, None), SIZES)
    assert compute_weights(weighted(None, 2.5), (1, 1)) == [1.0, 2.5]
    assert Mixture((CorpusShare(0, 0),)).draw_rows(1, 1).dtype == np.uint32
