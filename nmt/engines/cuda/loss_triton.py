"""The softmax over the vocabulary as a GPU kernel: logits become their losses and gradients.

One program reads a row once, holds it in registers and writes the gradient in its place; a row of
fp32 or of very many pieces is read twice. Sums are fp32. Rows go through in chunks between plain
matrix products, so (T, V) logits never exist. The rule is the authors': 1 - eps on the gold piece,
eps / (V - 1) on each other. A label below 0 does not count: its losses and gradients are exactly
zero.

Why a kernel of our own: torch computes the loss and its gradient in several passes over the logits,
which are the largest tensors of an update; this one reads and writes them once, in place.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.plan import round_up
from nmt.engines.cuda.kernels import IS_INTERPRETED, can_launch, constexpr, jit_function, tl, triton
from nmt.model.backend import LossAndGradients
from nmt.system.autocast import find_product_type
from nmt.train.loss import chunked_loss_forward

MOST_PAIRS, WIDEST_ROW = 1024, 49_152  # more would not fit in registers
# In a chunk, at most: 340 MB of bf16 logits at 37,000 pieces, and products large enough for any GPU.
CHUNK_ROWS = 4608


def compute_loss(hidden, weight, labels, smoothing, needs_grad):
    """As `chunked_loss_forward`, which computes what the kernel cannot take."""
    compute = fused_loss_forward if supports_fused_loss(hidden) else chunked_loss_forward
    return compute(hidden, weight, labels, smoothing, needs_grad)


def supports_fused_loss(hidden: Tensor) -> bool:
    """Whether `fused_loss_forward` can take such rows; if not, the plain loss does."""
    has_device = triton is not None and (hidden.is_cuda or IS_INTERPRETED)
    if not has_device or hidden.dtype not in (torch.float32, torch.bfloat16):
        return False
    return torch.compiler.is_compiling() or can_compute_loss(hidden.device, hidden.dtype)


@jit_function
def _unpack_pairs(pairs):
    """Return the fp32 logits of the even and of the odd columns; an int32 has the bits of two."""
    even = (pairs << 16).to(tl.float32, bitcast=True)
    odd = (pairs & -65536).to(tl.float32, bitcast=True)
    return even, odd


@jit_function
def _pack_pairs(even, odd):
    """Do the inverse of `_unpack_pairs`, rounding to bf16."""
    even = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    odd = odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return even | odd


@jit_function
def _replace_padding(even, odd, column, n_vocab, value):
    """Put a value in the place of what is in columns from n_vocab on."""
    return tl.where(column < n_vocab, even, value), tl.where(column + 1 < n_vocab, odd, value)


@jit_function
def _store_losses(smoothed, nll, row_number, counts, at_label, top, total, sums, gold, others):
    """Store the losses of a row. `total` is the sum of exp(logit - top), and `sums` adds up to that of logits."""
    log_total = top + tl.log(total)
    loss = log_total - gold * at_label - others * tl.sum(sums, 0)
    tl.store(nll + row_number, tl.where(counts, log_total - at_label, 0.0))
    tl.store(smoothed + row_number, tl.where(counts, loss, 0.0))


@jit_function
def loss_rows_once(
    logits, labels, smoothed, nll, row, gold, others, n_vocab, n_columns,
    PAIRS: constexpr, PARTS: constexpr, FULL_PARTS: constexpr, NEEDS_GRAD: constexpr,
):  # fmt: skip
    """Take a row of bf16 logits, read once: its parts stay in registers, two columns in each.

    Only parts from FULL_PARTS on hold padding, so only there columns are compared with the sizes.
    """
    row_number = tl.program_id(0)
    label = tl.load(labels + row_number)
    counts = label >= 0
    logits += row_number.to(tl.int64) * row
    at_label = tl.load(logits + label, counts, 0.0).to(tl.float32)
    all_pairs = logits.to(tl.pointer_type(tl.int32))
    pair = tl.arange(0, PAIRS)
    n_pairs = n_columns // 2

    # read the row
    parts = ()
    for n in tl.static_range(PARTS):
        is_read = counts
        if n >= FULL_PARTS:
            is_read = counts & (pair < n_pairs - n * PAIRS)
        parts = parts + (tl.load(all_pairs + n * PAIRS + pair, is_read, 0),)  # type: ignore

    # the largest logit and the sum
    tops = tl.full((PAIRS,), -1e30, tl.float32)
    sums = tl.zeros((PAIRS,), tl.float32)
    for n in tl.static_range(PARTS):
        even, odd = _unpack_pairs(parts[n])
        if n >= FULL_PARTS:
            column = 2 * (n * PAIRS + pair)
            in_even, in_odd = _replace_padding(even, odd, column, n_vocab, 0.0)
            sums += in_even
            sums += in_odd
            even, odd = _replace_padding(even, odd, column, n_vocab, -float("inf"))
        else:
            sums += even + odd
        tops = tl.maximum(tops, tl.maximum(even, odd))
    top = tl.max(tops, 0)

    # the sum of exponentials, and the losses
    totals = tl.zeros((PAIRS,), tl.float32)
    for n in tl.static_range(PARTS):
        even, odd = _unpack_pairs(parts[n])
        if n >= FULL_PARTS:
            column = 2 * (n * PAIRS + pair)
            even, odd = _replace_padding(even, odd, column, n_vocab, -float("inf"))
        totals += tl.exp(even - top) + tl.exp(odd - top)
    total = tl.where(counts, tl.sum(totals, 0), 1.0)
    _store_losses(smoothed, nll, row_number, counts, at_label, top, total, sums, gold, others)

    # write the gradient
    if NEEDS_GRAD:
        share = 1.0 / total
        for n in tl.static_range(PARTS):
            even, odd = _unpack_pairs(parts[n])
            even = tl.where(counts, tl.exp(even - top) * share - others, 0.0)
            odd = tl.where(counts, tl.exp(odd - top) * share - others, 0.0)
            if n >= FULL_PARTS:
                column = 2 * (n * PAIRS + pair)
                even, odd = _replace_padding(even, odd, column, n_vocab, 0.0)
                is_written = pair < n_pairs - n * PAIRS
                tl.store(all_pairs + n * PAIRS + pair, _pack_pairs(even, odd), is_written)
            else:
                tl.store(all_pairs + n * PAIRS + pair, _pack_pairs(even, odd))
        # Some thread has just written the gold piece's column; its gradient is another one.
        tl.debug_barrier()
        tl.store(logits + label, tl.exp(at_label - top) * share - others - gold, counts)


@jit_function
def loss_rows_twice(
    logits, labels, smoothed, nll, row, gold, others, n_vocab, n_columns,
    BLOCK: constexpr, NEEDS_GRAD: constexpr,
):  # fmt: skip
    """Take a row of any precision and length: read it for its losses, and again for its gradient."""
    row_number = tl.program_id(0)
    label = tl.load(labels + row_number)
    counts = label >= 0
    logits += row_number.to(tl.int64) * row
    n_read = tl.where(counts, n_columns, 0)
    top = -1e30
    total = 0.0  # of exp(logit - top)
    sums = tl.zeros((BLOCK,), tl.float32)
    at_label = tl.load(logits + label, counts, 0.0).to(tl.float32)
    for start in range(0, n_read, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        # The number of columns allows wide loads, which the number of pieces might not.
        part = tl.load(logits + columns, columns < n_columns, 0.0).to(tl.float32)
        part = tl.where(columns < n_vocab, part, -float("inf"))
        new_top = tl.maximum(top, tl.max(part, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(part - new_top), 0)
        top = new_top
        sums += tl.where(columns < n_vocab, part, 0.0)
    total = tl.where(counts, total, 1.0)
    _store_losses(smoothed, nll, row_number, counts, at_label, top, total, sums, gold, others)
    if NEEDS_GRAD:
        for start in range(0, n_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            part = tl.load(logits + columns, columns < n_read, 0.0).to(tl.float32)
            part = tl.exp(part - top) / total - others - tl.where(columns == label, gold, 0.0)
            part = tl.where(counts & (columns < n_vocab), part, 0.0)
            tl.store(logits + columns, part, columns < n_columns)


def reads_once(logits: Tensor) -> bool:
    """Whether a row fits into a program's registers: without spills, by ahead-of-time compiles for
    sm_80 and sm_90, up to 49,152 columns of bf16; 65,536 would spill 300 bytes a thread."""
    is_paired = logits.dtype == torch.bfloat16 and logits.stride(0) % 2 == logits.shape[1] % 2 == 0
    return is_paired and logits.data_ptr() % 4 == 0 and logits.shape[1] <= WIDEST_ROW


def choose_parts(n_vocab: int, n_columns: int) -> tuple[int, int, int, int]:
    """Return how many pairs a part of a row holds, how many parts there are, how many of them have
    no padding, and how many warps a program gets."""
    pairs = min(MOST_PAIRS, triton.next_power_of_2(max(n_columns // 2, 64)))
    n_parts = triton.cdiv(n_columns, 2 * pairs)
    # each thread reads at least two pairs at a time
    warps = 16 if pairs == MOST_PAIRS else min(4, pairs // 64)
    return pairs, n_parts, n_vocab // (2 * pairs), warps


@torch.library.custom_op("nmt::loss_rows", mutates_args=("logits",))
def rows_in_place(
    logits: Tensor, labels: Tensor, gold: float, others: float, n_vocab: int, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return smoothed losses and NLL (C,); logits (C, V) become the gradient, if one is needed.

    The loss of a row is lse - gold * logit[label] - others * sum(logits). Columns from n_vocab on
    are padding: nothing depends on them, and their gradients are zero.
    """
    assert logits.stride(1) == 1, "a row's logits must lie side by side"
    smoothed, nll = _losses(logits, labels)
    n_rows, n_columns = logits.shape
    given = logits, labels, smoothed, nll, logits.stride(0), gold, others, n_vocab, n_columns
    if reads_once(logits):
        pairs, n_parts, full_parts, warps = choose_parts(n_vocab, n_columns)
        loss_rows_once[n_rows,](
            *given, pairs, n_parts, full_parts, needs_grad, num_warps=warps, enable_fp_fusion=True
        )
    else:
        block = min(4096, triton.next_power_of_2(n_vocab))
        warps = 8 if block == 4096 else 4
        loss_rows_twice[n_rows,](*given, block, needs_grad, num_warps=warps, enable_fp_fusion=True)
    return smoothed, nll


@rows_in_place.register_fake
def _losses(logits: Tensor, labels: Tensor, *_: float) -> tuple[Tensor, Tensor]:
    smoothed = logits.new_empty(labels.shape, dtype=torch.float32)
    return smoothed, torch.empty_like(smoothed)


@cache
def can_compute_loss(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel can be built and launched for such logits on this device."""
    logits = torch.zeros(1, 64, dtype=dtype, device=device)
    label = logits.new_zeros(1, dtype=torch.int64)
    return can_launch(lambda: rows_in_place(logits, label, 1.0, 0.0, 64, True))


def choose_chunk(n_rows: int) -> int:
    """Return how many rows each chunk has but the last, which may have fewer.

    There are as few as can be, because each reads and writes the gradients of all weights; so none
    is a small rest.
    """
    n_chunks = max(1, -(-n_rows // CHUNK_ROWS))
    return round_up(max(1, -(-n_rows // n_chunks)))


def fused_loss_forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, needs_grad: bool
) -> LossAndGradients:
    """(T, d), (V, d), (T,) -> smoothed sum, NLL sum, and the gradients of the smoothed sum by
    `hidden` and by `weight`.
    """
    n_vocab = weight.shape[0]
    others = smoothing / (n_vocab - 1)
    fast = find_product_type(weight)
    hidden = hidden.to(fast)
    weight_fast = F.pad(weight.to(fast), (0, 0, 0, -n_vocab % 64))  # which is faster
    # Not summed in place: code compiled by torch 2.11 would then return gradients of zero.
    smoothed = hidden.new_zeros((), dtype=torch.float32)
    nll = hidden.new_zeros((), dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden, dtype=torch.float32) if needs_grad else None
    grad_weight = torch.zeros_like(weight_fast, dtype=torch.float32) if needs_grad else None
    rows = choose_chunk(len(hidden))
    # Autocast may be on: both factors of each product have its type already.
    for first in range(0, len(hidden), rows):
        h, label = hidden[first : first + rows], labels[first : first + rows]
        logits = h @ weight_fast.T  # (C, V)
        losses = rows_in_place(logits, label, 1.0 - smoothing - others, others, n_vocab, needs_grad)
        smoothed = smoothed + losses[0].sum()
        nll = nll + losses[1].sum()
        if grad_hidden is not None and grad_weight is not None:
            grad_hidden[first : first + rows] = logits @ weight_fast
            # Not addmm, which wants the sum in the precision of the factors.
            grad_weight += logits.T @ h
        del logits  # the next chunk's take its memory
    if grad_weight is not None:
        grad_weight = grad_weight[:n_vocab]
    return smoothed, nll, grad_hidden, grad_weight
