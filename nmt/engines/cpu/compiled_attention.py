"""Attention over packed sentences in training on the CPU, forward and backward, as one compiled loop.

One sentence's head at a time is copied into small matrices of fp32, which stay in a core's own cache
through all products and the softmax. So nothing is padded to other sentences' length, and no weights are
kept for the backward pass, which computes them again. Threads share the sentences. A result depends on
its own sentence alone, to the last bit.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.engines.cpu import compiled_rows
from nmt.engines.cpu.compiled_code import make_compiler
from nmt.engines.cpu.compiled_products import Floats, exp
from nmt.engines.cpu.compiled_rows import MASKED, narrow, share, view_numbers, widen
from nmt.engines.cpu.compiled_tiles import (
    LANES,
    NARROW_TILE_ROWS,
    multiply_block,
    point_at,
    transpose_block,
)
from nmt.model.attention_mask import AttentionMask

ATTENTION_FILES = (__file__, *compiled_rows.ROW_FILES)
compile_attention = make_compiler(*ATTENTION_FILES)
Starts = np.ndarray[Any, np.dtype[np.int64]]
UNLIMITED = 1 << 30
NO_ROTATION = np.empty((0, 0), np.float32)


class Heads(NamedTuple):
    """Packed rows (T, H, D) of a wider matrix, in fp32 or as the bits of bf16."""

    numbers: Any  # of the matrix, from the first of these on
    stride: int  # from one row to the next
    n: int  # H
    size: int  # D


class SentenceSpans(NamedTuple):
    """Which rows belong to which sentence, how far a query sees (places ahead and behind), and the angles by
    which queries and keys are rotated first.
    """

    query_starts: Starts  # (S + 1,)
    key_starts: Starts  # (S + 1,)
    most_queries: int  # of a sentence
    most_keys: int
    ahead: int
    behind: int
    rotation: Floats  # (T, D): sines and cosines of each row; without rows nothing is rotated


# ---- what numba compiles -------------------------------------------------------------------------


@compile_attention
def round_up_to(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


@compile_attention
def new_matrix(n_rows: int, n_columns: int) -> Floats:
    """Make a matrix of whole blocks, with at least this many rows and columns.

    A product writes whole blocks too: beyond its rows and columns is padding, which is never read, and, since
    heads are computed in order, what the next head overwrites. After the last head there is a block more.
    """
    return np.empty((round_up_to(n_rows, LANES), round_up_to(n_columns, LANES) + LANES), np.float32)


@compile_attention
def find_row(heads: Heads, row: int) -> Any:
    """Return the numbers of all heads of a row."""
    start = row * heads.stride
    return heads.numbers[start : start + heads.n * heads.size]


@compile_attention
def load_rows(heads: Heads, first: int, n: int, factor: Any, to: Floats) -> None:
    """Copy rows, with all heads, into the first ones of a matrix."""
    for row in range(n):
        source = find_row(heads, first + row)
        target = to[row]
        for i in range(len(source)):
            target[i] = widen(source[i]) * factor


@compile_attention
def rotate_rows(
    matrix: Floats, heads: Heads, first: int, n: int, angles: Floats, sign: Any
) -> None:
    """Rotate the first rows of a matrix by the angles of rows from `first` on, or back with -1."""
    half = heads.size // 2
    for row in range(n if len(angles) else 0):
        sines, cosines = angles[first + row, :half], angles[first + row, half:]
        for start in range(0, heads.n * heads.size, heads.size):
            x, y = matrix[row, start : start + half], matrix[row, start + half : start + 2 * half]
            for i in range(half):
                sine = sines[i] * sign
                x[i], y[i] = x[i] * cosines[i] - y[i] * sine, y[i] * cosines[i] + x[i] * sine


@compile_attention
def store_rows(matrix: Floats, heads: Heads, first: int, n: int, factor: Any) -> None:
    """Copy the first rows of a matrix to all heads of some rows."""
    for row in range(n):
        target = find_row(heads, first + row)
        source = matrix[row]
        for i in range(len(target)):
            target[i] = narrow(source[i] * factor, target[i])


@compile_attention
def transpose(matrix: Floats, n: int, n_columns: int, to: Floats) -> None:
    """Write the first `n` rows of a matrix into columns."""
    for column in range(0, n_columns, LANES):
        for row in range(0, n, LANES):
            source = point_at(matrix, row * matrix.shape[1] + column)
            target = point_at(to, column * to.shape[1] + row)
            transpose_block(source, matrix.shape[1], target, to.shape[1])


@compile_attention
def count_stride(matrix: Floats) -> int:
    return matrix.strides[0] // matrix.itemsize


@compile_attention
def multiply_blocks(
    x: Floats, is_transposed: bool, n: int, table: Floats, y: Floats, n_rows: int, n_columns: int
) -> None:
    """Write x[:, :n] @ table[:n], or x[:n].T @ table[:n], into at least this many rows and columns of y."""
    if n == 0:
        y[:n_rows, :n_columns] = 0
        return
    x_stride, x_step = count_stride(x), 1
    if is_transposed:
        x_stride, x_step = 1, x_stride
    table_stride, y_stride = count_stride(table), count_stride(y)
    for row in range(0, n_rows, NARROW_TILE_ROWS):
        rows = point_at(x, row * x_stride)
        for column in range(0, n_columns, LANES):
            columns = point_at(table, column)
            block = point_at(y, row * y_stride + column)
            multiply_block(rows, x_stride, x_step, n, columns, table_stride, block, y_stride)


@compile_attention
def apply_softmax(scores: Floats, n_queries: int, n_keys: int, places: SentenceSpans) -> None:
    """Turn scores into weights; those of keys that a query does not see are 0."""
    for query in range(n_queries):
        first, last = max(0, query - places.behind), min(n_keys, query + places.ahead + 1)
        seen = scores[query, first:last]
        top = MASKED
        for i in range(len(seen)):
            if not seen[i] <= top:  # NaN too
                top = seen[i]
        for i in range(len(seen)):
            seen[i] -= top
    width = round_up_to(n_keys, LANES)  # a whole number of vectors
    for query in range(n_queries):
        row = scores[query, :width]
        for i in range(len(row)):
            row[i] = exp(row[i])
    for query in range(n_queries):
        first, last = max(0, query - places.behind), min(n_keys, query + places.ahead + 1)
        seen = scores[query, first:last]
        total = np.float32(0.0)
        for i in range(len(seen)):
            total += seen[i]
        factor = np.float32(1.0) / total
        for i in range(len(seen)):
            seen[i] *= factor
        scores[query, :first] = 0
        scores[query, last:n_keys] = 0


@compile_attention
def attend_sentences(
    q: Heads,
    k: Heads,
    v: Heads,
    output: Heads,
    d_output: Heads,
    d_q: Heads,
    d_k: Heads,
    d_v: Heads,
    places: SentenceSpans,
    is_backward: bool,
    first: int,
    last: int,
) -> None:
    """Attend within the sentences from `first` to before `last`; or, backward, compute gradients."""
    queries, keys = places.most_queries, places.most_keys
    n_columns, n_value_columns = k.n * k.size, v.n * v.size
    q_rows, d_q_rows = new_matrix(queries, n_columns), new_matrix(queries, n_columns)
    k_rows, d_k_rows = new_matrix(keys, n_columns), new_matrix(keys, n_columns)
    v_rows, d_v_rows = new_matrix(keys, n_value_columns), new_matrix(keys, n_value_columns)
    output_rows = new_matrix(queries, n_value_columns)  # or its gradients
    k_columns, v_columns = new_matrix(n_columns, keys), new_matrix(n_value_columns, keys)
    weights, d_scores = new_matrix(queries, keys), new_matrix(queries, keys)
    scale, one = np.float32(1.0 / math.sqrt(q.size)), np.float32(1.0)
    for sentence in range(first, last):
        query, key = places.query_starts[sentence], places.key_starts[sentence]
        n_queries = places.query_starts[sentence + 1] - query
        n_keys = places.key_starts[sentence + 1] - key
        load_rows(q, query, n_queries, scale, q_rows)
        load_rows(k, key, n_keys, one, k_rows)
        rotate_rows(q_rows, q, query, n_queries, places.rotation, one)
        rotate_rows(k_rows, k, key, n_keys, places.rotation, one)
        load_rows(v, key, n_keys, one, v_rows)
        transpose(k_rows, n_keys, n_columns, k_columns)
        if is_backward:
            load_rows(d_output, query, n_queries, one, output_rows)
            transpose(v_rows, n_keys, n_value_columns, v_columns)
        for head in range(q.n):
            column, value_column = head * k.size, head * v.size
            own_q, own_output = q_rows[:, column:], output_rows[:, value_column:]
            multiply_blocks(own_q, False, k.size, k_columns[column:], weights, n_queries, n_keys)
            apply_softmax(weights, n_queries, n_keys, places)
            if not is_backward:
                own_v = v_rows[:, value_column:]
                multiply_blocks(weights, False, n_keys, own_v, own_output, n_queries, v.size)
                continue
            own_d_v = d_v_rows[:, value_column:]
            multiply_blocks(weights, True, n_queries, own_output, own_d_v, n_keys, v.size)
            own_v = v_columns[value_column:]
            multiply_blocks(own_output, False, v.size, own_v, d_scores, n_queries, n_keys)
            softmax_backward(weights, d_scores, n_queries, n_keys)
            own_d_q, own_d_k = d_q_rows[:, column:], d_k_rows[:, column:]
            multiply_blocks(d_scores, False, n_keys, k_rows[:, column:], own_d_q, n_queries, k.size)
            multiply_blocks(d_scores, True, n_queries, own_q, own_d_k, n_keys, k.size)
        if not is_backward:
            store_rows(output_rows, output, query, n_queries, one)
            continue
        rotate_rows(d_q_rows, q, query, n_queries, places.rotation, -one)
        rotate_rows(d_k_rows, k, key, n_keys, places.rotation, -one)
        store_rows(d_q_rows, d_q, query, n_queries, scale)
        store_rows(d_k_rows, d_k, key, n_keys, one)
        store_rows(d_v_rows, d_v, key, n_keys, one)


@compile_attention
def softmax_backward(weights: Floats, d_weights: Floats, n_queries: int, n_keys: int) -> None:
    """Turn the gradients of weights into those of scores."""
    for query in range(n_queries):
        row, d_row = weights[query], d_weights[query]
        total = np.float32(0.0)
        for key in range(n_keys):
            total += row[key] * d_row[key]
        for key in range(n_keys):
            d_row[key] = row[key] * (d_row[key] - total)


# ---- for torch ------------------------------------------------------------------------------------


def describe_heads(x: Tensor) -> Heads:
    """Describe packed heads (T, H, D), whose numbers must lie beside each other in a row."""
    n, heads, size = x.shape
    n_numbers = (n - 1) * x.stride(0) + heads * size if n else 0
    return Heads(view_numbers(x.as_strided((n_numbers,), (1,))), x.stride(0), heads, size)


def make_contiguous_rows(x: Tensor) -> Tensor:
    is_row = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if is_row else x.contiguous()


def new_rows(like: Tensor, n_live: int, shape: Sequence[int] = ()) -> Tensor:
    """Make rows of which the first `n_live` will be written; the others are 0."""
    rows = like.new_empty(shape or like.shape)
    rows[n_live:] = 0
    return rows


def share_sentences(matrices: Sequence[Tensor], places: SentenceSpans, is_backward: bool) -> None:
    """Have threads attend to about equally many tokens each."""
    heads = [describe_heads(x.detach()) for x in matrices]
    tokens = places.query_starts + places.key_starts
    n_threads = torch.get_num_threads()
    shares = np.arange(1, n_threads) * (tokens[-1] / n_threads)
    bounds = [0, *np.searchsorted(tokens, shares).tolist(), len(tokens) - 1]
    share(attend_sentences, bounds, *heads, places, is_backward)


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, rotation: Tensor | None = None
) -> Tensor:
    """As `attend` of packed_attention.py, without weights and dropout."""
    queries, keys = mask.packed
    places = SentenceSpans(
        queries.offsets.numpy(),
        keys.offsets.numpy(),
        queries.longest,
        keys.longest,
        UNLIMITED if mask.n_ahead is None else mask.n_ahead,
        UNLIMITED if mask.window is None else mask.window,
        NO_ROTATION if rotation is None else rotation.numpy(),
    )
    output: Tensor = CompiledAttention.apply(q, k, v, places)
    return output


class CompiledAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d_k)) v within each sentence: (Tq, H, K), (Tk, H, K), (Tk, H, V) -> (Tq, H, V)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, places: SentenceSpans) -> Tensor:
        q, k, v = (make_contiguous_rows(x) for x in (q, k, v))
        output = new_rows(v, places.query_starts[-1], (len(q), *v.shape[1:]))
        none = v[:0]
        share_sentences((q, k, v, output, none, none, none, none), places, False)
        ctx.save_for_backward(q, k, v)
        ctx.places = places
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        n_queries, n_keys = ctx.places.query_starts[-1], ctx.places.key_starts[-1]
        gradients = new_rows(q, n_queries), new_rows(k, n_keys), new_rows(v, n_keys)
        given = q, k, v, v[:0], make_contiguous_rows(d_output)
        share_sentences((*given, *gradients), ctx.places, True)
        return *gradients, None
