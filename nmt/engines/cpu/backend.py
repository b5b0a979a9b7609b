"""Parts of a model on a CPU: attention and dropout masks by compiled loops, and products whose bias
oneDNN adds in bf16.

Attention is compiled where a gradient is wanted, in fp32 and bf16; else, with dropout of its weights, and
without numba, torch computes it. Without gradients nothing is compiled or loaded: a process that translates
one line is soon done.

torch's own CPU kernel for products with a bias first fills the output with it and reads it back. In
bf16, oneDNN adds the bias before it writes the product. The activation stays a separate step: oneDNN's
ReLU would turn NaN into 0.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.data.batch import pack
from nmt.model.attention_mask import AttentionMask
from nmt.model.backend import Backend, LossAndGradients
from nmt.model.dropout_masks import Mask, draw_factors, drop, mask_by_arrays
from nmt.system.device import has_bf16_products
from nmt.system.extras import warn_uncompiled

MAX_COMPILED_LENGTH = 256  # of a sentence; torch's batched products are faster for longer ones


class CpuBackend(Backend):
    def __init__(self, generator: torch.Generator | None = None) -> None:
        """`generator` draws the seeds of dropout masks; None is torch's own."""
        self.generator = generator

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        weights: list[Tensor] | None = None,
        dropout: float = 0.0,
        rotation: Tensor | None = None,
    ) -> Tensor:
        compiled = None
        is_training = torch.is_grad_enabled() and q.requires_grad
        is_short = max(side.longest for side in mask.packed) <= MAX_COMPILED_LENGTH
        if is_training and is_short and weights is None and not dropout and q.dtype == v.dtype:
            compiled = load_compiled(q.dtype)
        if compiled is None:
            return super().attend(q, k, v, mask, weights, dropout, rotation)
        return compiled.attend(q, k, v, mask, rotation)

    def compute_loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, needs_grad: bool
    ) -> LossAndGradients:
        from nmt.train.loss import chunked_loss_forward  # which only training needs

        compiled = load_compiled(hidden.dtype) if needs_grad else None
        softmax = None if compiled is None else compiled.softmax_in_place
        return chunked_loss_forward(hidden, weight, labels, smoothing, needs_grad, softmax)

    def draw_factors(self, x: Tensor, rate: float) -> Tensor:
        return draw_factors(x, rate, choose_mask(x), self.generator)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        return drop(x, rate, choose_mask(x), self.generator)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if can_fuse(x, weight):
            return _FusedLinear.apply(x, weight, bias)
        return super().multiply(x, weight, bias)


def choose_mask(x: Tensor) -> Mask:
    compiled = load_compiled(x.dtype)
    return mask_by_arrays if compiled is None else compiled.mask


class CompiledTraining(NamedTuple):
    """What numba has compiled for numbers of one type."""

    attend: Callable[..., Tensor]
    mask: Mask
    softmax_in_place: Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def load_compiled(dtype: torch.dtype) -> CompiledTraining | None:
    """Return what is compiled for this type, or None if nothing is, or if numba fails."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        from nmt.engines.cpu.compiled_attention import ATTENTION_FILES, attend_compiled
        from nmt.engines.cpu.compiled_code import compile_once
        from nmt.engines.cpu.compiled_rows import mask_compiled, softmax_in_place

        def compute_all() -> None:
            x, one = torch.ones(1, 1, 1, dtype=dtype, requires_grad=True), pack([[0]])
            with torch.enable_grad():
                attend_compiled(x, x, x, AttentionMask(one, one)).sum().backward()
            mask_compiled(x, 0.5, 1)
            softmax_in_place(x.detach()[0], one.tokens[:1, None], torch.float32)

        compile_once("training", "attend_sentences", ATTENTION_FILES, compute_all)
        return CompiledTraining(attend_compiled, mask_compiled, softmax_in_place)
    except Exception as error:
        warn_uncompiled(error)
        return None


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
