"""What a sentence becomes does not depend on its batch: alone, among others, in any order, beside
long ones, in several threads; searched or drawn, with prefixes among them.

In fp32 products of other sizes round otherwise, by some 1e-6 of a score. So two hypotheses whose
scores are nearer than 1e-5 may change places; that is the only exception, and it is one only where
the scores agree. A draw too can fall so near the bound between two pieces that rounding decides:
with 6,000 pieces about one of 2,000 does.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.prepared_models import prepare_for_torch
from support.soaking import IS_SOAK, counted
from support.untrained import TINY, list_shapes

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.data.vocab import EOS
from nmt.model.transformer import Transformer
from nmt.translate.batching import Requests, split_by_budget
from nmt.translate.engine import SearchEngine
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules
from nmt.translate.search_state import Hypothesis

V = 60
NEAR = 1e-5
SHAPES = list_shapes(max_positions=64)
PLAIN = DecodingConfig(max_ratio=0.5, max_extra=3)
WAYS = {
    "greedy": replace(PLAIN, beam=1),
    "beam": PLAIN,
    "likely": replace(PLAIN, beam=3, finishing="top", stopping="likely", penalty="length"),
    "sample": replace(PLAIN, sample=True, top_k=20, seed=4),
}
Forced = list[tuple[int, ...]]


def model(shape: ModelConfig, seed: int = 1) -> Transformer:
    torch.manual_seed(seed)
    made = Transformer(shape, V).eval().requires_grad_(False)
    for p in made.parameters():
        p.add_(torch.randn_like(p), alpha=0.2)
    made.projection.weight[EOS] += 0.5 * made.projection.weight.std()
    return made


def sources(n: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [(*(rng.randrange(4, V) for _ in range(rng.randint(1, 40))), EOS) for _ in range(n)]


def prefixes_of(given: Forced, seed: int = 0) -> Forced:
    """None for most."""
    rng = random.Random(seed)
    return [
        tuple(rng.randrange(4, V) for _ in range(rng.choice((0, 0, 0, 1, 4, 9)))) for _ in given
    ]


def assert_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for some, others in zip(found, expected, strict=True):
        assert [a.score for a in some] == pytest.approx([b.score for b in others], abs=NEAR)
        for a, b in zip(some, others, strict=True):
            assert a.ids == b.ids or any(
                a.ids == c.ids and abs(b.score - c.score) < NEAR for c in others
            ), (a, b)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# In make test each shape with the beam, and each way with the usual shape; in make soak all with
# all.
CASES = [
    (shape, way) for shape in SHAPES for way in WAYS if IS_SOAK or shape == "post" or way == "beam"
]


@pytest.mark.parametrize(("shape", "way"), CASES)
def test_a_sentence_is_translated_alike_in_any_company(shape: str, way: str) -> None:
    config, n = WAYS[way], counted(16, 64)
    ours, given = prepare_for_torch(model(SHAPES[shape])), sources(n, 2)
    forced, n_best = prefixes_of(given), 1 if way == "greedy" else 2
    together = search(ours, pack(given), make_rules(config, n_best), forced)
    assert len({tuple(some[0].ids) for some in together}) >= 0.75 * n  # sources do matter
    # in another order
    order = random.Random(3).sample(range(n), n)
    shuffled, their_prefixes = [given[i] for i in order], [forced[i] for i in order]
    again = search(ours, pack(shuffled), make_rules(config, n_best), their_prefixes)
    assert_same(again, [together[i] for i in order])
    # alone
    for i in range(0, n, 4):
        assert_same(
            search(ours, pack([given[i]]), make_rules(config, n_best), [forced[i]]), [together[i]]
        )
    # beside long ones
    long = (*[7, 8] * 25, EOS)
    mixed = [long, given[5], long, given[6]]
    beside = search(ours, pack(mixed), make_rules(config, n_best), [(), forced[5], (), forced[6]])
    assert_same(beside[1::2], together[5:7])


@pytest.mark.parametrize("n_threads", [1, 2] if IS_SOAK else [2])
@pytest.mark.parametrize("way", ["greedy", "beam", "sample"])
def test_batches_of_any_size_and_threads(way: str, n_threads: int) -> None:
    config, n, n_best = WAYS[way], counted(16, 110), 1 if way == "greedy" else 3
    ours, given = prepare_for_torch(model(TINY, seed=2)), sources(n, 5)
    forced = prefixes_of(given, 1)
    expected = search(ours, pack(given), make_rules(config, n_best), forced)
    for tokens in (1, 100, 300):
        smaller = replace(config, batch_tokens=tokens)
        found: dict[int, list[Hypothesis]] = {}
        n_batches = 0
        with threads(n_threads):
            batches = SearchEngine().search_batches(
                ours, Requests(given, forced), smaller, torch.device("cpu"), n_best
            )
            for batch, some in batches:
                found.update(zip(batch, some, strict=True))
                n_batches += 1
            assert torch.get_num_threads() == n_threads
        assert (
            n_batches
            == len(list(split_by_budget(given, n_best if config.sample else config.beam, tokens)))
            > 1
        )
        assert n_batches == n or tokens > 1
        assert_same([found[i] for i in range(n)], expected)


def test_empty_prefixes_change_nothing() -> None:
    ours, given = model(TINY), sources(9, 6)
    without = search(ours, pack(given), make_rules(WAYS["beam"]))
    assert without == search(ours, pack(given), make_rules(WAYS["beam"]), [()] * 9)
