"""Sampling against the model's own probabilities: counts held to chi-square, sets of allowed
pieces, scores, and what a draw may depend on: the seed and the sentence, and nothing else.

Lengths, prefixes and repetitions of samples are in test_search.py.
"""

import math
from collections import Counter
from dataclasses import replace
from random import Random

from pytest import approx, mark
from support.plain_search import BOS, EOS, PAD, Toy, score_of
from support.searches import make_sources

from nmt.config import DecodingConfig
from nmt.data.batch import pack
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules

N = 4_000  # draws
V = 9
SRC = (4, 5, EOS)
CONFIG = DecodingConfig(sample=True, penalty="none", max_ratio=0.0, max_extra=1)


def list_shares(toy: Toy, temperature: float = 1.0, kept: int = V) -> dict[int, float]:
    """Of each piece that can be said first, among the `kept` most probable; falling."""
    rows = {piece: x for piece, x in enumerate(toy.after(SRC, ())) if piece not in (PAD, BOS)}
    best = sorted(rows, key=rows.__getitem__, reverse=True)[:kept]
    weights = {piece: math.exp(rows[piece] / temperature) for piece in best}
    return {piece: weight / sum(weights.values()) for piece, weight in weights.items()}


def count_fewest(shares: dict[int, float], top_p: float) -> int:
    """How many of the most probable pieces hold so much."""
    held, n = 0.0, 0
    for share in shares.values():
        if n == 0 or held < top_p:
            held, n = held + share, n + 1
    return n


def check_draws(toy: Toy, config: DecodingConfig, expected: dict[int, float]) -> None:
    """First pieces: each of those expected, and chi-square not beyond what one of 10^5 right samplers
    shows, by the approximation of Wilson and Hilferty.
    """
    (found,) = search(toy, pack([SRC]), make_rules(config, N))
    counts = Counter(one.ids[0] if one.ids else EOS for one in found)
    assert counts.total() == N and counts.keys() == expected.keys()
    freedom = len(expected) - 1
    square = sum(
        (counts[piece] - N * share) ** 2 / (N * share) for piece, share in expected.items()
    )
    at = 2 / (9 * max(freedom, 1))
    assert square <= freedom * (1 - at + 4.265 * at**0.5) ** 3, (square, freedom, counts)


@mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_pieces_are_drawn_by_their_probability(temperature: float) -> None:
    toy, config = Toy(1, n=V), replace(CONFIG, temperature=temperature, seed=1)
    check_draws(toy, config, list_shares(toy, temperature))


@mark.parametrize("top_k", [1, 2, 4, V, 100])
def test_only_the_most_probable_few(top_k: int) -> None:
    toy = Toy(4, n=V)
    check_draws(toy, replace(CONFIG, top_k=top_k), list_shares(toy, kept=top_k))


@mark.parametrize(
    "top_p, n_kept", [(1e-6, 1), (0.6, 1), (0.7, 2), (0.8, 3), (0.9, 4), (0.97, 5), (1.0, 7)]
)
def test_only_the_fewest_that_hold_so_much(top_p: float, n_kept: int) -> None:
    toy = Toy(4, n=V)
    assert count_fewest(list_shares(toy), top_p) == n_kept
    check_draws(toy, replace(CONFIG, top_p=top_p), list_shares(toy, kept=n_kept))


def test_few_and_so_much_and_temperature_together() -> None:
    """Temperature first, then the few, then so much of those."""
    toy = Toy(4, n=V)
    kept = count_fewest(list_shares(toy, 0.7, kept=5), 0.85)
    assert kept < 5
    config = replace(CONFIG, temperature=0.7, top_k=5, top_p=0.85)
    check_draws(toy, config, list_shares(toy, 0.7, kept=kept))


def test_scores_are_the_log_probabilities_of_the_model() -> None:
    """Not those of the flattened or cut distribution; best first."""
    toy = Toy(7, n=V, ending=1.0)
    config = replace(CONFIG, temperature=1.7, top_k=6, top_p=0.95, max_extra=9, penalty="length")
    (found,) = search(toy, pack([SRC]), make_rules(config, 50))
    for one in found:
        assert one.score == approx(score_of(toy, SRC, one.ids, config), abs=1e-5)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert len({tuple(one.ids) for one in found}) > 20


def test_draws_follow_from_seed_and_sentence_alone() -> None:
    toy, given = Toy(8, n=V), make_sources(Random(8), 40, 9, V)
    config = replace(CONFIG, max_ratio=1.0, max_extra=4, seed=5)
    together = search(toy, pack(given), make_rules(config, 3))
    assert together[::-1] == search(toy, pack(given[::-1]), make_rules(config, 3))
    for src, some in zip(given, together, strict=True):
        # A longer one beside it
        assert search(toy, pack([(4,) * 30, src, src]), make_rules(config, 3))[1:] == [some, some]
        (alone,) = search(toy, pack([src]), make_rules(config))
        assert alone[0] in some  # one draw is among many
    other = search(toy, pack(given), make_rules(replace(config, seed=6), 3))
    assert sum(a == b for a, b in zip(together, other, strict=True)) < len(given) / 4
