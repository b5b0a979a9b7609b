"""The softmax over the vocabulary as a GPU kernel: a row of logits becomes its loss and, in place, its gradient.

One program reads a row twice and writes it once, whatever the precision of the logits; sums are fp32. Rows go through
in chunks between plain matrix products, so (T, V) logits never exist. The rule is the authors': 1 - eps on the gold
piece, eps / (V - 1) on each other; a label below 0 does not count, its losses and gradients are exactly zero.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the plain path needs none of it
    triton = tl = constexpr = None

kernel = triton.jit if triton is not None else lambda function: function
IS_INTERPRETED = triton is not None and triton.knobs.runtime.interpret  # Triton itself reads it but once
ROWS = 4096  # in a chunk: 300 MB of bf16 logits at 37,000 pieces, and products large enough for any GPU


def supports(hidden: Tensor) -> bool:
    """Whether `fused_loss_forward` takes such rows; if not, the plain loss does."""
    return (triton is not None and (hidden.is_cuda or IS_INTERPRETED)
            and hidden.dtype in (torch.float32, torch.bfloat16))


@kernel
def _rows(logits, labels, smoothed, nll, row, gold, others, n_vocab, n_columns, BLOCK: constexpr,
          NEEDS_GRAD: constexpr):
    place = tl.program_id(0)
    label = tl.load(labels + place)
    logits += place.to(tl.int64) * row
    top = -1e30
    total = 0.0  # of exp(logit - top)
    plain = tl.zeros((BLOCK,), tl.float32)
    mine = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_vocab if label >= 0 else 0, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(logits + columns, columns < n_vocab, -float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(part, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(part - new_top), 0)
        top = new_top
        plain += tl.where(columns < n_vocab, part, 0.0)
        mine += tl.where(columns == label, part, 0.0)
    counts = label >= 0
    total = tl.where(counts, total, 1.0)
    log_total = top + tl.log(total)
    at_label = tl.sum(mine, 0)
    tl.store(nll + place, tl.where(counts, log_total - at_label, 0.0))
    tl.store(smoothed + place, tl.where(counts, log_total - gold * at_label - others * tl.sum(plain, 0), 0.0))
    if NEEDS_GRAD:
        for start in range(0, n_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            is_seen = counts & (columns < n_vocab)
            part = tl.load(logits + columns, is_seen, -float("inf")).to(tl.float32)
            part = tl.exp(part - top) / total - others - tl.where(columns == label, gold, 0.0)
            tl.store(logits + columns, tl.where(is_seen, part, 0.0), columns < n_columns)


@torch.library.custom_op("nmt::loss_rows", mutates_args=("logits",))
def rows_in_place(logits: Tensor, labels: Tensor, gold: float, others: float, n_vocab: int,
                  needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Smoothed losses and NLL (C,); the logits (C, V) become the gradient of the former, if one is needed.

    The loss of a row is lse - gold * logit[label] - others * sum(logits). Columns from n_vocab on are padding: they are
    not read, and their gradients are zero.
    """
    assert logits.stride(1) == 1, "a row's logits must lie side by side"
    smoothed, nll = _losses(logits, labels)
    block = min(4096, triton.next_power_of_2(n_vocab))
    _rows[len(labels),](logits, labels, smoothed, nll, logits.stride(0), gold, others, n_vocab, logits.shape[1],
                        block, needs_grad, num_warps=8 if block == 4096 else 4)
    return smoothed, nll


@rows_in_place.register_fake
def _losses(logits: Tensor, labels: Tensor, *_: float) -> tuple[Tensor, Tensor]:
    return logits.new_empty(labels.shape, dtype=torch.float32), logits.new_empty(labels.shape, dtype=torch.float32)


def fused_loss_forward(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, needs_grad: bool,
                       n_vocab: int | None = None,
                       rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(T, d), (V, d), (T,) -> smoothed sum, NLL sum, and the smoothed sum's gradients of `hidden` and `weight`.

    Rows of `weight` from `n_vocab` on are padding: finite, and without a share in anything.
    """
    n_weights, n_vocab = weight.shape[0], n_vocab or weight.shape[0]
    others = smoothing / (n_vocab - 1)
    device = hidden.device.type
    fast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    hidden, weight_fast = hidden.to(fast), F.pad(weight.to(fast), (0, 0, 0, -n_weights % 64))  # as products like it
    smoothed, nll = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden, dtype=torch.float32) if needs_grad else None
    grad_weight = torch.zeros_like(weight_fast, dtype=torch.float32) if needs_grad else None
    room = hidden.new_empty(min(rows, hidden.shape[0]), weight_fast.shape[0])  # one for all chunks
    with torch.autocast(device, enabled=False):
        for first in range(0, hidden.shape[0], rows):
            h, label = hidden[first:first + rows], labels[first:first + rows]
            logits = torch.mm(h, weight_fast.T, out=room[:len(h)])  # (C, V)
            losses = rows_in_place(logits, label, 1.0 - smoothing - others, others, n_vocab, needs_grad)
            smoothed += losses[0].sum()
            nll += losses[1].sum()
            if grad_hidden is not None and grad_weight is not None:
                grad_hidden[first:first + rows] = logits @ weight_fast
                grad_weight += logits.T @ h  # not addmm, which wants the sum in the precision of the factors
    return smoothed, nll, grad_hidden, None if grad_weight is None else grad_weight[:n_weights]
