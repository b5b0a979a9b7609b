"""Limits and penalties against their formulas in plain Python."""

from dataclasses import replace

import pytest
import torch
from support.plain_search import EOS, Ids, divisor, limit

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.system.errors import UserError
from nmt.translate.beams import start_beams
from nmt.translate.search_rules import make_rules


def test_more_than_the_beam_cannot_be_asked_for() -> None:
    with pytest.raises(UserError, match="beam of 2"):
        make_rules(DecodingConfig(beam=2), 3)
    assert make_rules(DecodingConfig(beam=2, sample=True), 3).beam == 3


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_limits_follow_source_prefix_and_positions(positions: str) -> None:
    model = replace(ModelConfig(max_positions=9), positions=positions)  # type: ignore[arg-type]
    config = DecodingConfig(max_ratio=0.5, max_extra=2)
    sources: list[Ids] = [(*[4] * n, EOS) for n in range(30)]
    prefixes: list[Ids] = [(5,) * (n % 9) for n in range(30)]
    beams = start_beams(pack(sources), make_rules(config), model, prefixes)
    expected = [
        limit(src, config, model, prefix) for src, prefix in zip(sources, prefixes, strict=True)
    ]
    assert beams.limits.tolist() == expected


@pytest.mark.parametrize("penalty", ["gnmt", "length", "none"])
def test_penalties(penalty: str) -> None:
    config = replace(DecodingConfig(length_penalty=0.6), penalty=penalty)  # type: ignore[arg-type]
    expected = [divisor(n, config) for n in (1, 7, 300)]
    assert make_rules(config).compute_penalty(torch.tensor([1, 7, 300])).tolist() == pytest.approx(
        expected
    )
