"""Attention over packed sentences as GPU kernels: what `attention.attend` computes, without a grid and without padding.

One program takes a block of queries (backward: of keys) of one sentence and head and goes over the other side in blocks
with the online softmax; at translation lengths that is one block. Weights are recomputed from the saved log-sum-exp.
Each element is written by one program, without atomics, so results repeat to the bit; the dead tail is never read and
its results are zero. The ops are opaque to the compiler, and nothing waits for the device. Section 3.2 of the paper.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the plain path needs none of it
    triton = tl = constexpr = None

kernel = triton.jit if triton is not None else lambda function: function
IS_INTERPRETED = triton is not None and triton.knobs.runtime.interpret  # Triton itself reads it but once
WIDEST = 128  # the accumulators of a wider head do not fit in a program's registers


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether `packed_attention` takes such heads; if not, `attention.attend` does."""
    return (triton is not None and (q.is_cuda or IS_INTERPRETED) and q.dtype == v.dtype
            and q.dtype in (torch.float32, torch.bfloat16) and max(q.shape[-1], v.shape[-1]) <= WIDEST)


@kernel
def _load(base, places, n, row, SIZE: constexpr, ROOM: constexpr):
    """Rows of a sentence; beyond its end they are zero, whatever stands there."""  # (BLOCK, ROOM)
    columns = tl.arange(0, ROOM)[None, :]
    return tl.load(base + places[:, None] * row + columns, (places[:, None] < n) & (columns < SIZE), 0.0)


@kernel
def _store(base, places, n, row, rows, SIZE: constexpr, ROOM: constexpr):
    columns = tl.arange(0, ROOM)[None, :]
    tl.store(base + places[:, None] * row + columns, rows, (places[:, None] < n) & (columns < SIZE))


@kernel
def _clear(rows, offsets, n_sentences, n_cells, WIDTH: constexpr, BLOCK: constexpr):
    """Zeros in the rows from the last offset on."""
    begin = tl.load(offsets + n_sentences).to(tl.int64) * WIDTH
    for start in range(begin + tl.program_id(0) * BLOCK, n_cells, tl.num_programs(0) * BLOCK):
        cells = start + tl.arange(0, BLOCK)
        tl.store(rows + cells, tl.zeros((BLOCK,), tl.float32), cells < n_cells)


@kernel
def _bounds(offsets, sentence):
    begin = tl.load(offsets + sentence).to(tl.int64)
    return begin, (tl.load(offsets + sentence + 1) - begin).to(tl.int32)


@kernel
def _may(i, j, n_queries, n_keys, CAUSAL: constexpr, WINDOW: constexpr):
    """Whether the query at place i looks at the key at place j."""
    may = (i < n_queries) & (j < n_keys)
    if CAUSAL:
        may = may & (j <= i)
    if WINDOW is not None:
        may = may & (j - i <= WINDOW) & (i - j <= WINDOW)
    return may


@kernel
def _product(a, b, c=None):
    return tl.dot(a, b, c, input_precision="ieee")  # fp32 is the reference, so never TF32


@kernel
def _forward(q, k, v, out, lse, q_offsets, k_offsets, n_heads, q_row, q_head, k_row, k_head, v_row, v_head, scale,
             K: constexpr, V: constexpr, K_ROOM: constexpr, V_ROOM: constexpr, BLOCK: constexpr, CAUSAL: constexpr,
             WINDOW: constexpr):
    """A block of queries: what they see, and the log2-sum-exp2 of their scores."""
    sentence, head, first = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads, tl.program_id(1) * BLOCK
    begin, n_queries = _bounds(q_offsets, sentence)
    k_begin, n_keys = _bounds(k_offsets, sentence)
    if first >= n_queries:
        return
    queries = first + tl.arange(0, BLOCK)
    q_block = _load(q + begin * q_row + head * q_head, queries, n_queries, q_row, K, K_ROOM)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed = tl.zeros((BLOCK, V_ROOM), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, n_keys) if CAUSAL else n_keys, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        may = _may(queries[:, None], keys[None, :], n_queries, n_keys, CAUSAL, WINDOW)
        k_block = _load(k + k_begin * k_row + head * k_head, keys, n_keys, k_row, K, K_ROOM)
        v_block = _load(v + k_begin * v_row + head * v_head, keys, n_keys, v_row, V, V_ROOM)
        scores = tl.where(may, _product(q_block, tl.trans(k_block)) * scale, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(may, tl.exp2(scores - new_top[:, None]), 0.0)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        mixed = _product(weights.to(v_block.dtype), v_block, mixed * fade[:, None])
        top = new_top
    top = tl.where(total > 0.0, top, 0.0)
    total = tl.where(total > 0.0, total, 1.0)  # a query that sees nothing gives zeros
    _store(out + (begin * n_heads + head) * V, queries, n_queries, n_heads * V, mixed / total[:, None], V, V_ROOM)
    tl.store(lse + (begin + queries) * n_heads + head, top + tl.log2(total), queries < n_queries)


@kernel
def _backward(q, k, v, out, lse, grad, grad_q, grad_k, grad_v, q_offsets, k_offsets, n_heads, q_row, q_head, k_row,
              k_head, v_row, v_head, scale, K: constexpr, V: constexpr, K_ROOM: constexpr, V_ROOM: constexpr,
              BLOCK: constexpr, CAUSAL: constexpr, WINDOW: constexpr, IS_ALONE: constexpr):
    """A block of keys: the gradients of k and v. IS_ALONE: no sentence has a second one, so also that of q."""
    sentence, head, first = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads, tl.program_id(1) * BLOCK
    begin, n_queries = _bounds(q_offsets, sentence)
    k_begin, n_keys = _bounds(k_offsets, sentence)
    if not IS_ALONE and first >= n_keys:
        return
    keys = first + tl.arange(0, BLOCK)
    k_block = _load(k + k_begin * k_row + head * k_head, keys, n_keys, k_row, K, K_ROOM)
    v_block = _load(v + k_begin * v_row + head * v_head, keys, n_keys, v_row, V, V_ROOM)
    of_k = tl.zeros((BLOCK, K_ROOM), tl.float32)
    of_v = tl.zeros((BLOCK, V_ROOM), tl.float32)
    for start in range(first if CAUSAL else 0, n_queries, BLOCK):
        queries = start + tl.arange(0, BLOCK)
        may = _may(queries[None, :], keys[:, None], n_queries, n_keys, CAUSAL, WINDOW)  # keys down, queries across
        q_block = _load(q + begin * q_row + head * q_head, queries, n_queries, q_row, K, K_ROOM)
        g_block = _load(grad + (begin * n_heads + head) * V, queries, n_queries, n_heads * V, V, V_ROOM)
        o_block = _load(out + (begin * n_heads + head) * V, queries, n_queries, n_heads * V, V, V_ROOM)
        mean = tl.sum(g_block.to(tl.float32) * o_block.to(tl.float32), 1)
        log_total = tl.load(lse + (begin + queries) * n_heads + head, queries < n_queries, 0.0)
        weights = tl.where(may, tl.exp2(_product(k_block, tl.trans(q_block)) * scale - log_total[None, :]), 0.0)
        of_v = _product(weights.to(v_block.dtype), g_block, of_v)
        of_scores = weights * (_product(v_block, tl.trans(g_block)) - mean[None, :])
        of_scores = of_scores.to(q_block.dtype)
        of_k = _product(of_scores, q_block, of_k)
        if IS_ALONE:
            of_q = _product(tl.trans(of_scores), k_block) * (scale * 0.6931471805599453)
            _store(grad_q + (begin * n_heads + head) * K, queries, n_queries, n_heads * K, of_q, K, K_ROOM)
    of_k *= scale * 0.6931471805599453  # `scale` counts in powers of two, gradients do not
    _store(grad_k + (k_begin * n_heads + head) * K, keys, n_keys, n_heads * K, of_k, K, K_ROOM)
    _store(grad_v + (k_begin * n_heads + head) * V, keys, n_keys, n_heads * V, of_v, V, V_ROOM)


@kernel
def _backward_q(q, k, v, out, lse, grad, grad_q, q_offsets, k_offsets, n_heads, q_row, q_head, k_row, k_head, v_row,
                v_head, scale, K: constexpr, V: constexpr, K_ROOM: constexpr, V_ROOM: constexpr, BLOCK: constexpr,
                CAUSAL: constexpr, WINDOW: constexpr):
    """A block of queries: their gradient, where a sentence may have many blocks of keys."""
    sentence, head, first = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads, tl.program_id(1) * BLOCK
    begin, n_queries = _bounds(q_offsets, sentence)
    k_begin, n_keys = _bounds(k_offsets, sentence)
    if first >= n_queries:
        return
    queries = first + tl.arange(0, BLOCK)
    q_block = _load(q + begin * q_row + head * q_head, queries, n_queries, q_row, K, K_ROOM)
    g_block = _load(grad + (begin * n_heads + head) * V, queries, n_queries, n_heads * V, V, V_ROOM)
    o_block = _load(out + (begin * n_heads + head) * V, queries, n_queries, n_heads * V, V, V_ROOM)
    mean = tl.sum(g_block.to(tl.float32) * o_block.to(tl.float32), 1)
    log_total = tl.load(lse + (begin + queries) * n_heads + head, queries < n_queries, 0.0)
    of_q = tl.zeros((BLOCK, K_ROOM), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, n_keys) if CAUSAL else n_keys, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        may = _may(queries[:, None], keys[None, :], n_queries, n_keys, CAUSAL, WINDOW)
        k_block = _load(k + k_begin * k_row + head * k_head, keys, n_keys, k_row, K, K_ROOM)
        v_block = _load(v + k_begin * v_row + head * v_head, keys, n_keys, v_row, V, V_ROOM)
        weights = tl.where(may, tl.exp2(_product(q_block, tl.trans(k_block)) * scale - log_total[:, None]), 0.0)
        of_scores = weights * (_product(g_block, tl.trans(v_block)) - mean[:, None])
        of_q = _product(of_scores.to(k_block.dtype), k_block, of_q)
    of_q *= scale * 0.6931471805599453
    _store(grad_q + (begin * n_heads + head) * K, queries, n_queries, n_heads * K, of_q, K, K_ROOM)


def _plan(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, longest: int, causal: bool,
          window: int | None) -> tuple[list[Any], int, int]:
    """The arguments that all kernels share, after their tensors; the size of a block; the warps of a program."""
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "a head's numbers must lie side by side"
    sizes = q.shape[2], v.shape[2]
    rooms = [max(16, triton.next_power_of_2(size)) for size in sizes]
    block = 64 if longest > 32 and max(rooms) <= 64 and q.dtype == torch.bfloat16 else 32  # as registers allow
    scale = q.shape[2] ** -0.5 * 1.4426950408889634  # exp2 is the instruction that there is
    return [q_offsets, k_offsets, q.shape[1], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], scale, *sizes, *rooms,
            block, causal, window], block, 8 if max(rooms) > 64 else 4


def _clear_tails(*pairs: tuple[Tensor, Tensor]) -> None:
    for rows, offsets in pairs:
        _clear[64,](rows, offsets, offsets.numel() - 1, rows.numel(), rows.shape[1:].numel(), 1024)


@torch.library.custom_op("nmt::packed_attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, longest_q: int, longest_k: int,
               causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(q, k, v)
    shared, block, n_warps = _plan(q, k, v, q_offsets, k_offsets, max(longest_q, longest_k), causal, window)
    n_pairs = (q_offsets.numel() - 1) * q.shape[1]  # of sentence and head
    _forward[n_pairs, triton.cdiv(longest_q, block)](q, k, v, out, lse, *shared, num_warps=n_warps, num_stages=2)
    _clear_tails((out, q_offsets), (lse, q_offsets))
    return out, lse


@_attention.register_fake
def _outputs(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("nmt::packed_attention_backward", mutates_args=())
def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor,
               k_offsets: Tensor, longest_q: int, longest_k: int, causal: bool,
               window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty_gradients(grad, q, k, v)
    shared, block, n_warps = _plan(q, k, v, q_offsets, k_offsets, max(longest_q, longest_k), causal, window)
    n_pairs, k_blocks = (q_offsets.numel() - 1) * q.shape[1], max(1, triton.cdiv(longest_k, block))
    known = q, k, v, out, lse, grad.contiguous()
    _backward[n_pairs, k_blocks](*known, *grads, *shared, k_blocks == 1, num_warps=n_warps, num_stages=2)
    if k_blocks > 1:
        _backward_q[n_pairs, triton.cdiv(longest_q, block)](*known, grads[0], *shared, num_warps=n_warps, num_stages=2)
    _clear_tails((grads[0], q_offsets), (grads[1], k_offsets), (grads[2], k_offsets))
    return grads


@_gradients.register_fake
def _empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, k_offsets, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, q_offsets, k_offsets)
    ctx.set_materialize_grads(False)  # or zeros would be made for the log-sum-exp, which nobody differentiates


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_gradients(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 6


_attention.register_autograd(_differentiate, setup_context=_remember)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, longest_q: int,
                     longest_k: int, causal: bool, window: int | None) -> Tensor:
    """softmax(q k^T / sqrt(d_k)) v within each sentence: (Tq, H, K), (Tk, H, K), (Tk, H, V) -> (Tq, H, V).

    Offsets (S + 1,) begin with 0. `longest_q` and `longest_k` may be more than is there, never less.
    """
    return _attention(q, k, v, q_offsets, k_offsets, longest_q, longest_k, causal, window)[0]
