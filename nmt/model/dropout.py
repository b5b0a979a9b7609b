"""Dropout (section 5.4) whose masks cost less than the products that they follow.

On the CPU torch draws a Bernoulli number for each element, which takes longer than the matrix
product before it. Here a mask is a hash of a seed and of each element's index (`dropout_masks.py`), and
the backward pass computes it again instead of keeping it. torch's default generator draws the seeds, so
`torch.manual_seed` determines the masks as everywhere. On a GPU torch's own fused kernel is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.dropout_masks import BITS, fill_masked
from nmt.system.tracing import not_traced

INTEGER_OF_SAME_WIDTH = {  # numpy has no bf16, so factors are written as integers
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def draw_dropout(x: Tensor, rate: float) -> Tensor:
    """Draw a factor for each element of `x`: 0 with probability `rate`, else 1 / (1 - rate)."""
    if x.device.type != "cpu":
        return F.dropout(torch.ones_like(x), rate, True)
    return make_factors(x, rate, draw_seed())


def draw_seed() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))


@not_traced  # numba's loop cannot be traced
def make_factors(x: Tensor, rate: float, seed: int) -> Tensor:
    threshold = min(round(rate * 2**BITS), 2**BITS - 1)
    scale = torch.tensor([2**BITS / (2**BITS - threshold)], dtype=x.dtype, device="cpu")
    factors = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    integer = INTEGER_OF_SAME_WIDTH[x.dtype]
    cells, value = factors.view(-1).view(integer), scale.view(integer)
    fill_masked(cells.numpy(), value.numpy(), seed, threshold)
    return factors


class _CheapDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate, ctx.seed = rate, draw_seed()
        return x * make_factors(x, rate, ctx.seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Computing the factors again saves their memory, and in a large model time as well.
        return grad * make_factors(grad, ctx.rate, ctx.seed), None


class Dropout(nn.Module):
    """Zero each element with probability `rate` in training and scale the others by 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        if x.device.type == "cpu":
            return _CheapDropout.apply(x, self.rate)
        return F.dropout(x, self.rate, True)


@contextmanager
def suspend_dropout(model: nn.Module) -> Iterator[None]:
    """Turn dropout off for now: the model may be in training."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
