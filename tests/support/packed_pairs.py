"""Packed sentences, which key each query attends to by the definition, one pair of places after
another, and attention written out, for each function that computes it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.data.batch import Packed
from nmt.model.attention_mask import AttentionMask
from support.interpreted import BOUNDS, error

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")


class AttentionCase(NamedTuple):
    q_lengths: list[int]
    k_lengths: list[int] | None  # None: the keys are the queries
    causal: bool
    window: int | None
    sizes: tuple[int, int, int]  # heads, and of a key and a value
    dtype: torch.dtype
    tail: int = 5  # rows behind the last sentence


CASES = [
    AttentionCase([1, 6, 3, 7], [4, 1, 3, 9], False, None, (2, 8, 6), FP32),
    AttentionCase([1, 6, 3, 7], None, False, 1, (2, 8, 6), FP32),
    AttentionCase([1, 70], None, True, 3, (2, 12, 20), FP32),
    AttentionCase([3, 65, 70], None, True, None, (1, 16, 16), BF16),
    AttentionCase([4, 33], None, True, None, (1, 128, 80), FP32),
]
# What only kernels are given: sides without tokens, and queries that see nothing.
EMPTY_CASES = [
    AttentionCase([70, 5], [10, 64], False, 2, (2, 16, 16), BF16),
    AttentionCase([5, 0, 32], [32, 4, 0], False, None, (2, 32, 16), FP32),
    AttentionCase([0], None, True, None, (2, 16, 16), FP32, 0),
    AttentionCase([0, 0], [0, 3], False, None, (2, 16, 16), FP32, 0),
    AttentionCase([2], [0], False, None, (2, 16, 16), BF16, 0),
]


def relation(
    q_lengths: list[int],
    k_lengths: list[int],
    tails: tuple[int, int],
    causal: bool,
    window: int | None,
) -> Tensor:
    """(Tq, Tk): which key each query sees, one pair of places after another."""
    may = torch.zeros(sum(q_lengths) + tails[0], sum(k_lengths) + tails[1], dtype=torch.bool)
    q_begin = k_begin = 0
    for n_queries, n_keys in zip(q_lengths, k_lengths, strict=True):
        for i in range(n_queries):
            for j in range(n_keys):
                is_near = window is None or abs(i - j) <= window
                may[q_begin + i, k_begin + j] = is_near and not (causal and j > i)
        q_begin += n_queries
        k_begin += n_keys
    return may


def side(lengths: list[int], tail: int, device: torch.device) -> Packed:
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    n_live = sum(lengths)
    tokens = torch.zeros(n_live + tail, dtype=torch.int64, device=device)
    return Packed(tokens, offsets, max(lengths), n_live)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, may: Tensor, factors: Tensor | None = None
) -> Tensor:
    """`may` (Tq, Tk) says which key each query sees, `factors` (Tq, H, Tk) what dropout makes of weights."""
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    weights = torch.where(may, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    if factors is not None:
        weights = weights * factors.transpose(0, 1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def packed_heads(
    queries: Packed, keys: Packed, dtype: torch.dtype, sizes: tuple[int, ...]
) -> list[Tensor]:
    """Views into fused products, as the model makes them."""
    n_heads, d_k, d_v = sizes
    fused = []
    for packed in (queries, keys):
        rows = torch.randn(
            len(packed.tokens), n_heads * (2 * d_k + d_v), device=packed.tokens.device
        ).to(dtype)
        fused.append(rows.split([n_heads * d_k, n_heads * d_k, n_heads * d_v], -1))
    return [x.unflatten(-1, (n_heads, -1)) for x in (fused[0][0], fused[1][1], fused[1][2])]


def check_attention(
    attention: Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor],
    case: AttentionCase,
    device: torch.device,
    seed: int = 1,
    draw: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Compare values and gradients with fp64 written out. NaN stands in all rows that see nothing or are
    not seen. `draw` returns dropout's factors of weights (Tq, H, Tk).
    """
    torch.manual_seed(seed)
    queries = side(case.q_lengths, case.tail, device)
    keys = queries if case.k_lengths is None else side(case.k_lengths, 2 * case.tail, device)
    may = relation(
        case.q_lengths,
        case.k_lengths or case.q_lengths,
        (len(queries.tokens) - queries.n_live, len(keys.tokens) - keys.n_live),
        case.causal,
        case.window,
    ).to(device)
    is_live = may.any(1), may.any(0), may.any(0)
    heads = packed_heads(queries, keys, case.dtype, case.sizes)
    exact = [x.double().nan_to_num().requires_grad_() for x in heads]
    for x, live in zip(heads, is_live, strict=True):
        x[~live] = NAN
    ours = [x.detach().requires_grad_() for x in heads]
    field = AttentionMask(queries, keys, case.causal, case.window)
    out = attention(ours[0], ours[1], ours[2], field)
    factors = None
    if draw is not None:
        factors = draw(exact[0].new_empty(len(may), case.sizes[0], may.shape[1]))
    expected = written_out(exact[0], exact[1], exact[2], may, factors)
    grad = torch.randn_like(out)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    grad[~is_live[0]] = NAN
    grads = torch.autograd.grad(out, ours, grad)
    for a, b, live in zip(
        (out, *grads), (expected, *expected_grads), (is_live[0], *is_live), strict=True
    ):
        assert a.dtype == case.dtype and error(a, b) < BOUNDS[case.dtype]
        assert not a.numel() or (a - b).abs().max() < 10 * BOUNDS[case.dtype]
        assert (a[~live] == 0).all()
