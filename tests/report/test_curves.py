"""Curves keep what a reader would miss, and charts know their references."""

from random import Random

from nmt.extras.report.curves import thin_points


def test_a_thinned_curve_keeps_its_ends_and_its_extremes() -> None:
    rng = Random(1)
    points = [(step, rng.gauss(0, 1)) for step in range(100_000)]
    points[60_123] = (60_123, 99.0)
    points[60_124] = (60_124, -99.0)
    thinned = thin_points(points, 500)
    assert 300 < len(thinned) <= 500
    assert list(thinned) == sorted(thinned) and set(thinned) <= set(points)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert {(60_123, 99.0), (60_124, -99.0)} <= set(thinned)


def test_a_short_curve_is_left_alone() -> None:
    points = [(1, 2.0), (2, 1.0), (3, 5.0)]
    assert thin_points(points, 3) is points
    assert thin_points([(i, 0.0) for i in range(9)], 4) == [(0, 0.0), (1, 0.0), (8, 0.0)]
