"""Dropout masks as a pure function of a seed and the index of an element.

A 32-bit hash mixes the index with both halves of the seed, and the element is dropped if the result is
below a threshold. So the backward pass computes a mask again instead of keeping it. A generator of torch's
draws the seeds, so `torch.manual_seed` determines the masks as everywhere.
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

Mask = Callable[[Tensor, float, int], Tensor]


def mask_by_arrays(x: Tensor, rate: float, seed: int) -> Tensor:
    """Multiply each element by 0 with probability `rate`, and by 1 / (1 - rate) otherwise."""
    hashes = hash_index(np.arange(x.numel(), dtype=np.uint32), *split_seed(seed))
    is_kept = torch.from_numpy(hashes >= np.uint32(count_dropped(rate))).view(x.shape)
    return x * (is_kept.to(x) * torch.tensor(find_scale(rate)).to(x))


def hash_index(index: Any, low: Any, high: Any) -> Any:
    """Hash an index, or each of an array, with both halves of a seed. An engine may compile this."""
    # compiled, numbers are promoted to 64 bits, so each step casts its result back to 32
    number = np.uint32(index * STRIDE + low)
    number = np.uint32((number ^ (number >> SHIFT_16)) * FIRST_FACTOR)
    number = np.uint32((number ^ (number >> SHIFT_15)) * SECOND_FACTOR)
    number = np.uint32((number ^ (number >> SHIFT_16)) + high)
    number = np.uint32((number ^ (number >> SHIFT_16)) * FIRST_FACTOR)
    number = np.uint32((number ^ (number >> SHIFT_15)) * SECOND_FACTOR)
    return np.uint32(number ^ (number >> SHIFT_16))


def split_seed(seed: int) -> tuple[np.uint32, np.uint32]:
    """Return the lower and the upper half."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)


def draw_seed(
    device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Tensor:
    return torch.randint(2**63 - 1, (), device=device, generator=generator)


def count_dropped(rate: float) -> int:
    """Return how many of the 2^32 hashes mean that an element is dropped: those below this number."""
    return min(round(rate * 2**BITS), 2**BITS - 1)


def find_scale(rate: float) -> float:
    """Return what kept elements are multiplied by."""
    return float(2**BITS / (2**BITS - count_dropped(rate)))


def draw_factors(
    x: Tensor,
    rate: float,
    mask: Mask = mask_by_arrays,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a factor for each element of `x`: 0 with probability `rate`, else 1 / (1 - rate)."""
    return mask(torch.ones_like(x), rate, int(draw_seed(generator=generator)))


class _MaskedBySeed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rate: float, mask: Mask, generator: torch.Generator | None
    ) -> Tensor:
        ctx.rate, ctx.seed, ctx.mask = rate, int(draw_seed(generator=generator)), mask
        return mask(x, rate, ctx.seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # Computing the mask again saves its memory, and in a large model time as well.
        return ctx.mask(grad, ctx.rate, ctx.seed), None, None, None


def drop(
    x: Tensor,
    rate: float,
    mask: Mask = mask_by_arrays,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Zero each element with probability `rate`, and scale the others by 1 / (1 - rate)."""
    return _MaskedBySeed.apply(x, rate, mask, generator)
