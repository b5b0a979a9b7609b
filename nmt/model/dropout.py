"""Dropout (section 5.4) whose masks cost less than the products that they follow.

On the CPU torch draws a Bernoulli number for each element, which takes longer than the matrix
product before it. Here one 64-bit draw serves four elements: each compares 16 bits with a
threshold, and what is kept is scaled by the exact share that is kept. The draws are seeded by
torch's default generator, so `torch.manual_seed` determines them as everywhere. On a GPU torch's
own fused kernel is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BITS = 16


def draw_dropout(x: Tensor, rate: float) -> Tensor:
    """Draw a factor for each element of `x`: 0 with probability `rate`, else 1 / (1 - rate)."""
    if x.device.type != "cpu":
        return F.dropout(torch.ones_like(x), rate, True)
    threshold = min(round(rate * 2**BITS), 2**BITS - 1)
    n = x.numel()
    # half again as fast as torch's generator
    stream = np.random.SFC64(int(torch.randint(2**63 - 1, ())))
    bits = torch.from_numpy(stream.random_raw((n + 3) // 4)).view(torch.int16)[:n].view(x.shape)
    keep = torch.empty(x.shape, dtype=x.dtype)
    torch.ge(bits, threshold - 2 ** (BITS - 1), out=keep)
    return keep.mul_(2**BITS / (2**BITS - threshold))


class _CheapDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        keep = draw_dropout(x, rate)
        ctx.save_for_backward(keep)
        return x * keep

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


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
