"""Packed attention against float64 written out, values and gradients; the intervals of rows that the
kernels are given; and attention of plain matrices against torch's scaled_dot_product_attention."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch, approx, mark, raises
from support.packed_pairs import CASES, AttentionCase, check_attention, relation, side
from support.processor import CPU
from torch import Tensor

from nmt.data.batch import pack
from nmt.engines.cuda import backend as cuda_backend
from nmt.model.attention_mask import AttentionMask
from nmt.model.dropout_masks import draw_factors
from nmt.model.packed_attention import attend, attend_matrices
from nmt.system.errors import UserError


@mark.parametrize("case", CASES)
@mark.parametrize("dtype", [torch.float64, None])
def test_equals_the_definition(case: AttentionCase, dtype: torch.dtype | None) -> None:
    case = case._replace(dtype=dtype or case.dtype)
    check_attention(attend, case, CPU)


@mark.parametrize("case", CASES)
def test_a_gpu_attends_so_where_its_kernels_decline(case: AttentionCase) -> None:
    """Heads wider than a kernel takes, for example: in one group, whose rows are looked up by the operation
    whose gradients repeat.
    """
    backend = cuda_backend.CudaBackend()

    def attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        own = backend.make_mask(*mask.packed, mask.causal, mask.window)
        assert len(own.groups) == 1 and not cuda_backend.supports_triton(q, v)
        return backend.attend(q, k, v, own)

    check_attention(attend_on_gpu, case, CPU)


def test_a_kernel_is_told_what_to_drop_and_not_asked_for_weights(
    monkeypatch: MonkeyPatch,
) -> None:
    """As on a GPU: without its dropout a model would train otherwise."""
    monkeypatch.setattr(cuda_backend, "supports_triton", lambda q, v: True)

    def attend_by_kernel(q: Tensor, *others: object) -> Tensor:
        return torch.full_like(q, 7.0 if others[-1] == 0.4 else 0.0)

    monkeypatch.setattr(cuda_backend, "triton_attention", attend_by_kernel)
    side, x = pack([[5] * 7, [5] * 20]), torch.randn(27, 2, 6)
    backend = cuda_backend.CudaBackend()
    mask = backend.make_mask(side, side)
    assert bool((backend.attend(x, x, x, mask, None, 0.4) == 7).all())
    weights: list[Tensor] = []
    assert not bool((backend.attend(x, x, x, mask, weights, 0.4) == 7).any())
    assert len(weights) == 1


def test_scores_may_be_far_apart() -> None:
    """As a trained model's: their exponentials overflow in fp32, and not in fp64."""
    torch.manual_seed(0)
    side = pack([[5] * 7, [5] * 20])
    q, k, v = 40 * torch.randn(27, 2, 6), torch.randn(27, 2, 6), torch.randn(27, 2, 6)
    mask = AttentionMask(side, side)
    exact = attend(q.double(), k.double(), v.double(), mask)
    torch.testing.assert_close(attend(q, k, v, mask).double(), exact, rtol=0, atol=1e-4)


@mark.parametrize("causal", [False, True])
def test_dropout_drops_weights(causal: bool) -> None:
    torch.manual_seed(0)
    side = pack([[5] * 7, [5] * 20, [5] * 3])  # two groups
    q, k, v = (torch.randn(30, 2, 6, dtype=torch.float64) for _ in range(3))
    drawn: list[Tensor] = []

    def draw(weights: Tensor, rate: float) -> Tensor:
        drawn.append(draw_factors(weights, rate))
        return drawn[-1]

    ours = attend(q, k, v, AttentionMask(side, side, causal), None, 0.4, draw=draw)
    factors: dict[int, Tensor] = {}  # by length: (H, L, L)
    for cells, lengths in zip(drawn, ([7, 3], [20]), strict=True):
        for of_sentence, n in zip(cells, lengths, strict=True):
            factors[n] = of_sentence[:, :n, :n]
    kept = torch.cat([factor.flatten() for factor in factors.values()]) != 0
    assert float(kept.double().mean()) == approx(0.6, abs=0.1)
    expected = []
    for one_q, one_k, one_v in zip(*(x.split([7, 20, 3]) for x in (q, k, v)), strict=True):
        n = len(one_q)
        scores = torch.einsum("qhd,khd->hqk", one_q, one_k) / 6**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        weights = scores.softmax(-1) * factors[n]
        expected.append(torch.einsum("hqk,khd->qhd", weights, one_v))
    theirs = torch.cat(expected)
    assert (ours - theirs).abs().max() < 1e-12


@settings(max_examples=60)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    tails=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    is_self=st.booleans(),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 7),
)
def test_intervals_are_the_relation(
    pairs: list[tuple[int, int]],
    tails: tuple[int, int],
    is_self: bool,
    causal: bool,
    window: int | None,
) -> None:
    q_lengths, k_lengths = [a for a, _ in pairs], [b for _, b in pairs]
    queries = side(q_lengths, tails[0], CPU)
    keys = side(k_lengths, tails[1], CPU)
    if is_self:
        keys, k_lengths, tails = queries, q_lengths, (tails[0], tails[0])
    field = AttentionMask(queries, keys, causal, window)
    may = relation(q_lengths, k_lengths, tails, causal, window)
    for intervals, of_rows, n_live in (
        (field.key_intervals, may, queries.n_live),
        (field.query_intervals, may.T, keys.n_live),
    ):
        assert intervals.dtype == torch.int32 and intervals.shape == (2, len(of_rows))
        first, last = intervals
        others = torch.arange(of_rows.shape[1])
        assert torch.equal((first[:, None] <= others) & (others < last[:, None]), of_rows)
        assert not intervals[:, n_live:].any()
        sees = first < last
        assert (first[sees].diff() >= 0).all() and (last[sees].diff() >= 0).all()


@mark.parametrize("heads", [None, 2])
@mark.parametrize("causal, window", [(False, None), (True, None), (True, 2), (False, 0)])
def test_matrices_give_what_torch_gives(
    heads: int | None, causal: bool, window: int | None
) -> None:
    torch.manual_seed(0)
    n, m = (21, 21) if window is not None else (21, 5)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, dtype=torch.float64)
        # a slice, because the rows of a projection are not contiguous either
        return x[..., 1:-1]

    middle = () if heads is None else (heads,)
    q, k, v = draw(n, *middle, 10), draw(m, *middle, 10), draw(m, *middle, 8)
    ahead = torch.arange(m) - torch.arange(n)[:, None]
    may = torch.ones(n, m, dtype=torch.bool)
    if causal:
        may &= ahead <= 0
    if window is not None:
        may &= ahead.abs() <= window

    def by_head(x: Tensor) -> Tensor:
        return x if heads is None else x.transpose(0, 1)

    expected = by_head(F.scaled_dot_product_attention(by_head(q), by_head(k), by_head(v), may))
    ours, weights = attend_matrices(q, k, v, causal, window)
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 1e-12
    assert (by_head(weights @ by_head(v)) - expected).abs().max() < 1e-12


@mark.parametrize(
    "shapes, dtype, window, message",
    [
        ([(3, 4), (5, 4), (5,)], torch.float32, None, "give matrices"),
        ([(3, 2, 4), (5, 4), (5, 4)], torch.float32, None, "give matrices"),
        ([(3, 4), (5, 3), (5, 4)], torch.float32, None, "queries and keys need one size"),
        ([(3, 4), (5, 4), (3, 4)], torch.float32, None, "keys and values one length"),
        ([(3, 4), (5, 4), (5, 4)], torch.int64, None, "floating-point"),
        ([(3, 4), (5, 4), (5, 4)], torch.float32, 1, "of one sentence"),
        ([(3, 4), (3, 4), (3, 4)], torch.float32, -1, "must not be negative"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, window: int | None, message: str
) -> None:
    q, k, v = (torch.ones(shape, dtype=dtype) for shape in shapes)
    with raises(UserError, match=message):
        attend_matrices(q, k, v, window=window)
