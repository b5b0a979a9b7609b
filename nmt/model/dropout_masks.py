"""Dropout masks as a pure function of a seed and the index of an element.

A 32-bit hash mixes the index with both halves of the seed, and the element is dropped if the result is
below a threshold. So the backward pass computes a mask again instead of keeping it. torch's default
generator draws the seeds, so `torch.manual_seed` determines the masks as everywhere.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

BITS = 32  # of the hash
STRIDE = np.uint32(0x9E3779B9)  # odd, so the map is one-to-one; neighbours then differ in many bits
# multipliers and shifts of Chris Wellons' lowbias32 (github.com/skeeto/hash-prospector)
FIRST_FACTOR, SECOND_FACTOR = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
SHIFT_15, SHIFT_16 = np.uint32(15), np.uint32(16)

INTEGER_OF_SAME_WIDTH = {  # numpy has no bf16, so factors are written as integers
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

MaskArray = np.ndarray[Any, np.dtype[Any]]
Fill = Callable[[MaskArray, MaskArray, int, int], None]


def split_seed(seed: int) -> tuple[np.uint32, np.uint32]:
    """Return the lower and the upper half."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)


def fill_by_arrays(out: MaskArray, value: MaskArray, seed: int, threshold: int) -> None:
    """Set each element of `out` (N,) to 0 with probability threshold / 2^32, else to the element of
    `value` (1,).
    """
    low, high = split_seed(seed)
    x = np.arange(out.size, dtype=np.uint32) * STRIDE + low
    for added in (high, np.uint32(0)):
        x = (x ^ (x >> SHIFT_16)) * FIRST_FACTOR
        x = (x ^ (x >> SHIFT_15)) * SECOND_FACTOR
        x = (x ^ (x >> SHIFT_16)) + added
    out[:] = np.where(x >= np.uint32(threshold), value[0], 0)


def draw_factors(x: Tensor, rate: float, fill: Fill = fill_by_arrays) -> Tensor:
    """Draw a factor for each element of `x`: 0 with probability `rate`, else 1 / (1 - rate)."""
    return make_factors(x, rate, int(draw_seed()), fill)


def draw_seed(device: torch.device | str = "cpu") -> Tensor:
    return torch.randint(2**63 - 1, (), device=device)


def count_dropped(rate: float) -> int:
    """Return how many of the 2^32 hashes mean that an element is dropped: those below this number."""
    return min(round(rate * 2**BITS), 2**BITS - 1)


def make_factors(x: Tensor, rate: float, seed: int, fill: Fill) -> Tensor:
    threshold = count_dropped(rate)
    scale = torch.tensor([2**BITS / (2**BITS - threshold)], dtype=x.dtype, device="cpu")
    factors = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    integer = INTEGER_OF_SAME_WIDTH[x.dtype]
    cells, value = factors.view(-1).view(integer), scale.view(integer)
    fill(cells.numpy(), value.numpy(), seed, threshold)
    return factors.to(x.device)


class _HashedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, fill: Fill) -> Tensor:
        ctx.rate, ctx.seed, ctx.fill = rate, int(draw_seed()), fill
        return x * make_factors(x, rate, ctx.seed, fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Computing the factors again saves their memory, and in a large model time as well.
        return grad * make_factors(grad, ctx.rate, ctx.seed, ctx.fill), None, None


def drop(x: Tensor, rate: float, fill: Fill = fill_by_arrays) -> Tensor:
    """Zero each element with probability `rate`, and scale the others by 1 / (1 - rate)."""
    return _HashedDropout.apply(x, rate, fill)
