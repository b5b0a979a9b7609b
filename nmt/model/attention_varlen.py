"""Attention over packed sentences with torch's own kernel, FlashAttention for variable lengths.

It computes what `attention_triton.triton_attention` computes, for heads in bf16 on a GPU.
FlashAttention reads and writes only rows that lie between offsets: what it returns for the dead
tail was never written and may be NaN. So rows that attend to nothing, and rows that nobody attends
to, are masked here, outputs and gradients alike. Offsets that repeat are sentences of length zero.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

varlen_attn: Any = None
# A torch for CPUs has the module too, but no kernel, and importing it takes a second.
if torch.backends.cuda.is_built():
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # older releases of torch
        pass

WIDEST_VARLEN_HEAD = 256


def has_window(kernel: Callable[..., Any]) -> bool:
    """Whether this release's kernel takes a window; before torch 2.12 it took `is_causal` instead."""
    return "window_size" in inspect.signature(kernel).parameters


HAS_WINDOW = varlen_attn is not None and has_window(varlen_attn)


def supports_varlen(q: Tensor, v: Tensor) -> bool:
    """Whether `varlen_attention` supports these heads."""
    size = q.shape[-1]
    has_dtype = q.dtype == v.dtype == torch.bfloat16
    has_size = size == v.shape[-1] and size % 8 == 0 and size <= WIDEST_VARLEN_HEAD
    return HAS_WINDOW and q.is_cuda and has_dtype and has_size


class _GradientOfLiveRows(torch.autograd.Function):
    """The rows as they are; backward, zeros replace the gradient of dead rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, is_live: Tensor) -> Tensor:
        ctx.save_for_backward(is_live)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (is_live,) = ctx.saved_tensors
        return torch.where(is_live, grad, 0.0), None


def _live_rows(rows: Tensor, offsets: Tensor, other_offsets: Tensor) -> Tensor:
    """Whether each row lies in a sentence that has tokens on the other side too."""  # (T, 1, 1)
    place = torch.arange(len(rows), device=rows.device)
    is_live = place < offsets[-1]
    if offsets is not other_offsets:
        sentence = torch.searchsorted(offsets, place, right=True) - 1
        has_others = other_offsets[1:] > other_offsets[:-1]
        is_live = is_live & has_others[sentence.clamp(max=len(has_others) - 1)]
    return is_live[:, None, None]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v within each sentence.

    The shapes are (Tq, H, D), (Tk, H, D), (Tk, H, D) -> (Tq, H, D). Offsets (S + 1,) begin with 0.
    `longest_q` and `longest_k` may be more than is there, never less.
    `causal` and `window` are for queries and keys of equal lengths: FlashAttention aligns the last
    query with the last key, not the first with the first.
    """
    behind = -1 if window is None else window  # -1 is without a bound
    ahead = 0 if causal else behind
    is_live = _live_rows(q, q_offsets, k_offsets)
    q_ends = q_offsets.int()
    if q_offsets is k_offsets:  # cuDNN looks whether they are one tensor
        is_live_key, k_ends = is_live, q_ends
    else:
        is_live_key, k_ends = _live_rows(k, k_offsets, q_offsets), k_offsets.int()
    q = _GradientOfLiveRows.apply(q, is_live)
    k = _GradientOfLiveRows.apply(k, is_live_key)
    v = _GradientOfLiveRows.apply(v, is_live_key)
    output = varlen_attn(q, k, v, q_ends, k_ends, longest_q, longest_k, window_size=(behind, ahead))
    assert isinstance(output, Tensor)  # a pair only if more is asked for
    return torch.where(is_live, output, 0.0)
