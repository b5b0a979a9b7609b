"""What every search is asked, and every search: torch's, on plain and on packed matrices, and the
compiled one.

The rules that they share are told by `support/plain_search.py`.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from pytest import approx

from nmt.config import DecodingConfig, ModelConfig
from nmt.model.decoding_copy import copy_sharing_weights
from nmt.model.transformer import Transformer
from nmt.translate.search import search
from nmt.translate.search_state import Hypothesis
from support.plain_search import EOS, Full, Ids, Ranked, recursion
from support.prepared_models import prepare_for_torch
from support.rings import amount
from support.untrained import make_random_model

NEAR = 1e-5  # of scores: other products round otherwise, so either of two hypotheses may be kept
SMALL = ModelConfig(d_model=8, d_ff=16, n_heads=2, n_layers=1)
RULES = list(itertools.product(("any", "top", "shrink"), ("exact", "full", "likely", "never")))
PLAIN = DecodingConfig(max_ratio=0.5, max_extra=5)
WAYS = {
    "greedy": replace(PLAIN, beam=1),
    "beam": PLAIN,
    "full": replace(PLAIN, finishing="top", stopping="full", min_length=3, no_repeat_ngram=2),
    "likely": replace(PLAIN, beam=3, finishing="top", stopping="likely", penalty="length"),
    "shrink": replace(PLAIN, finishing="shrink", stopping="never", penalty="none"),
    "sample": replace(PLAIN, sample=True, top_k=20, top_p=0.9, seed=4, no_repeat_ngram=1),
}


def make_sources(rng: Random, n: int, longest: int, size: int) -> list[Ids]:
    """Sentences of different content, eos at their ends."""
    return [
        (*(rng.randrange(4, size) for _ in range(rng.randint(1, longest))), EOS) for _ in range(n)
    ]


def make_prefixes(rng: Random, n: int, size: int) -> list[Ids]:
    """Empty ones for most."""
    lengths = [rng.choice((0, 0, 0, 1, 4, 9)) for _ in range(n)]
    return [tuple(rng.randrange(4, size) for _ in range(length)) for length in lengths]


def make_speaker(shape: ModelConfig, size: int, seed: int = 1) -> Transformer:
    """Make a model that ends by itself more often than not."""
    made = make_random_model(shape, size, seed, spread=0.2)
    made.projection.weight[EOS] += 0.5 * made.projection.weight.std()
    return made


# ---- the searches -------------------------------------------------------------------------------------------------

Search = Callable[..., list[list[Hypothesis]]]  # of one model: sources, rules, prefixes
MakeSearch = Callable[[Transformer], Search]


def make_plain_search(model: Transformer) -> Search:
    return functools.partial(search, model)


def make_packed_search(model: Transformer) -> Search:
    return functools.partial(search, prepare_for_torch(model))


def make_compiled_search(model: Transformer, is_bf16: bool = False) -> Search:
    compiled = import_engine("nmt.engines.cpu.compiled_search")
    weights = compiled.CompiledWeights(copy_sharing_weights(model), is_bf16)
    return functools.partial(compiled.search_compiled, weights)


def import_engine(name: str) -> Any:
    """Import a file of an engine; skip the test where numba or all engines are missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


SEARCHES: dict[str, MakeSearch] = {
    "torch": make_plain_search,
    "packed": make_packed_search,
    "compiled": make_compiled_search,
}


# ---- cases of the rules -------------------------------------------------------------------------------------------


N_RULE_MODELS = amount(8, 40)


@dataclass(frozen=True)
class Task:
    """A model and what it is asked to translate: sentences, and how their translations begin."""

    model: Transformer
    plain: Full
    sources: list[Ids]
    prefixes: list[Ids]


@functools.cache
def make_task(seed: int) -> Task:
    """Rules share it, because what they ask of a model is mostly the same."""
    shapes = [
        SMALL,
        replace(SMALL, norm="pre", window=2),
        replace(SMALL, positions="learned", max_positions=11),
        replace(SMALL, d_k=3, d_v=5, n_layers=2),
    ]
    size = 12
    rng = Random(seed)
    model = make_random_model(shapes[seed % len(shapes)], size, seed)
    sources = make_sources(rng, 5, 6, size)
    prefixes: list[Ids] = [rng.choice(((), (), (5,), (8, 1, 4, 4), (6,) * 9)) for _ in sources]
    return Task(model, Full(model), sources, prefixes)


@dataclass(frozen=True)
class RuleCase:
    """A model, a rule and some sentences, and what is found by it."""

    model: Transformer
    config: DecodingConfig
    n_best: int
    sources: list[Ids]
    prefixes: list[Ids]
    expected: list[Ranked]


@functools.cache
def make_rule_case(finishing: Any, stopping: Any, beam: int, number: int) -> RuleCase:
    """Make a case whose answers do not depend on rounding."""
    rng = Random(f"{finishing} {stopping} {beam} {number}")
    task = make_task(rng.randrange(N_RULE_MODELS))
    config = DecodingConfig(
        beam=beam,
        max_ratio=0.5,
        max_extra=rng.choice((0, 4, 9)),
        min_length=rng.choice((0, 0, 3)),
        penalty=rng.choice(("gnmt", "length", "none")),
        length_penalty=rng.choice((0.0, 0.6, 1.5)),
        finishing=finishing,
        stopping=stopping,
    )
    case = RuleCase(task.model, config, rng.randint(1, beam), [], [], [])
    for src, prefix in zip(task.sources, task.prefixes, strict=True):
        margins: list[float] = []
        found = recursion(task.plain, src, config, case.n_best, prefix, margins)
        if min(margins, default=1.0) > NEAR:
            case.sources.append(src)
            case.prefixes.append(prefix)
            case.expected.append(found)
    return case


# ---- comparing ----------------------------------------------------------------------------------------------------


def assert_alike(found: Iterable[list[Hypothesis]], expected: Iterable[list[Hypothesis]]) -> None:
    """The same hypotheses and scores; two whose scores are near may change places. Random models give
    scores of -35, of which the last bit of fp32 is 4e-6: so far from 0, a millionth is near.
    """
    for some, others in zip(found, expected, strict=True):
        scores = [b.score for b in others]
        assert [a.score for a in some] == approx(scores, abs=NEAR, rel=1e-6)
        for a, b in zip(some, others, strict=True):
            assert a.ids == b.ids or any(
                a.ids == c.ids and abs(b.score - c.score) < NEAR for c in others
            ), (a, b)


def put_in_order(batches: Iterable[tuple[list[int], list[list[Hypothesis]]]]) -> list[Any]:
    """The hypotheses of all sentences, in the order of the sentences."""
    found: dict[int, list[Hypothesis]] = {}
    for batch, some in batches:
        found.update(zip(batch, some, strict=True))
    return [found[i] for i in range(len(found))]
