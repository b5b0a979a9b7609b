"""The linear layers of the feed-forward network, with a bias and perhaps an activation.

Torch's own CPU kernel for products with a bias first fills the output with it and reads it back. In
bf16 oneDNN adds the bias and applies ReLU before the product leaves the registers; elsewhere both follow
in place.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BiasedLinear(nn.Linear):
    """nn.Linear, faster."""

    def forward(self, x: Tensor) -> Tensor:
        if can_fuse(x):
            return _FusedLinear.apply(x, self.weight, self.bias, "none")
        y = F.linear(x, self.weight)
        return y.add_(self.bias.to(y.dtype))


class ActivatedLinear(BiasedLinear):
    def __init__(self, n_inputs: int, n_outputs: int, activation: str) -> None:
        super().__init__(n_inputs, n_outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "relu" and can_fuse(x):
            return _FusedLinear.apply(x, self.weight, self.bias, "relu")
        y = super().forward(x)
        if self.activation == "gelu":
            return F.gelu(y)
        return F.relu_(y) if self.activation == "relu" else F.silu(y)


def can_fuse(x: Tensor) -> bool:
    """Whether oneDNN multiplies these inputs, and a compiler does not see to the rest."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and not torch.compiler.is_compiling()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class _FusedLinear(torch.autograd.Function):
    """(inputs (T, I), weight (O, I), bias (O,)) -> (T, O), in the inputs' precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        fast_weight = weight.to(x.dtype)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, fast_weight, bias.to(x.dtype), activation, [], ""
        )
        ctx.save_for_backward(x, fast_weight, y if activation == "relu" else None)
        ctx.exact = weight.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, y = ctx.saved_tensors
        if y is not None:
            grad = torch.ops.aten.threshold_backward(grad, y, 0)  # 0 where ReLU was 0
        d_weight = (grad.T @ x).to(ctx.exact)
        return grad @ weight, d_weight, grad.sum(0).to(ctx.exact), None
