"""torch's kernel behind its masks, and when `attend` uses it.

The kernel itself needs a GPU. Here something stands in for it that computes by the definition and
leaves NaN wherever FlashAttention writes nothing, forward and backward.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from nmt.data.batch import Packed, pack
from nmt.model import attention, attention_varlen
from nmt.model.attention import TRITON, VARLEN, AttentionMask, attend
from nmt.model.attention_varlen import supports_varlen, varlen_attention

NAN = float("nan")


def sentences(
    q: Tensor, k: Tensor, q_ends: Tensor, k_ends: Tensor, window: list[int]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The rows of each sentence and its weights. As FlashAttention counts: the last query stands
    beside the last key, and -1 is without a bound."""
    ends = q_ends.tolist(), k_ends.tolist()
    for a, b, c, d in zip(ends[0][:-1], ends[0][1:], ends[1][:-1], ends[1][1:], strict=True):
        if a == b or c == d:
            continue
        gap = torch.arange(d - c) - torch.arange(b - a)[:, None] - (d - c - b + a)
        may = torch.ones_like(gap, dtype=torch.bool)
        if window[0] >= 0:
            may &= -gap <= window[0]
        if window[1] >= 0:
            may &= gap <= window[1]
        scores = torch.einsum("ihd,jhd->hij", q[a:b], k[c:d]) / q.shape[-1] ** 0.5
        yield slice(a, b), slice(c, d), scores.masked_fill(~may, -torch.inf).softmax(-1)


@torch.library.custom_op("nmt_tests::varlen", mutates_args=())
def stand_in(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, window: list[int]
) -> Tensor:
    assert q_ends.dtype == k_ends.dtype == torch.int32
    out = q.new_full((*q.shape[:2], v.shape[2]), NAN)
    for i, j, weights in sentences(q, k, q_ends, k_ends, window):
        out[i] = torch.einsum("hij,jhd->ihd", weights, v[j])
    return out


@stand_in.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, window: list[int]) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


@torch.library.custom_op("nmt_tests::varlen_backward", mutates_args=())
def stand_in_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, window: list[int]
) -> list[Tensor]:
    grads = [torch.full_like(x, NAN) for x in (q, k, v)]
    for i, j, weights in sentences(q, k, q_ends, k_ends, window):
        of_weights = torch.einsum("ihd,jhd->hij", grad[i], v[j])
        of_scores = (
            weights
            * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
            / q.shape[-1] ** 0.5
        )
        grads[0][i] = torch.einsum("hij,jhd->ihd", of_scores, k[j])
        grads[1][j] = torch.einsum("hij,ihd->jhd", of_scores, q[i])
        grads[2][j] = torch.einsum("hij,ihd->jhd", weights, grad[i])
    return grads


@stand_in_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *stand_in_backward(grad, *ctx.saved_tensors, ctx.window), None, None, None


stand_in.register_autograd(differentiate, setup_context=keep)


def as_torch_is_called(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert isinstance(window_size, tuple)  # torch compares it with (-1, 0)
    assert (
        longest_q >= (q_ends[1:] - q_ends[:-1]).max() if not torch.compiler.is_compiling() else True
    )
    return stand_in(q, k, v, q_ends, k_ends, list(window_size))


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_varlen, "varlen_attn", as_torch_is_called)
    monkeypatch.setattr(attention, "supports_varlen", lambda q, v: True)


def side(lengths: list[int], tail: int) -> Packed:
    live = pack([[5] * n for n in lengths])
    tokens = torch.cat((live.tokens, live.tokens.new_zeros(tail)))
    # Constant shapes: the last offset repeats.
    offsets = torch.cat((live.offsets, live.offsets[-1:].repeat(2)))
    return Packed(tokens, offsets, live.longest + 3, live.n_live)


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "causal", "window", "is_compiled"),
    [
        ([4, 1, 7], None, False, None, False),
        ([4, 0, 7], None, True, None, False),
        ([4, 1, 7], None, False, 2, False),
        ([5, 1, 7], None, True, 2, False),
        ([5, 3, 0, 2], [2, 0, 6, 4], False, None, False),
        ([5, 1, 7], None, True, 2, True),
        ([5, 3, 0, 2], [2, 0, 6, 4], False, None, True),
    ],
)
def test_masks_keep_what_was_never_written_out(
    q_lengths: list[int],
    k_lengths: list[int] | None,
    causal: bool,
    window: int | None,
    is_compiled: bool,
    varlen: None,
) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    queries = side(q_lengths, 4)
    keys = queries if k_lengths is None else side(k_lengths, 3)
    truth = AttentionMask(queries, keys, causal, window)
    is_live = [
        truth.key_intervals[0] < truth.key_intervals[1],
        truth.query_intervals[0] < truth.query_intervals[1],
    ]
    heads = [
        torch.randn(len(packed.tokens), 3, 2, 8, dtype=torch.float64)[:, n]
        for n, packed in enumerate((queries, keys, keys))
    ]
    exact = [x.clone().requires_grad_() for x in heads]
    expected = attend(exact[0], exact[1], exact[2], truth)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(
        expected, exact, grad.where(is_live[0][:, None, None], 0.0)
    )
    for place, x in enumerate(heads):
        x[~is_live[min(place, 1)]] = NAN
    grad[~is_live[0]] = NAN
    ours = [x.detach().requires_grad_() for x in heads]
    path: Callable[..., Tensor] = varlen_attention
    if is_compiled:
        path = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    out = path(*ours, queries.offsets, keys.offsets, queries.longest, keys.longest, causal, window)
    grads = torch.autograd.grad(out, ours, grad)
    for a, b, live in zip(
        (out, *grads), (expected, *expected_grads), (is_live[0], *is_live, is_live[1]), strict=True
    ):
        assert (a - b).abs().max() < 1e-12
        assert (a[~live] == 0).all()


def test_attend_takes_the_path_it_is_told(varlen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def told(name: str) -> Callable[..., Tensor]:
        def path(q: Tensor, *_: Any) -> Tensor:
            taken.append(name)
            return q

        return path

    monkeypatch.setattr(attention, "varlen_attention", told(VARLEN))
    monkeypatch.setattr(attention, "triton_attention", told(TRITON))
    monkeypatch.setattr(attention, "supports_triton", lambda q, v: True)
    x, one, other = torch.randn(8, 1, 8), side([3, 1], 4), side([2, 2], 4)
    for field in (
        AttentionMask(one, one),
        AttentionMask(one, one, path=VARLEN),
        AttentionMask(one, one, True, 2, path=VARLEN),
        AttentionMask(one, other, path=VARLEN),
        AttentionMask(one, other, window=2, path=VARLEN),
    ):
        field.is_on_cpu = False
        attend(x, x, x, field)
    # FlashAttention counts a window from the ends of sentences, so lengths must agree.
    assert taken == [TRITON, VARLEN, VARLEN, VARLEN, TRITON]


def test_which_heads_torch_takes() -> None:
    assert attention_varlen.has_window(varlen_attn)
    # Not on a GPU
    assert not supports_varlen(torch.zeros(1, 1, 64).bfloat16(), torch.zeros(1, 1, 64).bfloat16())
