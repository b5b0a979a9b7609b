"""Ensembles against the mean of probabilities, computed directly and in fp64 from each model's full
forward pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import torch
from pytest import approx, mark, raises
from support.plain_search import EOS, Full, Ids, assert_same, recursion
from support.rings import amount
from support.searches import make_sources
from support.untrained import make_random_model

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.translate.ensemble import Ensemble, average_log_probs
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules

V = 14
SHAPE = ModelConfig(d_model=8, d_ff=16, n_heads=2, n_layers=1)
SHAPES = [
    SHAPE,
    replace(SHAPE, d_model=12, n_heads=3, d_k=5, d_v=2, n_layers=2, norm="pre", tied=False),
    replace(SHAPE, positions="learned", max_positions=20),
    replace(SHAPE, window=1, vocab_rows=V + 3),
]


def model(seed: int, shape: ModelConfig = SHAPE) -> Transformer:
    return make_random_model(shape, V, seed)


def sources(n: int) -> list[Ids]:
    return make_sources(Random(n), n, 8, V)


class Mean:
    """Of probabilities, each model by itself."""

    def __init__(self, models: list[Transformer], config: ModelConfig = SHAPE) -> None:
        self.each, self.config = [Full(one) for one in models], config

    def after(self, src: Ids, prefix: Ids) -> list[float]:
        (row,) = self.after_each(src, [prefix])
        return row

    def after_each(self, src: Ids, prefixes: Sequence[Ids]) -> list[list[float]]:
        rows = np.array([one.after_each(src, prefixes) for one in self.each], np.float64)
        return [[float(x) for x in row] for row in np.log(np.exp(rows).mean(0))]


ENSEMBLES = [SHAPES, *amount([], [SHAPES[:2], SHAPES[2:], [SHAPE] * 3])]


@mark.parametrize("beam", [1, 4])
@mark.parametrize("preset", ["vaswani2017", "fairseq", "marian"])
def test_it_is_the_mean_of_probabilities(preset: str, beam: int) -> None:
    values = {**DecodingConfig.PRESETS[preset], "beam": beam, "max_ratio": 0.5, "max_extra": 4}
    for seed, shapes in enumerate(ENSEMBLES):
        models = [model(seed * 10 + n, shape) for n, shape in enumerate(shapes)]
        oracle, config, given = Mean(models), DecodingConfig(**values), sources(amount(2, 4))
        for src, some in zip(
            given, search(Ensemble(models), pack(given), make_rules(config, beam)), strict=True
        ):
            assert_same(some, recursion(oracle, src, config, beam), f"{preset} {seed}")


def test_logits_may_be_large_and_probabilities_small() -> None:
    one = model(1, replace(SHAPE, projection_bias=True))
    ensemble, hidden = Ensemble([one, model(2)]), torch.randn(3, 2 * SHAPE.d_model)
    usual = ensemble.projection(hidden)
    one.projection.bias.add_(100)  # which changes no probability
    torch.testing.assert_close(ensemble.projection(hidden), usual, rtol=0, atol=1e-4)
    small = torch.tensor([-200.0])
    assert average_log_probs([small, small]).item() == approx(-200)


@mark.parametrize("shape", SHAPES)
@mark.parametrize("sample", [False, True])
def test_a_model_and_itself_are_the_model(shape: ModelConfig, sample: bool) -> None:
    ours, given = model(3, shape), sources(12)
    config = DecodingConfig(max_extra=5, sample=sample)
    alone, twice = (
        search(ours, pack(given), make_rules(config, 2)),
        search(Ensemble([ours, ours]), pack(given), make_rules(config, 2)),
    )
    for some, others in zip(alone, twice, strict=True):
        assert_same(others, [(one.score, tuple(one.ids)) for one in some])


@mark.parametrize("limits", [(7, 20), (20, 7)])
def test_the_shortest_table_of_positions_bounds_all(limits: tuple[int, int]) -> None:
    models = [model(0), *(model(n, replace(SHAPES[2], max_positions=n)) for n in limits)]
    config = DecodingConfig(max_extra=50, min_length=50, beam=2)
    for order in (models, models[::-1]):
        found = search(Ensemble(order), pack([(4, 5, EOS)]), make_rules(config))
        assert len(found[0][0].ids) == 6
        with raises(UserError, match="max_positions 7"):
            search(Ensemble(order), pack([(4,) * 7 + (EOS,)]), make_rules(config))
