"""Parts of a model on a CPU: dropout masks by a compiled loop, and products whose bias oneDNN adds in
bf16.

torch's own CPU kernel for products with a bias first fills the output with it and reads it back. In
bf16, oneDNN adds the bias before it writes the product. The activation stays a separate step: oneDNN's
ReLU would turn NaN into 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.engines.cpu.compiled_dropout import fill_compiled
from nmt.model.backend import Backend
from nmt.model.dropout_masks import draw_factors, drop
from nmt.system.device import has_bf16_products


class CpuBackend(Backend):
    def draw_factors(self, x: Tensor, rate: float) -> Tensor:
        return draw_factors(x, rate, fill_compiled)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        return drop(x, rate, fill_compiled)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if can_fuse(x, weight):
            return _FusedLinear.apply(x, weight, bias)
        return super().multiply(x, weight, bias)


def can_fuse(x: Tensor, weight: Tensor) -> bool:
    """Whether to use oneDNN's fused kernel: for rows in bf16 on a processor that supports it."""
    return (
        x.dtype == torch.bfloat16
        and x.dim() == 2
        and (x.dtype == weight.dtype or torch.is_autocast_enabled("cpu"))
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
