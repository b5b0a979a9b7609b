"""Compiled products are torch's, for any shape; a row of them does not depend on the other rows."""

import math

import numpy as np
import pytest
import torch
from pytest import approx, importorskip, mark

importorskip("numba")

from nmt.engines.cpu.compiled_products import exp, multiply, pack_products, round_bits
from nmt.engines.cpu.compiled_tiles import HAS_BF16_PAIRS, PANEL, TILE_ROWS

KINDS = {"fp32": (False, False), "bf16, widened": (True, False), "bf16, in pairs": (True, True)}


@mark.parametrize("kind", KINDS)
@mark.parametrize("n_outputs", [1, PANEL - 1, PANEL, 2 * PANEL + 3])
@mark.parametrize("n_inputs", [1, 5, 64])
def test_a_product_is_that_of_torch(n_inputs: int, n_outputs: int, kind: str) -> None:
    is_bf16, has_pairs = KINDS[kind]
    if has_pairs and not HAS_BF16_PAIRS:
        pytest.skip("this processor does not multiply pairs of bf16")
    torch.manual_seed(n_inputs + n_outputs)
    weights = [torch.randn(n_outputs, n_inputs) for _ in range(3)]
    biases = [torch.randn(n_outputs), None, torch.randn(n_outputs)]
    products = pack_products(weights, biases, is_bf16, has_pairs)
    for n_rows in (1, TILE_ROWS - 1, TILE_ROWS, 2 * TILE_ROWS + 3):
        wide = torch.randn(n_rows, n_inputs + 7)  # of which the first columns are multiplied
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            known = weight.bfloat16() if is_bf16 else weight
            x = wide[:, :n_inputs]
            expected = (x.bfloat16() if has_pairs else x).double() @ known.T.double()
            if bias is not None:
                expected += bias
            found = torch.from_numpy(multiply(wide.numpy(), products, number))
            assert found.shape[1] % PANEL == 0 and (found[:, n_outputs:] == 0).all()
            torch.testing.assert_close(
                found[:, :n_outputs].double(), expected, atol=1e-5, rtol=1e-5
            )


def test_a_row_is_the_same_among_any_others() -> None:
    torch.manual_seed(1)
    products = pack_products([torch.randn(100, 70)], [None], False)
    x = torch.randn(11, 70).numpy()
    together = multiply(x, products, 0)
    for first in range(11):
        for last in range(first + 1, 12):
            some = multiply(x[first:last].copy(), products, 0)
            assert np.array_equal(some, together[first:last])


def test_bits_are_rounded_as_torch_rounds() -> None:
    torch.manual_seed(2)
    numbers = [0.0, -0.0, 1.0, 3e38, -3.4e38, math.inf, -math.inf, 1e-40, 1.00390625, 1.01171875]
    for x in torch.cat((torch.tensor(numbers), torch.randn(500) * 10 ** torch.randn(500))):
        expected = int(x.bfloat16().view(torch.int16)) & 0xFFFF
        assert round_bits(x.numpy().view(np.uint32)[()]) == expected, x
    for bits in (0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001):  # NaN stays NaN
        assert round_bits(np.uint32(bits)) == 0x7FC0


def test_exponentials() -> None:
    for x in np.linspace(-87, 0, 20_011, dtype=np.float32):
        assert exp(x) == approx(math.exp(x), rel=4e-7)
    assert exp(np.float32(0.0)) == 1.0
    assert 0 <= exp(np.float32(-np.inf)) <= 2e-38 and 0 <= exp(np.float32(-1e30)) <= 2e-38
    assert math.isnan(exp(np.float32(np.nan)))
