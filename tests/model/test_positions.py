"""Positional encodings against their formula, and where they end."""

import math
from dataclasses import replace

import pytest
import torch

from nmt.config import ModelConfig
from nmt.data.batch import pack
from nmt.model.packed_attention import rotate
from nmt.model.positions import Positions, sinusoids
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
        assert Transformer(replace(shape, positions="rotary"), 20).encode(pack(long)).shape == (
            40,
            16,
        )
    learned = Transformer(replace(shape, positions="learned"), 20)
    with pytest.raises(UserError, match="model.max_positions 8"):
        learned.encode(pack(long))


ROTARY = Positions(ModelConfig(d_model=16, n_heads=2, positions="rotary"))


def test_rotary_positions_are_products_of_complex_numbers() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(3, 2, 8), [0, 7, 300]
    angles = torch.tensor(positions)[:, None] / 10_000 ** (torch.arange(4) / 4)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles)[:, None]
    expected = torch.cat((expected.real, expected.imag), -1)
    rotated = rotate(x, ROTARY.find_rotation(torch.tensor(positions), 301))
    torch.testing.assert_close(rotated, expected, atol=1e-5, rtol=1e-5)
    embeddings = torch.randn(3, 16)
    assert torch.equal(ROTARY(embeddings, torch.tensor(positions), 301), embeddings)
