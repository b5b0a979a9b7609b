"""The choice among candidates by weighted scores."""

import math

from nmt.translate.rerank import (
    LENGTH_GRID,
    REVERSE_GRID,
    RatedCandidates,
    RerankWeights,
    format_weights,
    measure_weights,
)

RATED = RatedCandidates(["a", "b", "c\nd"], [-1.0, -1.5, -2.0], [-5.0, -3.0, -math.inf], [4, 6, 20])


def test_the_best_total_wins_and_of_equals_the_first() -> None:
    def choose(reverse: float, length: float) -> str:
        return RATED.choose_best(RerankWeights(reverse, length))

    assert choose(0, 0) == "a"
    assert choose(0.25, 0) == "a"  # -2.25 both
    assert choose(0.3, 0) == "b"
    assert choose(0, 0.3) == "c d"  # long, and impossible only to the reverse model
    assert choose(0.1, 1) == "b"
    nothing = RatedCandidates(["a", "b"], [-1.0, -2.0], [-math.inf, -math.inf], [1, 1])
    assert nothing.choose_best(RerankWeights(0.5, 0)) == "a"


def test_the_table_has_all_weights_and_names_the_smallest_of_the_best() -> None:
    long = RatedCandidates(
        ["one two three four five", "one two three four six"], [0, -1], [-2, 0], [5, 5]
    )
    scores = measure_weights([long], ["one two three four six"])
    assert len(scores) == len(REVERSE_GRID) * len(LENGTH_GRID)
    assert scores[RerankWeights(0.0, 0.0)] < 100 == round(scores[RerankWeights(1.0, 0.0)])
    table = format_weights(scores).splitlines()
    assert len(table) == len(REVERSE_GRID) + 2
    assert table[-1].endswith("-> 100.00 with --rerank=0.7,0")
