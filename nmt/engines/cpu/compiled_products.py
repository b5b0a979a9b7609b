"""Matrix products for compiled code, on one core, as fast for one row as for many.

A matrix is stored in panels of neighbouring columns, which are as wide as a tile (`compiled_tiles.py`). Each
element is the same sum, in the same order, whatever the number of rows, so a row's result does not depend on
its neighbours.

Matrices in bf16 halve what is read from memory. Where the processor multiplies pairs of bf16, which is twice as
fast, the rows are rounded to bf16 too; elsewhere matrices are widened to fp32 in the registers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from nmt.engines.cpu import compiled_tiles
from nmt.engines.cpu.compiled_code import make_compiler
from nmt.engines.cpu.compiled_tiles import (
    HAS_BF16_PAIRS,
    PANEL,
    TILE_ROWS,
    multiply_row,
    multiply_rows,
    point_at,
    reinterpret_bits,
)

PRODUCT_FILES = (__file__, compiled_tiles.__file__)
compile_product = make_compiler(*PRODUCT_FILES)
# A maximum is vectorized only if NaN need not come out of it.
compile_maximum = make_compiler(*PRODUCT_FILES, fast_math=frozenset({"nnan", "nsz"}))
N_GROUPS = 256  # groups of pieces whose highest logit is known before each piece is looked at
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Products(NamedTuple):
    """A linear layer, x @ matrix + bias, of each of n layers.

    Panels have fp32 numbers, or the bits of a bf16 number in 16, or those of two inputs' in 32.
    """

    panels: Any  # (n, panels, inputs or pairs of them, PANEL)
    bias: Floats  # (n, panels * PANEL)


def pack_products(
    weights: list[Tensor],
    biases: Sequence[Tensor | None],
    is_bf16: bool,
    has_pairs: bool = HAS_BF16_PAIRS,
) -> Products:
    """Pack the weights (outputs, inputs) of one linear layer of each layer. Added columns are zero."""
    n_outputs, n_inputs = weights[0].shape
    n_panels = -(-n_outputs // PANEL)
    n_rows = n_inputs + n_inputs % 2
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    panels = torch.zeros(len(weights), n_panels, n_rows, PANEL, dtype=dtype)
    bias = torch.zeros(len(weights), n_panels * PANEL)
    for layer, (weight, its_bias) in enumerate(zip(weights, biases, strict=True)):
        for panel in range(n_panels):
            columns = weight[panel * PANEL : (panel + 1) * PANEL]
            panels[layer, panel, :n_inputs, : len(columns)] = columns.T
        if its_bias is not None:
            bias[layer, :n_outputs] = its_bias
    if is_bf16 and has_pairs:
        pairs = panels.unflatten(2, (-1, 2)).transpose(3, 4).contiguous()
        return Products(pairs.view(torch.int32).squeeze(4).numpy().view(np.uint32), bias.numpy())
    panels = panels[:, :, :n_inputs].contiguous()
    if is_bf16:
        return Products(panels.view(torch.int16).numpy().view(np.uint16), bias.numpy())
    return Products(panels.numpy(), bias.numpy())


EXPONENT_BITS, SIGN_BIT = np.uint32(0x7F800000), np.uint32(0x80000000)
BEFORE_HALF, ONE_BIT, BF16_BITS = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
BF16_NAN = np.uint32(0x7FC0)


@compile_product
def round_bits(bits: Any) -> Any:
    """Round the bits of a float32 to those of a bf16, to even if two are equally near."""
    if (bits & ~SIGN_BIT) > EXPONENT_BITS:
        return BF16_NAN
    return (bits + BEFORE_HALF + ((bits >> BF16_BITS) & ONE_BIT)) >> BF16_BITS


@compile_product
def round_to_pairs(x: Floats, n_pairs: int) -> Any:
    """Round the first columns of `x` to bf16, two in one integer."""
    bits = x.view(np.uint32)
    n_whole = min(n_pairs, x.shape[1] // 2)
    pairs = np.zeros((x.shape[0], n_pairs), np.uint32)
    for row in range(x.shape[0]):
        for i in range(n_whole):
            even, odd = round_bits(bits[row, 2 * i]), round_bits(bits[row, 2 * i + 1])
            pairs[row, i] = np.uint32(even | (odd << BF16_BITS))
        if n_whole < n_pairs:
            pairs[row, n_whole] = round_bits(bits[row, 2 * n_whole])
    return pairs


def cast_rows_like(x: Floats, panels: Any) -> Any:
    """Return the rows `x` in the form in which panels of this kind are multiplied."""


@overload(cast_rows_like, strict=False)
def choose_rounding(x: Any, panels: Any) -> Any:
    if panels.dtype == types.uint32:
        return lambda x, panels: round_to_pairs(x, panels.shape[2])
    return lambda x, panels: x


@compile_product
def multiply(x: Floats, products: Products, layer: int) -> Floats:
    """Apply a linear layer to the first columns of each row of `x`. The result has whole panels."""
    panels, bias = products.panels, products.bias
    rows = cast_rows_like(x, panels)
    n_rows, stride = rows.shape
    n_panels, n_inputs = panels.shape[1], panels.shape[2]
    y_stride = n_panels * PANEL
    y = np.empty((n_rows, y_stride), np.float32)
    n_in_tiles = n_rows - n_rows % TILE_ROWS
    for number in range(n_panels):
        panel = point_at(panels, (layer * n_panels + number) * n_inputs * PANEL)
        first = number * PANEL
        panel_bias = point_at(bias, layer * y_stride + first)
        for row in range(0, n_in_tiles, TILE_ROWS):
            source, result = point_at(rows, row * stride), point_at(y, row * y_stride + first)
            multiply_rows(source, stride, panel, n_inputs, panel_bias, result, y_stride)
        for row in range(n_in_tiles, n_rows):
            source, result = point_at(rows, row * stride), point_at(y, row * y_stride + first)
            multiply_row(source, stride, panel, n_inputs, panel_bias, result, y_stride)
    return y


LOWEST_EXPONENT = np.float32(-87.0)  # e to it is 1.6e-38, nearly the smallest normal number
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
HALF, ONE = np.float32(0.5), np.float32(1.0)
# of the Taylor series, from the seventh power down to the second
C7, C6, C5, C4, C3, C2 = (np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2))


@compile_product
def exp(x: Any) -> Any:
    """Compute e^x for x <= 0 in a way that numba can vectorize; NaN stays NaN.

    With x = n ln 2 + r and |r| <= ln(2) / 2, it is 2^n e^r.
    """
    if x < LOWEST_EXPONENT:
        x = LOWEST_EXPONENT
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN_2
    e_r = ((((((C7 * r + C6) * r + C5) * r + C4) * r + C3) * r + C2) * r + ONE) * r + ONE
    return e_r * reinterpret_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@compile_maximum
def find_group_maxima(logits: Floats) -> Floats:
    """Return the highest logit of the pieces i, N_GROUPS + i, 2 * N_GROUPS + i, ..., for each i."""
    maxima = np.full(N_GROUPS, -np.inf, np.float32)
    for first in range(0, len(logits), N_GROUPS):
        part = logits[first : first + N_GROUPS]
        for i in range(len(part)):
            if part[i] > maxima[i]:
                maxima[i] = part[i]
    return maxima
