"""What an update is made of: its seeds, and the figures that ranks sum by name."""

from nmt.train.update import UpdateStats, dropout_seed


def test_dropout_seeds_do_not_repeat() -> None:
    seeds = set()
    for seed in range(3):
        for step in range(40):
            seeds |= {dropout_seed(seed, step, number) for number in range(40)}
    assert len(seeds) == 3 * 40 * 40


def test_an_update_counts_only_if_all_its_figures_are_finite() -> None:
    assert UpdateStats(1.0, 2.0, 3.0).is_finite
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not UpdateStats(bad, 2.0, 3.0).is_finite
        assert not UpdateStats(1.0, bad, 3.0).is_finite
        assert not UpdateStats(1.0, 2.0, bad).is_finite
