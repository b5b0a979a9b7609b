"""Positional encodings against their formula, and where they end."""

import math
from dataclasses import replace

import pytest
import torch

from nmt.config import ModelConfig
from nmt.data.batch import pack
from nmt.model.positions import sinusoids
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError


def test_sinusoids_follow_the_formula_in_halves() -> None:
    table = sinusoids(50, 8)
    for pos, i in ((0, 0), (7, 1), (49, 3)):
        angle = pos / 10_000 ** (2 * i / 8)
        assert table[pos, i] == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[pos, 4 + i] == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoids_have_no_end_but_a_learned_table_has() -> None:
    long = [[5] * 40]
    shape = ModelConfig(d_model=16, d_ff=32, n_heads=2, n_layers=1, max_positions=8)
    with torch.no_grad():
        assert Transformer(shape, 20).encode(pack(long)).shape == (40, 16)
    learned = Transformer(replace(shape, positions="learned"), 20)
    with pytest.raises(UserError, match="model.max_positions 8"):
        learned.encode(pack(long))
