"""The linear layers of the feed-forward network, with a bias and an optional activation.

torch's own CPU kernel for products with a bias first fills the output with it and reads it back. In
bf16, oneDNN adds the bias before it writes the product; otherwise it is added afterwards, in place. The
activation is a separate step: oneDNN's ReLU would turn NaN into 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nmt.system.device import has_bf16_products


class BiasedLinear(nn.Linear):
    """nn.Linear, faster."""

    def forward(self, x: Tensor) -> Tensor:
        if can_fuse(x, self.weight):
            return _FusedLinear.apply(x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        return y.add_(self.bias.to(y.dtype))


class ActivatedLinear(BiasedLinear):
    def __init__(self, n_inputs: int, n_outputs: int, activation: str) -> None:
        super().__init__(n_inputs, n_outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return apply_activation(super().forward(x), self.activation)


def apply_activation(y: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return F.relu_(y)
    if activation == "gelu":
        return F.gelu(y)
    if activation == "swish":
        return F.silu(y)
    return y


def can_fuse(x: Tensor, weight: Tensor) -> bool:
    """Whether to use oneDNN's fused kernel: for rows in bf16 on a CPU that supports it, outside
    torch.compile, which fuses by itself.
    """
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and x.dim() == 2
        and (x.dtype == weight.dtype or torch.is_autocast_enabled("cpu"))
        and not torch.compiler.is_compiling()
        and has_bf16_products()
    )


class _FusedLinear(torch.autograd.Function):
    """(inputs (T, I), weight (O, I), bias (O,)) -> (T, O), in the inputs' precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        cast_weight, cast_bias = weight.to(x.dtype), bias.to(x.dtype)
        ctx.save_for_backward(x, cast_weight)
        ctx.weight_dtype = weight.dtype
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, cast_weight, cast_bias, "none", [], "")
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        d_x = d_weight = d_bias = None
        if for_x:
            d_x = grad @ weight
        if for_weight:
            d_weight = (grad.T @ x).to(ctx.weight_dtype)
        if for_bias:
            d_bias = grad.sum(0).to(ctx.weight_dtype)
        return d_x, d_weight, d_bias
