"""Sampling against the model's own probabilities: counts held to chi-square, sets of allowed
pieces, scores, and what a draw may depend on: the seed and the sentence, and nothing else."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from support.plain_search import BOS, EOS, PAD, Ids, Toy, divisor

from nmt.config import DecodingConfig
from nmt.data.batch import pack
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules

N = 4_000  # draws
V = 9
SRC = (4, 5, EOS)
CONFIG = DecodingConfig(sample=True, penalty="none", max_ratio=0.0, max_extra=1)


def first_pieces(toy: Toy, config: DecodingConfig, src: Ids = SRC, n: int = N) -> Counter[int]:
    (found,) = search(toy, pack([src]), make_rules(config, n))
    assert len(found) == n
    return Counter(one.ids[0] if one.ids else EOS for one in found)


def shares(toy: Toy, temperature: float = 1.0, kept: int = V) -> dict[int, float]:
    """Of each piece that can be said first, among the `kept` most probable."""
    rows = {piece: x for piece, x in enumerate(toy.after(SRC, ())) if piece not in (PAD, BOS)}
    best = sorted(rows, key=rows.__getitem__, reverse=True)[:kept]
    weights = {piece: math.exp(rows[piece] / temperature) for piece in best}
    return {piece: weight / sum(weights.values()) for piece, weight in weights.items()}


def assert_drawn_from(counts: Counter[int], expected: dict[int, float]) -> None:
    """Chi-square beyond what one of 10^5 right samplers shows, by the approximation of Wilson and
    Hilferty.
    """
    assert counts.keys() <= expected.keys()
    n, freedom = counts.total(), len(expected) - 1
    found = sum((counts[piece] - n * share) ** 2 / (n * share) for piece, share in expected.items())
    if freedom == 0:
        assert found == 0
        return
    at = 2 / (9 * freedom)
    assert found < freedom * (1 - at + 4.265 * at**0.5) ** 3, (found, freedom, counts)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_pieces_are_drawn_by_their_probability(temperature: float, seed: int) -> None:
    toy = Toy(seed, n=V)
    counts = first_pieces(toy, replace(CONFIG, temperature=temperature, seed=seed))
    assert_drawn_from(counts, shares(toy, temperature))


@pytest.mark.parametrize("top_k", [1, 2, 4, V, 100])
def test_only_the_most_probable_few(top_k: int) -> None:
    toy = Toy(4, n=V)
    expected = shares(toy, kept=top_k)
    counts = first_pieces(toy, replace(CONFIG, top_k=top_k))
    assert set(counts) == set(expected)  # all of them, for none is rarer than one in N / 10
    assert min(expected.values()) > 10 / N
    assert_drawn_from(counts, expected)


@pytest.mark.parametrize(
    ("top_p", "n_kept"), [(1e-6, 1), (0.6, 1), (0.7, 2), (0.8, 3), (0.9, 4), (0.97, 5), (1.0, 7)]
)
def test_only_the_fewest_that_hold_so_much(top_p: float, n_kept: int) -> None:
    toy = Toy(4, n=V)
    held, kept = 0.0, 0
    for share in shares(toy).values():  # falling
        if kept == 0 or held < top_p:
            held, kept = held + share, kept + 1
    expected = shares(toy, kept=kept)
    counts = first_pieces(toy, replace(CONFIG, top_p=top_p))
    assert set(counts) == set(expected) and kept == n_kept
    assert_drawn_from(counts, expected)


def test_few_and_so_much_and_temperature_together() -> None:
    """Temperature first, then the few, then so much of those."""
    toy = Toy(4, n=V)
    few = shares(toy, 0.7, kept=5)
    held, kept = 0.0, 0
    for share in few.values():
        if held < 0.85:
            held, kept = held + share, kept + 1
    assert kept < 5
    counts = first_pieces(toy, replace(CONFIG, temperature=0.7, top_k=5, top_p=0.85))
    assert_drawn_from(counts, shares(toy, 0.7, kept=kept))


def test_what_must_be_said_is_not_drawn() -> None:
    toy = Toy(6, n=V, ending=9.0)
    config = replace(CONFIG, top_k=2, top_p=0.5, max_extra=4, min_length=3)
    (found,) = search(toy, pack([SRC]), make_rules(config, 20), [(8, 7)])
    assert all(tuple(one.ids[:2]) == (8, 7) and len(one.ids) >= 3 for one in found)
    assert len({tuple(one.ids) for one in found}) <= 2 * 2 and {len(one.ids) for one in found} == {
        3
    }


@pytest.mark.parametrize("penalty", ["gnmt", "length", "none"])
def test_scores_are_the_log_probabilities_of_the_model(penalty: str) -> None:
    """Not those of the flattened or cut distribution; best first."""
    toy = Toy(7, n=V, ending=1.0)
    config = replace(CONFIG, temperature=1.7, top_k=6, top_p=0.95, max_extra=9)
    config = replace(config, penalty=penalty)  # type: ignore[arg-type]
    (found,) = search(toy, pack([SRC]), make_rules(config, 50))
    for one in found:
        total = sum(
            toy.after(SRC, tuple(one.ids[:n]))[piece] for n, piece in enumerate([*one.ids, EOS])
        )
        assert one.score == pytest.approx(total / divisor(len(one.ids) + 1, config), abs=1e-5)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert len({tuple(one.ids) for one in found}) > 20


def some_sources(n: int) -> list[Ids]:
    rng = random.Random(8)
    return [(*(rng.randrange(4, V) for _ in range(rng.randint(1, 9))), EOS) for _ in range(n)]


def test_draws_follow_from_seed_and_sentence_alone() -> None:
    toy, given = Toy(8, n=V), some_sources(40)
    config = replace(CONFIG, max_ratio=1.0, max_extra=4, seed=5)
    together = search(toy, pack(given), make_rules(config, 3))
    assert together == search(toy, pack(given), make_rules(config, 3))
    assert together[::-1] == search(toy, pack(given[::-1]), make_rules(config, 3))
    for src, some in zip(given, together, strict=True):
        assert search(toy, pack([src]), make_rules(config, 3)) == [some]
        # A longer one beside it
        assert search(toy, pack([(4,) * 30, src, src]), make_rules(config, 3))[1:] == [some, some]
    other = search(toy, pack(given), make_rules(replace(config, seed=6), 3))
    assert sum(a == b for a, b in zip(together, other, strict=True)) < len(given) / 4


def test_one_draw_is_among_many() -> None:
    toy, given = Toy(9, n=V), some_sources(20)
    config = replace(CONFIG, max_extra=8)
    for src in given:
        (one,) = search(toy, pack([src]), make_rules(config))
        (many,) = search(toy, pack([src]), make_rules(config, 5))
        assert one[0] in many
