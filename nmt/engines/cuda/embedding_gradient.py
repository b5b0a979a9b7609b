"""Embedding look-up with a gradient whose bits repeat on a GPU.

The compiler would turn the gradient into atomic additions, whose order changes from run to run: a
run that is continued would not end in the same bits. torch's own kernel sorts the row numbers first
and adds in order; here it is wrapped in an operation that the compiler leaves alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("nmt::embedding_gradient", mutates_args=())
def _gradient(grad: Tensor, numbers: Tensor, n_rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, numbers, n_rows, -1, False)


@_gradient.register_fake
def _empty_gradient(grad: Tensor, numbers: Tensor, n_rows: int) -> Tensor:
    return grad.new_empty(n_rows, grad.shape[-1])


class LookUp(torch.autograd.Function):
    """table[numbers]: (rows, d), (T,) -> (T, d)."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.n_rows = len(table)
        return F.embedding(numbers, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (numbers,) = ctx.saved_tensors
        return _gradient(grad.contiguous(), numbers, ctx.n_rows), None
