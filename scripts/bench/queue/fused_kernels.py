"""Kernels with which a GPU's graph can be recorded from eager code, without torch.compile: the residual connection
with its dropout and LayerNorm, and a bias with its ReLU, one kernel each way. They are for post-norm models with ReLU.

They replace torch.compile if a GPU says that the uncompiled graph takes at most 37 ms an update of base (q1_speed.py), and
that they run within 1.3 times what their bytes take (q3_fused.py). Until then nothing in nmt/ uses them.
tests/kernels/test_fused_kernels.py holds them to the model's own code, interpreted.

The masks are those of nmt/model/dropout_masks.py, of a seed on the device, which a recorded graph draws anew each time. Sums
over rows are added up per program and then once, always in the same order, so the gradients repeat bit by bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmt.model.dropout_masks import BITS
from nmt.model.feed_forward import ActivatedLinear
from nmt.model.transformer import Residual, Transformer

ROWS, ROW_BLOCKS = 4, 16  # rows of a block, and blocks of one program where it sums over rows
CELLS = 4096  # of one program where it does not
COLUMNS = 128


@triton.jit
def is_kept(index, low, high, threshold):
    x = index.to(tl.uint32) * 0x9E3779B9 + low
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) + high
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x ^ (x >> 16)) >= threshold


@triton.jit
def norm_forward(
    x,  # (n, D) of the residual connection
    f,  # (n, D) of the sub-layer, before its bias
    bias,
    weight,
    shift,
    seed,
    y,
    z,
    means,
    scales,
    n,
    eps,
    factor,  # of what is kept
    threshold,  # of the hash; 0 drops nothing
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    at = row[:, None] * D + column[None, :]
    is_row = (row < n)[:, None]
    low, high = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    v = tl.load(f + at, is_row, 0.0).to(tl.float32)
    if HAS_BIAS:
        v += tl.load(bias + column)[None, :]
    v = tl.where(is_kept(at, low, high, threshold), v * factor, 0.0)
    v += tl.load(x + at, is_row, 0.0).to(tl.float32)
    v = v.to(z.dtype.element_ty).to(tl.float32)  # as it is stored
    tl.store(z + at, v, is_row)
    mean = tl.sum(v, 1) / D
    centred = v - mean[:, None]
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)
    normed = centred * scale[:, None] * tl.load(weight + column)[None, :]
    tl.store(y + at, normed + tl.load(shift + column)[None, :], is_row)
    tl.store(means + row, mean, row < n)
    tl.store(scales + row, scale, row < n)


@triton.jit
def norm_backward(
    d_y,
    d_twin,  # of y's second use
    z,
    means,
    scales,
    weight,
    seed,
    d_x,
    d_f,
    parts,  # (programs, 3, D): of the sums for weight, shift and bias
    n,
    factor,
    threshold,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    column = tl.arange(0, D)
    w = tl.load(weight + column)[None, :]
    low, high = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    d_weight = tl.zeros((D,), tl.float32)
    d_shift = tl.zeros((D,), tl.float32)
    d_bias = tl.zeros((D,), tl.float32)
    for block in range(BLOCKS):
        row = (tl.program_id(0) * BLOCKS + block) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * D + column[None, :]
        is_row = (row < n)[:, None]
        g = tl.load(d_y + at, is_row, 0.0).to(tl.float32)
        g += tl.load(d_twin + at, is_row, 0.0).to(tl.float32)
        mean = tl.load(means + row, row < n, 0.0)[:, None]
        scale = tl.load(scales + row, row < n, 0.0)[:, None]
        normed = (tl.load(z + at, is_row, 0.0).to(tl.float32) - mean) * scale
        d_weight += tl.sum(g * normed, 0)
        d_shift += tl.sum(g, 0)
        g *= w
        along = tl.sum(g * normed, 1)[:, None] / D
        d = scale * (g - tl.sum(g, 1)[:, None] / D - normed * along)
        tl.store(d_x + at, d, is_row)
        d = tl.where(is_kept(at, low, high, threshold) & is_row, d * factor, 0.0)
        d_bias += tl.sum(d, 0)
        tl.store(d_f + at, d, is_row)
    part = parts + tl.program_id(0) * 3 * D + column
    tl.store(part, d_weight)
    tl.store(part + D, d_shift)
    tl.store(part + 2 * D, d_bias)


@triton.jit
def relu_forward(h, bias, n, WIDTH: tl.constexpr, CELLS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CELLS + tl.arange(0, CELLS)
    v = tl.load(h + at, at < n, 0.0).to(tl.float32) + tl.load(bias + at % WIDTH)
    v = tl.where(v <= 0.0, 0.0, v)  # NaN stays NaN
    tl.store(h + at, v, at < n)


@triton.jit
def relu_backward(
    d_h,
    h,
    d_sum,
    parts,
    n,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for block in range(BLOCKS):
        row = (tl.program_id(0) * BLOCKS + block) * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        is_cell = (row < n)[:, None] & (column < WIDTH)[None, :]
        is_on = tl.load(h + at, is_cell, 0.0).to(tl.float32) > 0.0
        v = tl.where(is_on, tl.load(d_h + at, is_cell, 0.0).to(tl.float32), 0.0)
        total += tl.sum(v, 0)
        tl.store(d_sum + at, v, is_cell)
    tl.store(parts + tl.program_id(0) * WIDTH + column, total, column < WIDTH)


class AddedAndNormed(torch.autograd.Function):
    """(x (n, D), f (n, D), bias (D,) or None, weight (D,), shift (D,)) -> LayerNorm(x + dropout(f + bias)), twice: one for
    the next sub-layer and one for the next residual connection, so that the sum of both gradients is part of the kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        f: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        shift: Tensor,
        eps: float,
        rate: float,
    ) -> tuple[Tensor, Tensor]:
        n, width = x.shape
        threshold = min(round(rate * 2**BITS), 2**BITS - 1)
        factor = 2**BITS / (2**BITS - threshold)
        seed = torch.randint(2**31, (2,), device=x.device)
        y, z = torch.empty_like(x), torch.empty_like(x)
        means, scales = torch.empty(2, n, device=x.device)
        norm_forward[(triton.cdiv(n, ROWS),)](
            x,
            f,
            bias,
            weight,
            shift,
            seed,
            y,
            z,
            means,
            scales,
            n,
            eps,
            factor,
            threshold,
            D=width,
            HAS_BIAS=bias is not None,
            ROWS=ROWS,
        )
        ctx.save_for_backward(z, means, scales, weight, seed)
        ctx.numbers, ctx.has_bias = (factor, threshold), bias is not None
        return y, y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, d_twin: Tensor) -> tuple[Tensor | None, ...]:
        z, means, scales, weight, seed = ctx.saved_tensors
        n, width = z.shape
        n_programs = triton.cdiv(n, ROWS * ROW_BLOCKS)
        d_x, d_f = torch.empty_like(z), torch.empty_like(z)
        parts = torch.empty(n_programs, 3, width, device=z.device)
        norm_backward[(n_programs,)](
            d_y.contiguous(),
            d_twin.contiguous(),
            z,
            means,
            scales,
            weight,
            seed,
            d_x,
            d_f,
            parts,
            n,
            *ctx.numbers,
            D=width,
            ROWS=ROWS,
            BLOCKS=ROW_BLOCKS,
        )
        d_weight, d_shift, d_bias = parts.sum(0)
        return d_x, d_f, d_bias if ctx.has_bias else None, d_weight, d_shift, None, None


class BiasedReLU(torch.autograd.Function):
    """(h (n, W), which is written over; bias (W,)) -> ReLU(h + bias)"""

    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(h)
        relu_forward[(triton.cdiv(h.numel(), CELLS),)](
            h, bias, h.numel(), WIDTH=h.shape[1], CELLS=CELLS
        )
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx: Any, d_h: Tensor) -> tuple[Tensor, Tensor]:
        (h,) = ctx.saved_tensors
        n, width = h.shape
        n_programs = triton.cdiv(n, ROWS * ROW_BLOCKS)
        d_sum, parts = torch.empty_like(h), torch.empty(n_programs, width, device=h.device)
        relu_backward[(n_programs, triton.cdiv(width, COLUMNS))](
            d_h.contiguous(),
            h,
            d_sum,
            parts,
            n,
            WIDTH=width,
            COLUMNS=COLUMNS,
            ROWS=ROWS,
            BLOCKS=ROW_BLOCKS,
        )
        return d_sum, parts.sum(0)


def use_fused_kernels(model: Transformer) -> None:
    """Have the residual connections and the inner layers of a model computed by these kernels."""
    config = model.config
    assert config.norm == "post" and config.activation == "relu" and not config.d_model & 15
    for layer in (*model.encoder, *model.decoder):
        fuse_residual(layer.attention_residual, layer.attention.output)
        fuse_residual(layer.feed_forward_residual, layer.feed_forward.outer)
        fuse_inner(layer.feed_forward.inner)
    for layer in model.decoder:
        fuse_residual(layer.memory_residual, layer.memory_attention.output)


def fuse_residual(residual: Residual, last: torch.nn.Linear) -> None:
    """Have the residual connection add the bias of its sub-layer's last product."""

    def multiply(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, last.weight)

    def forward(x: Tensor, sublayer: Any) -> Tensor:
        f = sublayer(getattr(x, "twin", x))
        norm, rate = residual.norm, residual.dropout.rate if residual.training else 0.0
        y, twin = AddedAndNormed.apply(
            x, f.to(x.dtype), last.bias, norm.weight, norm.bias, norm.eps, rate
        )
        y.twin = twin
        return y

    last.forward, residual.forward = multiply, forward


def fuse_inner(inner: ActivatedLinear) -> None:
    def forward(x: Tensor) -> Tensor:
        return BiasedReLU.apply(torch.nn.functional.linear(x, inner.weight), inner.bias)

    inner.forward = forward
