"""Every search of real models against the plain recursion: each rule, each kind of model, and what is
refused.
"""

import copy
import functools
from dataclasses import replace
from random import Random
from typing import Any

from pytest import FixtureRequest, fixture, mark, raises
from support.plain_search import EOS, Full, Ids, Ranked, assert_same, recursion
from support.rings import amount
from support.searches import (
    RULES,
    SEARCHES,
    SMALL,
    MakeSearch,
    make_rule_case,
    make_sources,
)
from support.untrained import list_shapes, make_random_model

from nmt.config import DecodingConfig
from nmt.data.batch import pack
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.translate.search_rules import make_rules

SHAPES = {
    **list_shapes(11, SMALL),
    "large-heads": replace(SMALL, d_k=40, d_v=37, n_layers=3),
}
N_PIECES = 12


# The searches of a case follow one another, so that one worker has most of them and its answers.
with_each_search = mark.parametrize("make_search", SEARCHES, indirect=True)


@fixture
def make_search(request: FixtureRequest) -> MakeSearch:
    return SEARCHES[request.param]


@with_each_search
@mark.parametrize("finishing, stopping", RULES)
@mark.parametrize("beam", amount([1, 4], range(1, 6)))
def test_each_rule_is_the_recursion_it_names(
    make_search: MakeSearch, finishing: Any, stopping: Any, beam: int
) -> None:
    n_models, n_compared = amount(1, 20), 0
    for seed in range(n_models):
        case = make_rule_case(finishing, stopping, beam, seed)
        rules = make_rules(case.config, case.n_best)
        found = make_search(case.model)(pack(case.sources), rules, case.prefixes)
        for src, some, expected in zip(case.sources, found, case.expected, strict=True):
            assert_same(some, expected, f"{seed} {src}")
            n_compared += 1
    assert n_compared > 0.98 * 5 * n_models


@functools.cache
def make_kind(name: str, seed: int) -> tuple[Transformer, list[Ids], list[Ranked]]:
    """A model of a kind, what to translate, and what a beam of 3 finds."""
    model = make_random_model(SHAPES[name], N_PIECES, seed)
    given = make_sources(Random(seed), 3, 8, N_PIECES)
    return model, given, [recursion(Full(model), src, WIDE, 2) for src in given]


WIDE = DecodingConfig(beam=3, max_ratio=0.0, max_extra=9)


@with_each_search
@mark.parametrize("name", SHAPES)
def test_each_kind_of_model(make_search: MakeSearch, name: str) -> None:
    for seed in range(amount(2, 10)):
        model, given, expected = make_kind(name, seed)
        found = make_search(model)(pack(given), make_rules(WIDE, 2))
        for src, some, others in zip(given, found, expected, strict=True):
            assert_same(some, others, f"{seed} {src}")


@with_each_search
def test_a_prefix_beyond_learned_positions_is_refused(make_search: MakeSearch) -> None:
    model = make_random_model(SHAPES["learned"], N_PIECES, 4)
    with raises(UserError, match=r"a prefix of 11 pieces .*model.max_positions 11"):
        make_search(model)(pack([(4, EOS)]), make_rules(DecodingConfig()), [(5,) * 11])


@with_each_search
@mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_told(make_search: MakeSearch, value: float) -> None:
    model = make_random_model(replace(SMALL, n_layers=2), N_PIECES, 5)
    model.decoder[1].feed_forward.inner.weight[3, 4] = value
    search = make_search(model)
    for given in ([(4, EOS)], make_sources(Random(5), 9, 5, N_PIECES)):
        with raises(Failure, match="NaN or infinite"):
            search(pack(given), make_rules(DecodingConfig(max_extra=4)))


@with_each_search
@mark.parametrize("value", [float("nan"), 3e38])  # which overflows in the first layer
@mark.parametrize("finishing", ["any", "top", "shrink"])
def test_a_hypothesis_without_a_score_is_told_even_if_others_have_ended(
    make_search: MakeSearch, finishing: Any, value: float
) -> None:
    """Otherwise it would be dropped as if it were improbable, and another translation win in silence."""
    config = DecodingConfig(
        beam=4, finishing=finishing, stopping="never", max_ratio=0.0, max_extra=5
    )
    check_refusals(make_search, config, value)


@mark.parametrize("make_search", ["torch", "packed"], indirect=True)
def test_a_sample_without_a_score_is_told_even_if_others_have_ended(
    make_search: MakeSearch,
) -> None:
    config = DecodingConfig(sample=True, max_ratio=0.0, max_extra=5)
    check_refusals(make_search, config, 3e38)


def check_refusals(make_search: MakeSearch, config: DecodingConfig, value: float) -> None:
    """Give this weight to each piece that is read only after a hypothesis has ended. All must be refused."""
    rules = make_rules(config, 4)
    n_refused = 0
    for seed in range(amount(3, 9)):
        model = make_random_model(replace(SMALL, tied=False), N_PIECES, seed)
        (found,) = make_search(model)(pack([(4, 7, EOS)]), rules)
        shortest = min((hypothesis.ids for hypothesis in found), key=len)
        later = {piece for hypothesis in found for piece in hypothesis.ids[len(shortest) :]}
        for piece in later - set(shortest):
            changed = copy.deepcopy(model)
            changed.tgt_embedding.weight[piece] = value
            with raises(Failure, match="search found no hypothesis.* NaN or infinite"):
                make_search(changed)(pack([(4, 7, EOS)]), rules)
            n_refused += 1
    assert n_refused > amount(1, 5)
