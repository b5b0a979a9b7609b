"""Attention over packed sentences as two GPU kernels, one forward and one backward: section 3.2 of the paper.

Rows lie end to end, so a query attends to an interval of key rows, and the queries that attend to a key
are an interval of query rows: causal masks, windows and the bounds of sentences are all the same to the
kernels. A program takes a tile of consecutive rows and one head; the grid follows from the number of
rows alone, never from lengths. The backward pass recomputes scores from the saved log-sum-exp, and with
dropout also which of them were dropped. Each element is written by one program without atomics, so
results repeat to the bit. A row that attends to nothing gives zeros, even if it holds NaN. The ops are
opaque to torch.compile, and nothing waits for the device.

Why kernels of our own: torch's for sentences of several lengths (varlen_attn) takes heads in 16 bits
only and keys and values of one size, and adds up gradients in no fixed order. These take fp32, every
row of Table 3 and windows, repeat their bits, and become part of the one recorded graph.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.engines.cuda.kernels import IS_INTERPRETED, can_launch, constexpr, jit_function, tl, triton
from nmt.model.dropout_masks import count_dropped, draw_seed

WIDEST_HEAD = 128  # the accumulators of a wider head do not fit in a program's registers
# Otherwise Triton recompiles when they are 1 or a multiple of 16
ROW_COUNTS = ("n_queries", "n_keys")


def jit_kernel(function):
    """As `jit_function`, for a kernel that is launched from Python."""
    return function if triton is None else triton.jit(function, do_not_specialize=ROW_COUNTS)


def supports_triton(q: Tensor, v: Tensor) -> bool:
    """Whether `triton_attention` supports these heads; if not, `attention.attend` uses the padded path."""
    has_device = triton is not None and (q.is_cuda or IS_INTERPRETED)
    has_dtype = q.dtype == v.dtype and q.dtype in (torch.float32, torch.bfloat16)
    if not has_device or not has_dtype or max(q.shape[-1], v.shape[-1]) > WIDEST_HEAD:
        return False
    # What is compiled was tried before (recorded_replica.py); a trial cannot be traced.
    is_tried = torch.compiler.is_compiling()
    return is_tried or can_attend(q.device, q.dtype, q.shape[-1], v.shape[-1])


@jit_function
def _find_rows(base, first, row_stride, is_used, SIZE: constexpr, PADDED: constexpr):
    """Return the addresses of rows, starting at `first`, and which of their elements are in use."""
    columns = tl.arange(0, PADDED)[None, :]
    offsets = tl.arange(0, is_used.shape[0])[:, None] * row_stride + columns
    mask = is_used[:, None]
    if PADDED != SIZE:
        mask = mask & (columns < SIZE)
    return base + tl.cast(first, tl.int64) * row_stride + offsets, mask  # (rows, PADDED)


@jit_function
def _load_rows(base, first, row_stride, is_read, SIZE: constexpr, PADDED: constexpr):
    """Load rows; one whose `is_read` is false is all zeros."""
    places, mask = _find_rows(base, first, row_stride, is_read, SIZE, PADDED)
    return tl.load(places, mask, 0.0)


@jit_function
def _store_rows(base, first, row_stride, is_written, rows, SIZE: constexpr, PADDED: constexpr):
    places, mask = _find_rows(base, first, row_stride, is_written, SIZE, PADDED)
    tl.store(places, rows, mask)


@jit_function
def _load_intervals(intervals, begin, n_rows, SIZE: constexpr):
    """Return the numbers of SIZE rows, and of each the first row on the other side and one past the last.

    Rows past the end have 0, 0.
    """
    rows = begin + tl.arange(0, SIZE)
    first = tl.load(intervals + rows, rows < n_rows, 0)
    last = tl.load(intervals + n_rows + rows, rows < n_rows, 0)
    return rows, first, last


@jit_function
def _hull(first, last):
    """Return the smallest interval that contains every nonempty one; the tile visits no block outside it."""
    begin = tl.min(tl.where(first < last, first, 2147483647), 0)
    end = tl.max(tl.where(first < last, last, 0), 0)
    return begin, end


@jit_function
def _contains(first, last, others):
    """Whether the interval of each row contains each row of the other side: (TILE, BLOCK)."""
    return (first[:, None] <= others[None, :]) & (others[None, :] < last[:, None])


@jit_function
def _load_gradients(grad, out, first, width, is_read, V: constexpr, V_PADDED: constexpr):
    """Load the gradients of rows of the output, and the product of each row with its gradient."""
    grad_out = _load_rows(grad, first, width, is_read, V, V_PADDED)
    output = _load_rows(out, first, width, is_read, V, V_PADDED)
    return grad_out, tl.sum(grad_out.to(tl.float32) * output.to(tl.float32), 1)


@jit_function
def _product(a, b, c=None):
    return tl.dot(a, b, c, input_precision="ieee")  # fp32 is the reference, so never TF32


@jit_function
def _mix(x):
    """Return a hash of 32 bits, that of dropout_masks.py."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit_function
def _draw_factors(seed, cells, DROPPED: constexpr):
    """Draw the factors of weights as dropout_masks.py does for all weights (Tq, H, Tk) of a call.

    From one seed the CPU draws others, because it numbers the cells of padded groups of sentences,
    which are unknown here. Beyond 2^32, numbers begin again.
    """
    bits = tl.load(seed)
    x = cells.to(tl.uint32) * 0x9E3779B9 + bits.to(tl.uint32)
    x = _mix(_mix(x) + (bits >> 32).to(tl.uint32))
    return tl.where(x >= DROPPED, 4294967296.0 / (4294967296 - DROPPED), 0.0)


@jit_kernel
def attention_forward(
    q, k, v, key_intervals, query_intervals, seed, out, lse, n_queries, n_keys, n_heads,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, scale,
    K: constexpr, V: constexpr, K_PADDED: constexpr, V_PADDED: constexpr,
    TILE: constexpr, BLOCK: constexpr, DROPPED: constexpr,
):  # fmt: skip
    """Compute the attention output of a tile of queries, and log2(sum(exp2(scores))) of each.

    The softmax is online, so that no row of scores is ever stored whole: `highest` is the highest
    score so far, `total` the sum of 2^(score - highest), and `rescale` corrects the sums of the
    earlier blocks when `highest` rises.
    """
    start, head = tl.program_id(0) * TILE, tl.program_id(1)
    rows, first, last = _load_intervals(key_intervals, start, n_queries, TILE)
    exists = rows < n_queries
    begin, end = _hull(first, last)
    first_cells = (rows * n_heads + head) * n_keys
    queries = _load_rows(q + head * q_head_stride, start, q_row_stride, exists, K, K_PADDED)
    # Not -inf: a query that has met no key yet would compute -inf - -inf, which is NaN.
    highest = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    output = tl.zeros((TILE, V_PADDED), tl.float32)
    for block in range(begin, end, BLOCK):
        others, key_first, key_last = _load_intervals(query_intervals, block, n_keys, BLOCK)
        # A key to which no query attends may hold NaN, and 0 * NaN would enter the sum of values.
        is_seen = key_first < key_last
        is_visible = _contains(first, last, others)
        keys = _load_rows(
            k + head * k_head_stride, block, k_row_stride, others < n_keys, K, K_PADDED
        )
        scores = tl.where(is_visible, _product(queries, tl.trans(keys)) * scale, -1e30)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # `where` again: as long as `highest` is -1e30, a forbidden score gives 2^0.
        weights = tl.where(is_visible, tl.exp2(scores - new_highest[:, None]), 0.0)
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        if DROPPED:
            weights *= _draw_factors(seed, first_cells[:, None] + others[None, :], DROPPED)
        values = _load_rows(v + head * v_head_stride, block, v_row_stride, is_seen, V, V_PADDED)
        output = _product(weights.to(values.dtype), values, output * rescale[:, None])
        highest = new_highest
    has_keys = first < last
    highest = tl.where(has_keys, highest, 0.0)
    total = tl.where(has_keys, total, 1.0)  # a query without keys gives zeros
    width = n_heads * V
    output = output / total[:, None]
    _store_rows(out + head * V, start, width, exists, output, V, V_PADDED)
    tl.store(lse + rows * n_heads + head, highest + tl.log2(total), exists)


@jit_function
def _differentiate_queries(
    q, k, v, key_intervals, query_intervals, seed, out, lse, grad, grad_q, n_queries, n_keys, n_heads,
    q_row_stride, k_row_stride, v_row_stride, scale, start, head,
    K: constexpr, V: constexpr, K_PADDED: constexpr, V_PADDED: constexpr,
    TILE: constexpr, BLOCK: constexpr, DROPPED: constexpr, Q_WIDTH: constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of queries; stored weights would take memory quadratic in the lengths."""
    rows, first, last = _load_intervals(key_intervals, start, n_queries, TILE)
    exists = rows < n_queries
    begin, end = _hull(first, last)
    first_cells = (rows * n_heads + head) * n_keys
    width = n_heads * V
    queries = _load_rows(q, start, q_row_stride, exists, K, K_PADDED)
    # The gradient of a score is weight * (gradient of the weight - their mean), and the mean over
    # all keys equals the product of the output and its gradient: no first pass over the keys is
    # needed.
    grad_out, mean = _load_gradients(grad, out, start, width, exists, V, V_PADDED)
    log_total = tl.load(lse + rows * n_heads + head, exists, 0.0)
    grad_queries = tl.zeros((TILE, K_PADDED), tl.float32)
    for block in range(begin, end, BLOCK):
        others, key_first, key_last = _load_intervals(query_intervals, block, n_keys, BLOCK)
        is_seen = key_first < key_last
        is_visible = _contains(first, last, others)
        keys = _load_rows(k, block, k_row_stride, is_seen, K, K_PADDED)
        values = _load_rows(v, block, v_row_stride, is_seen, V, V_PADDED)
        weights = tl.exp2(_product(queries, tl.trans(keys)) * scale - log_total[:, None])
        grad_weights = _product(grad_out, tl.trans(values))
        if DROPPED:
            grad_weights *= _draw_factors(seed, first_cells[:, None] + others[None, :], DROPPED)
        grad_weights -= mean[:, None]
        grad_scores = tl.where(is_visible, weights * grad_weights, 0.0)
        grad_queries = _product(grad_scores.to(keys.dtype), keys, grad_queries)
    grad_queries *= scale * 0.6931471805599453  # `scale` includes log2(e), so multiply by ln(2)
    _store_rows(grad_q + head * K, start, n_heads * Q_WIDTH, exists, grad_queries, K, K_PADDED)


@jit_function
def _differentiate_keys(
    q, k, v, key_intervals, query_intervals, seed, out, lse, grad, grad_k, grad_v,
    n_queries, n_keys, n_heads, q_row_stride, k_row_stride, v_row_stride, scale, start, head,
    K: constexpr, V: constexpr, K_PADDED: constexpr, V_PADDED: constexpr,
    TILE: constexpr, BLOCK: constexpr, DROPPED: constexpr, KV_WIDTH: constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and of their values."""
    rows, first, last = _load_intervals(query_intervals, start, n_keys, TILE)
    exists = rows < n_keys
    begin, end = _hull(first, last)
    width = n_heads * V
    keys = _load_rows(k, start, k_row_stride, exists, K, K_PADDED)
    values = _load_rows(v, start, v_row_stride, exists, V, V_PADDED)
    grad_keys = tl.zeros((TILE, K_PADDED), tl.float32)
    grad_values = tl.zeros((TILE, V_PADDED), tl.float32)
    for block in range(begin, end, BLOCK):
        others, query_first, query_last = _load_intervals(key_intervals, block, n_queries, BLOCK)
        has_keys = query_first < query_last
        is_visible = _contains(first, last, others)
        # A query without keys may hold NaN, and 0 * NaN would enter the gradients of the keys.
        queries = _load_rows(q, block, q_row_stride, has_keys, K, K_PADDED)
        grad_out, mean = _load_gradients(grad, out, block, width, has_keys, V, V_PADDED)
        log_total = tl.load(lse + others * n_heads + head, has_keys, 0.0)
        # Keys down, queries across: the sums over queries are then products without a transpose.
        weights = tl.exp2(_product(keys, tl.trans(queries)) * scale - log_total[None, :])
        weights = tl.where(is_visible, weights, 0.0)  # (TILE, BLOCK)
        kept = weights
        if DROPPED:
            first_cells = (others * n_heads + head) * n_keys
            factors = _draw_factors(seed, first_cells[None, :] + rows[:, None], DROPPED)
            kept = weights * factors
        grad_values = _product(kept.to(grad_out.dtype), grad_out, grad_values)
        grad_weights = _product(values, tl.trans(grad_out))
        if DROPPED:
            grad_weights *= factors
        grad_weights -= mean[None, :]
        grad_scores = tl.where(is_visible, weights * grad_weights, 0.0)
        grad_keys = _product(grad_scores.to(queries.dtype), queries, grad_keys)
    grad_keys *= scale * 0.6931471805599453
    _store_rows(grad_k + head * K, start, n_heads * KV_WIDTH, exists, grad_keys, K, K_PADDED)
    _store_rows(grad_v + head * V, start, n_heads * KV_WIDTH, exists, grad_values, V, V_PADDED)


@jit_kernel
def attention_backward(
    q, k, v, key_intervals, query_intervals, seed, out, lse, grad, grad_q, grad_k, grad_v,
    n_queries, n_keys, n_heads,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, scale,
    K: constexpr, V: constexpr, K_PADDED: constexpr, V_PADDED: constexpr,
    TILE: constexpr, BLOCK: constexpr, DROPPED: constexpr,
    # elements of a head in a row of the gradients, with those that lie beside them
    Q_WIDTH: constexpr, KV_WIDTH: constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of keys or of one tile of queries.

    One launch for both fills the GPU better than two. A tile of keys takes four products a block and a
    tile of queries three, so keys start first and no long program is left alone at the end.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    key_tiles = tl.cdiv(n_keys, TILE)
    q += head * q_head_stride
    k += head * k_head_stride
    v += head * v_head_stride
    out += head * V
    grad += head * V
    if tile < key_tiles:
        _differentiate_keys(
            q, k, v, key_intervals, query_intervals, seed, out, lse, grad, grad_k, grad_v,
            n_queries, n_keys, n_heads,
            q_row_stride, k_row_stride, v_row_stride, scale, tile * TILE, head, K, V, K_PADDED, V_PADDED,
            TILE, BLOCK, DROPPED, KV_WIDTH)  # fmt: skip
    else:
        _differentiate_queries(
            q, k, v, key_intervals, query_intervals, seed, out, lse, grad, grad_q,
            n_queries, n_keys, n_heads,
            q_row_stride, k_row_stride, v_row_stride, scale, (tile - key_tiles) * TILE, head, K, V, K_PADDED, V_PADDED,
            TILE, BLOCK, DROPPED, Q_WIDTH)  # fmt: skip


class KernelShape(NamedTuple):
    """How a kernel divides its work: rows of a program's tile, rows of the other side at a time, warps."""

    tile: int
    block: int
    warps: int


def choose_kernel_shape(dtype: torch.dtype, padded_size: int, is_backward: bool) -> KernelShape:
    """Return the shape with the most active warps among those without register spills.

    The candidates were compiled ahead of time for sm_80 and sm_90 (`make gpu-dry`).
    """
    if dtype == torch.float32:
        return KernelShape(32, 16, 4 if padded_size + 32 * is_backward <= 64 else 8)
    if padded_size <= 64:
        return KernelShape(64, 32, 4)
    return KernelShape(32, 32, 8) if is_backward else KernelShape(64, 16, 8)


class Launch(NamedTuple):
    """The launch arguments that follow the tensors, for either kernel."""

    scalars: list[Any]
    tile: int
    options: dict[str, int]


def _plan(q: Tensor, k: Tensor, v: Tensor, dropped: int, is_backward: bool) -> Launch:
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, (
        "the last dimension of queries, keys and values must be contiguous"
    )
    sizes = q.shape[2], v.shape[2]
    # tl.arange takes powers of two only, and tl.dot no dimension below 16
    padded_sizes = [max(16, triton.next_power_of_2(size)) for size in sizes]
    shape = choose_kernel_shape(q.dtype, max(padded_sizes), is_backward)
    scale = q.shape[2] ** -0.5 * 1.4426950408889634  # log2(e), because the hardware only has exp2
    scalars = [
        len(q),
        len(k),
        q.shape[1],
        *strides,
        scale,
        *sizes,
        *padded_sizes,
        shape.tile,
        shape.block,
        dropped,
    ]
    # named, because later versions of Triton do not fuse multiply-adds by default
    options = {"num_warps": shape.warps, "num_stages": 2, "enable_fp_fusion": True}
    return Launch(scalars, shape.tile, options)


@torch.library.custom_op("nmt::packed_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, key_intervals: Tensor, query_intervals: Tensor,
    seed: Tensor | None, dropped: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = _empty_outputs(q, k, v)
    launch = _plan(q, k, v, dropped, is_backward=False)
    tiles = triton.cdiv(len(q), launch.tile)
    if tiles:  # CUDA refuses an empty grid
        tensors = q, k, v, key_intervals, query_intervals, seed, out, lse
        attention_forward[tiles, q.shape[1]](*tensors, *launch.scalars, **launch.options)
    return out, lse


@_attention.register_fake
def _empty_outputs(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return q.new_empty(*q.shape[:2], v.shape[2]), lse


@torch.library.custom_op("nmt::packed_attention_backward", mutates_args=())
def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_intervals: Tensor, query_intervals: Tensor,
    seed: Tensor | None, out: Tensor, lse: Tensor, dropped: int,
) -> list[Tensor]:  # fmt: skip
    joint = _empty_gradients(grad, q, k, v)
    grads = _cut(joint, q, k, v)
    widths = [x.stride(0) // q.shape[1] for x in grads[:2]]  # values lie beside keys
    launch = _plan(q, k, v, dropped, is_backward=True)
    tiles = triton.cdiv(len(q), launch.tile) + triton.cdiv(len(k), launch.tile)
    inputs = q, k, v, key_intervals, query_intervals, seed, out, lse, grad.contiguous()
    if tiles:
        attention_backward[tiles, q.shape[1]](
            *inputs, *grads, *launch.scalars, *widths, **launch.options
        )
    return joint


@_gradients.register_fake
def _empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> list[Tensor]:
    """Allocate gradients as the model's products have them: keys and values, or all three, are cut from
    one. Those of such parts lie side by side, so that nothing has to bring them together.
    """
    n_queries, n_heads, size = q.shape
    n_keys = k.shape[0]
    keys_values = n_heads * (size + v.shape[2])
    if n_queries == n_keys and q.stride(0) == k.stride(0):
        return [q.new_empty(n_queries, n_heads * size + keys_values)]
    return [q.new_empty(n_queries, n_heads * size), k.new_empty(n_keys, keys_values)]


def _cut(joint: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Cut the gradients of queries, keys and values from what `_gradients` returns."""
    widths = [x.shape[1] * x.shape[2] for x in (q, k, v)]
    *own, rest = joint
    parts = *own, *rest.split(widths[len(own) :], 1)
    return [part.view(x.shape) for part, x in zip(parts, (q, k, v), strict=True)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.dropped = inputs
    ctx.save_for_backward(*tensors, *output)
    # Otherwise autograd would allocate zeros as the gradient of the log-sum-exp, which nothing
    # uses.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    joint = _gradients(grad, *ctx.saved_tensors, ctx.dropped)
    return *_cut(joint, *ctx.saved_tensors[:3]), None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save_for_backward)


@cache
def can_attend(device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> bool:
    """Whether both kernels can be built and launched for such heads on this device."""
    q, v = (torch.zeros(1, 1, n, dtype=dtype, device=device) for n in (key_size, value_size))
    row = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    inputs = q, q, v, row, row, None
    return can_launch(lambda: _gradients(v, *inputs, *_attention(*inputs, 0), 0))


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, key_intervals: Tensor, query_intervals: Tensor,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute softmax(q k^T / sqrt(d_k)) v, each query over its interval of keys. Each weight is dropped
    with probability `dropout`.

    The shapes are (Tq, H, K), (Tk, H, K), (Tk, H, V) -> (Tq, H, V).
    `key_intervals` (2, Tq) int32 holds for each query the first key row it attends to and one past the last;
    `query_intervals` (2, Tk) int32 holds the same relation from the keys' side. Over the rows with nonempty
    intervals, neither end ever decreases. A row whose interval is empty gives exact zeros.
    """
    assert key_intervals.dtype == query_intervals.dtype == torch.int32, (
        "key_intervals and query_intervals must be int32"
    )
    dropped = count_dropped(dropout)
    # A tensor, because a recorded graph draws another seed at each replay.
    seed = draw_seed(q.device) if dropped else None
    return _attention(q, k, v, key_intervals, query_intervals, seed, dropped)[0]
