"""Attention by compiled loops against torch's own, sentence by sentence; and what does not change its
bits.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("numba")

from nmt.data.batch import Packed, pack
from nmt.engines.cpu import compiled_attention
from nmt.model import packed_attention
from nmt.model.packed_attention import AttentionMask, attend, load_compiled
from nmt.model.positions import rotate, sinusoids

pytestmark = pytest.mark.timeout(300)  # numba compiles, unless it did so before

LENGTHS = [(1, 4), (6, 1), (0, 3), (33, 17), (15, 16), (5, 0), (64, 64)]
SIZES = [(1, 3, 5), (2, 8, 6), (3, 16, 32), (8, 64, 64)]  # heads, keys, values
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    for dtype in BOUNDS:
        load_compiled(dtype)
    calls: list[int] = []
    shared = compiled_attention.share_sentences

    def counting(*arguments: object) -> None:
        calls.append(1)
        shared(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(compiled_attention, "share_sentences", counting)
    yield calls


def make_sides(lengths: list[tuple[int, int]]) -> tuple[Packed, Packed]:
    queries, keys = ([[5] * pair[side] for pair in lengths] for side in (0, 1))
    return pack(queries), pack(keys)


def draw(packed: Packed, heads: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of a wider matrix, as queries, keys and values are."""
    wide = torch.randn(packed.tokens.numel(), 3 * heads * size).to(dtype)
    return wide[:, heads * size : 2 * heads * size].unflatten(1, (heads, size)).requires_grad_()


def compute_all(
    inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor, mask: AttentionMask
) -> list[Tensor]:
    """The output, and the gradients of its sum times `weight`."""
    output = attend(*inputs, mask)
    return [output, *torch.autograd.grad((output * weight).sum(), inputs)]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "key_size", "value_size"), SIZES)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 2), (False, 3)])
def test_each_sentence_is_torchs(
    causal: bool,
    window: int | None,
    heads: int,
    key_size: int,
    value_size: int,
    dtype: torch.dtype,
    counted_calls: list[int],
) -> None:
    torch.manual_seed(0)
    lengths = [(a, a) for a, _ in LENGTHS] if causal or window else LENGTHS
    queries, keys = make_sides(lengths)
    q, k = draw(queries, heads, key_size, dtype), draw(keys, heads, key_size, dtype)
    v = draw(keys, heads, value_size, dtype)
    weight = torch.randn(len(q), heads, value_size).to(dtype)
    found = compute_all((q, k, v), weight, AttentionMask(queries, keys, causal, window))
    assert len(counted_calls) == 2

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    parts = []
    for sentence, (n_queries, n_keys) in enumerate(lengths):
        first, first_key = int(queries.offsets[sentence]), int(keys.offsets[sentence])
        here, there = slice(first, first + n_queries), slice(first_key, first_key + n_keys)
        own = [exact[0][here], exact[1][there], exact[2][there]]
        gap = torch.arange(n_keys)[None] - torch.arange(n_queries)[:, None]
        seen = (gap <= 0) if causal else torch.ones_like(gap, dtype=torch.bool)
        seen &= gap.abs() <= window if window is not None else True
        if n_keys:
            own_q, own_k, own_v = (x.transpose(0, 1) for x in own)
            by_head = F.scaled_dot_product_attention(own_q, own_k, own_v, seen)
            parts.append(by_head.transpose(0, 1))
        else:
            parts.append(exact[2].new_zeros(n_queries, heads, value_size))
    expected = torch.cat([*parts, exact[2].new_zeros(len(q) - queries.n_live, heads, value_size)])
    gradients = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for mine, right in zip(found, (expected, *gradients), strict=True):
        assert mine.dtype == dtype
        error = (mine.double() - right).norm() / right.norm()
        assert error < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_are_rotated_as_by_torch(
    causal: bool, dtype: torch.dtype, counted_calls: list[int]
) -> None:
    torch.manual_seed(0)
    packed, _ = make_sides([(a, a) for a, _ in LENGTHS])
    q, k, v = (draw(packed, 2, 16, dtype) for _ in range(3))
    weight = torch.randn(q.shape).to(dtype)
    mask = AttentionMask(packed, packed, causal)
    rotation = sinusoids(64, 16)[packed.positions]
    output = attend(q, k, v, mask, rotation=rotation)
    found = [output, *torch.autograd.grad((output * weight).sum(), (q, k, v))]
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    rotated = rotate(wide[0], rotation), rotate(wide[1], rotation), wide[2]
    expected_output = attend(*rotated, mask, [])  # with weights torch computes
    wanted = torch.autograd.grad((expected_output * weight).sum(), wide)
    assert len(counted_calls) == 2
    for x, y in zip(found, (expected_output, *wanted), strict=True):
        assert (x.float() - y).abs().max() < BOUNDS[dtype] * y.abs().max()


def pad_rows(x: Tensor, packed: Packed) -> Tensor:
    """Append a dead tail."""
    return F.pad(x, (0, 0, 0, 0, 0, packed.tokens.numel() - len(x)))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_company_and_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    queries, keys = make_sides(LENGTHS)
    inputs = (draw(queries, 2, 20, dtype), draw(keys, 2, 20, dtype), draw(keys, 2, 20, dtype))
    weight = torch.randn(len(inputs[0]), 2, 20).to(dtype)
    together = compute_all(inputs, weight, AttentionMask(queries, keys))
    n_threads = torch.get_num_threads()
    try:
        for n in (1, 2, 5, 20):
            torch.set_num_threads(n)
            again = compute_all(inputs, weight, AttentionMask(queries, keys))
            assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True)), n
    finally:
        torch.set_num_threads(n_threads)
    for sentence, lengths in enumerate(LENGTHS):
        places = slice(*queries.offsets[sentence : sentence + 2].tolist())
        key_places = slice(*keys.offsets[sentence : sentence + 2].tolist())
        slices = (places, key_places, key_places)
        own_queries, own_keys = (pack([[5] * n]) for n in lengths)
        own = []
        for x, at, side in zip(inputs, slices, (own_queries, own_keys, own_keys), strict=True):
            own.append(pad_rows(x.detach()[at], side).requires_grad_())
        own_weight = pad_rows(weight[places], own_queries)
        mask = AttentionMask(own_queries, own_keys)
        alone = compute_all((own[0], own[1], own[2]), own_weight, mask)
        for mine, all_rows, at in zip(alone, together, (places, *slices), strict=True):
            assert torch.equal(mine[: at.stop - at.start], all_rows[at])


def test_nan_is_not_hidden() -> None:
    queries, keys = make_sides([(3, 3), (4, 4)])
    q, k, v = (draw(queries, 1, 8, torch.float32) for _ in range(3))
    with torch.no_grad():
        k[1, 0, 2] = float("nan")
    output = attend(q, k, v, AttentionMask(queries, keys))
    assert output[:3].isnan().all() and output[3:7].isfinite().all()


def test_long_sentences_are_padded(counted_calls: list[int]) -> None:
    for length, n_calls in (
        (packed_attention.MAX_COMPILED_LENGTH, 1),
        (packed_attention.MAX_COMPILED_LENGTH + 1, 0),
    ):
        queries, keys = make_sides([(length, 3), (2, 2)])
        q, k, v = (draw(side, 2, 8, torch.float32) for side in (queries, keys, keys))
        counted_calls.clear()
        attend(q, k, v, AttentionMask(queries, keys))
        assert len(counted_calls) == n_calls


def test_nothing_is_compiled_without_gradients(counted_calls: list[int]) -> None:
    """So that a process that translates one line does not wait for it."""
    queries, keys = make_sides(LENGTHS)
    q, k, v = (draw(side, 2, 8, torch.float32) for side in (queries, keys, keys))
    expected = attend(q, k, v, AttentionMask(queries, keys))
    assert len(counted_calls) == 1
    with torch.no_grad():
        found = attend(q, k, v, AttentionMask(queries, keys))
    detached = attend(q.detach(), k.detach(), v.detach(), AttentionMask(queries, keys))
    assert len(counted_calls) == 1 and torch.equal(found, detached)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert load_compiled(torch.float64) is None


def test_where_numba_fails_attention_is_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # it is emptied

    def fail(*_: object) -> None:
        raise EOFError("ran out of input")

    queries, keys = make_sides(LENGTHS)
    q, k, v = (draw(side, 2, 8, torch.float32) for side in (queries, keys, keys))
    expected = attend(q, k, v, AttentionMask(queries, keys))
    load_compiled.cache_clear()
    try:
        monkeypatch.setattr(compiled_attention, "attend_forward", fail)
        for _ in range(2):
            found = attend(q, k, v, AttentionMask(queries, keys))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        message = "compiling for this processor fails (EOFError: ran out of input)"
        assert capsys.readouterr().err.count(message) == 1
    finally:
        load_compiled.cache_clear()
