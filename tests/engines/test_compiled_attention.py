"""Attention by compiled loops against the definition; and what does not change its bits."""

from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import torch
from pytest import MonkeyPatch, fixture, importorskip, mark
from support.capture import Capture, read_stderr
from support.packed_pairs import (
    CASES,
    EMPTY_CASES,
    AttentionCase,
    check_attention,
    packed_heads,
    side,
)
from support.processor import CPU
from torch import Tensor

importorskip("numba")

from nmt.data.batch import pack
from nmt.engines.cpu import compiled_attention
from nmt.engines.cpu.backend import MAX_COMPILED_LENGTH, CpuBackend, load_compiled
from nmt.model.attention_mask import AttentionMask
from nmt.model.packed_attention import rotate
from nmt.model.positions import sinusoids
from nmt.system.progress import say_once

pytestmark = mark.timeout(300)  # numba compiles, unless it did so before

LENGTHS = [(1, 4), (6, 1), (0, 3), (33, 17), (15, 16), (5, 0), (64, 64)]
attend = CpuBackend().attend
DTYPES = [torch.float32, torch.bfloat16]


@fixture(autouse=True)
def counted_calls(monkeypatch: MonkeyPatch) -> Iterator[list[int]]:
    for dtype in DTYPES:
        load_compiled(dtype)
    calls: list[int] = []
    shared = compiled_attention.share_sentences

    def counting(*arguments: object) -> None:
        calls.append(1)
        shared(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(compiled_attention, "share_sentences", counting)
    yield calls


def draw(
    dtype: torch.dtype = torch.float32, lengths: list[tuple[int, int]] = LENGTHS
) -> tuple[list[Tensor], AttentionMask]:
    """Queries, keys and values of two heads, and their mask."""
    torch.manual_seed(1)
    queries, keys = (side([pair[n] for pair in lengths], 7, CPU) for n in (0, 1))
    heads = packed_heads(queries, keys, dtype, (2, 20, 20))
    return [x.detach().requires_grad_() for x in heads], AttentionMask(queries, keys)


def compute_all(inputs: list[Tensor], mask: AttentionMask) -> list[Tensor]:
    """The output, and the gradients of half its square."""
    output = attend(inputs[0], inputs[1], inputs[2], mask)
    return [output, *torch.autograd.grad(output, inputs, output.detach())]


@mark.parametrize("dtype", DTYPES)
@mark.parametrize("case", [*CASES, *EMPTY_CASES[1:]])  # each key is seen, as in a model
def test_equals_the_definition(
    case: AttentionCase, dtype: torch.dtype, counted_calls: list[int]
) -> None:
    check_attention(attend, case._replace(dtype=dtype), CPU)
    assert len(counted_calls) == 2


@mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_are_rotated_as_by_torch(
    dtype: torch.dtype, counted_calls: list[int]
) -> None:
    packed = pack([[0] * n for n, _ in LENGTHS])
    rotation = sinusoids(64, 20)[packed.positions]
    q, k, v = (
        x.detach().requires_grad_() for x in packed_heads(packed, packed, dtype, (2, 20, 20))
    )
    mask = AttentionMask(packed, packed, causal=True)
    output = attend(q, k, v, mask, rotation=rotation)
    found = [output, *torch.autograd.grad(output.square().sum(), (q, k, v))]
    assert len(counted_calls) == 2
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attend(rotate(wide[0], rotation), rotate(wide[1], rotation), wide[2], mask)
    wanted = [expected, *torch.autograd.grad(expected.square().sum(), wide)]
    bound = 2e-6 if dtype == torch.float32 else 1.5e-2
    for x, y in zip(found, wanted, strict=True):
        assert (x.double() - y).norm() < bound * y.norm()


def test_scores_may_be_far_apart(counted_calls: list[int]) -> None:
    """As a trained model's: the exponential of their differences, taken the wrong way, overflows."""
    (q, k, v), mask = draw(lengths=LENGTHS[3:])
    inputs = [(100 * q).detach().requires_grad_(), k, v]
    found = compute_all(inputs, mask)
    assert len(counted_calls) == 2
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for x, y in zip(found, compute_all(wide, mask), strict=True):
        assert (x.double() - y).norm() < 1e-4 * y.norm()


@mark.parametrize("dtype", DTYPES)
def test_company_and_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    inputs, mask = draw(dtype)
    together = compute_all(inputs, mask)
    for n in (2, 5, 20, 1):
        torch.set_num_threads(n)
        again = compute_all(inputs, mask)
        assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True)), n
    for sentence, lengths in enumerate(LENGTHS):
        rows, key_rows = (
            slice(*packed.offsets[sentence : sentence + 2].tolist()) for packed in mask.packed
        )
        own = [x.detach()[at] for x, at in zip(inputs, (rows, key_rows, key_rows), strict=True)]
        queries, keys = (side([n], 0, CPU) for n in lengths)
        alone = compute_all([x.requires_grad_() for x in own], AttentionMask(queries, keys))
        for mine, whole, at in zip(alone, together, (rows, rows, key_rows, key_rows), strict=True):
            assert torch.equal(mine, whole[at])


def test_nan_is_not_hidden() -> None:
    (q, k, v), mask = draw(lengths=[(3, 3), (4, 4)])
    with torch.no_grad():
        k[1, 0, 2] = float("nan")
    output = attend(q, k, v, mask)
    assert output[:3, 0].isnan().all() and output[3:7].isfinite().all()


def test_long_sentences_are_padded(counted_calls: list[int]) -> None:
    for length, n_calls in ((MAX_COMPILED_LENGTH, 1), (MAX_COMPILED_LENGTH + 1, 0)):
        (q, k, v), mask = draw(lengths=[(length, 3), (2, 2)])
        counted_calls.clear()
        attend(q, k, v, mask)
        assert len(counted_calls) == n_calls


def test_nothing_is_compiled_without_gradients(counted_calls: list[int]) -> None:
    """So that a process that translates one line does not wait for it."""
    (q, k, v), mask = draw()
    expected = attend(q, k, v, mask)
    assert len(counted_calls) == 1
    with torch.no_grad():
        found = attend(q, k, v, mask)
    detached = attend(q.detach(), k.detach(), v.detach(), mask)
    assert len(counted_calls) == 1 and torch.equal(found, detached)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert load_compiled(torch.float64) is None


@mark.parametrize(
    "fault, message",
    [
        (EOFError("damaged"), "compiling for this processor fails (EOFError: damaged)"),
        (
            ModuleNotFoundError("numba", name="numba"),
            "without numba, CPUs train and translate more slowly",
        ),
    ],
)
def test_where_numba_fails_attention_is_padded(
    fault: Exception,
    message: str,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # it is emptied

    def fail(*_: object) -> None:
        raise fault

    (q, k, v), mask = draw()
    expected = attend(q, k, v, mask)
    load_compiled.cache_clear()
    say_once.cache_clear()
    try:
        monkeypatch.setattr(compiled_attention, "attend_sentences", fail)
        for _ in range(2):
            found = attend(q, k, v, mask)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert load_compiled(torch.float32) is None
        assert read_stderr(capsys).count(message) == 1
    finally:
        load_compiled.cache_clear()


def test_the_loop_knows_all_that_a_mask_is_made_of() -> None:
    """It reads no other rule of a mask. Whoever adds one must teach it, or have `CpuBackend` step aside."""
    known = {"self", "queries", "keys", "causal", "window", "is_single_group"}
    assert set(signature(AttentionMask.__init__).parameters) == known
