"""The GPU kernels against float64 written out, values and gradients: on a GPU where there is one, else interpreted.

Triton decides at its import whether kernels are interpreted, and torch or another test may have imported it by then. So
without a GPU this file runs itself once more, in a process of its own that says so from the start; test_gpu_dry.py
compiles the kernels, since the interpreter takes what the compiler refuses. The interpreter keeps bf16 as bare bits:
it multiplies those in products and cuts where hardware rounds; both are mended below.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmt.data.batch import Packed
from nmt.model import attention_triton
from nmt.model.attention import Field
from nmt.model.attention_triton import packed_attention, supports
from nmt.train import loss_triton
from nmt.train.loss_triton import fused_loss_forward, rows_in_place

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
NAN = float("nan")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    pytest.importorskip("triton", reason="triton is not installed")
    if IS_INTERPRETED:
        mend_bf16(monkeypatch)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU: runs interpreted, in the process of test_in_the_interpreter")
    return torch.device("cuda")


def mend_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    def converted(data: np.ndarray, source: Any, target: Any, _: Any) -> np.ndarray:
        data = np.ascontiguousarray(data)
        if source == tl.bfloat16:
            return (
                torch.from_numpy(data.view(np.int16))
                .view(torch.bfloat16)
                .float()
                .numpy()
                .view(np.uint32)
            )
        assert target == tl.bfloat16
        return torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def product(_: Any, a: Any, b: Any, c: Any, *precision: Any) -> Any:
        a, b = (
            converted(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
            if x.dtype.scalar == tl.bfloat16
            else x.data
            for x in (a, b)
        )
        return interpreter.TensorHandle(a @ b + c.data, c.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.skipif(
    IS_INTERPRETED or torch.cuda.is_available(), reason="this process computes by itself"
)
def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", __file__],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0 and " passed" in done.stdout, (
        done.stdout[-5000:] + done.stderr[-1000:]
    )


def error(ours: Tensor, exact: Tensor) -> float:
    if not exact.numel() or not exact.any():
        return float(ours.abs().sum())  # must be zero to the bit
    return ((ours.double() - exact).norm() / exact.norm()).item()


def written_out(q: Tensor, k: Tensor, v: Tensor, may: Tensor) -> Tensor:
    """`may` (Tq, Tk) says which key each query sees."""
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    weights = torch.where(may, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.einsum("hij,jhd->ihd", weights, v)


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


def check(
    q_lengths: list[int],
    k_lengths: list[int] | None,
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int, int] = (2, 16, 16),
    tail: int = 5,
    attention: Callable[..., Tensor] = packed_attention,
) -> None:
    """NaN stands in all rows that see nothing or are not seen; None: the keys are the queries."""
    queries = side(q_lengths, tail, device)
    keys = queries if k_lengths is None else side(k_lengths, 2 * tail, device)
    may = relation(
        q_lengths,
        k_lengths or q_lengths,
        (len(queries.tokens) - queries.n_live, len(keys.tokens) - keys.n_live),
        causal,
        window,
    ).to(device)
    is_live = may.any(1), may.any(0), may.any(0)
    field = Field(queries, keys, causal, window)
    heads = packed_heads(queries, keys, dtype, sizes)
    exact = [x.double().nan_to_num().requires_grad_() for x in heads]
    for x, live in zip(heads, is_live, strict=True):
        x[~live] = NAN
    ours = [x.detach().requires_grad_() for x in heads]
    out = attention(*ours, field.seen, field.seeing)
    q, k, v = exact
    expected = written_out(q, k, v, may)
    grad = torch.randn_like(out)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    grad[~is_live[0]] = NAN
    grads = torch.autograd.grad(out, ours, grad)
    for a, b, live in zip(
        (out, *grads), (expected, *expected_grads), (is_live[0], *is_live), strict=True
    ):
        assert a.dtype == dtype and error(a, b) < BOUNDS[dtype]
        assert (a[~live] == 0).all()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "causal", "window", "sizes"),
    [
        ([31, 1, 0, 32], None, True, None, (2, 16, 16)),
        ([5, 0, 32], [32, 4, 0], False, None, (2, 32, 16)),  # a source and a target without tokens
        ([33, 64], [7, 31], False, None, (1, 16, 64)),
        ([3, 65, 70], None, True, None, (1, 16, 16)),
        ([70, 2, 1], [33, 65, 70], False, None, (1, 16, 24)),
        ([1, 70], None, True, 3, (2, 12, 20)),
        ([70, 5], None, False, 2, (2, 16, 16)),
        ([70, 5], [10, 64], False, 2, (2, 16, 16)),  # queries that see nothing
        ([4, 33], None, True, None, (1, 128, 80)),
    ],
)
def test_equals_the_definition(
    q_lengths: list[int],
    k_lengths: list[int] | None,
    causal: bool,
    window: int | None,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(1)
    check(q_lengths, k_lengths, causal, window, dtype, device, sizes)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    q_lengths, k_lengths = rng.choice([0, 1, 2, 7, 31, 32, 33, 65], (2, 3)).tolist()
    causal = seed % 4 < 2
    window = [None, 1, 40][rng.integers(3)]
    tail = int(rng.integers(2)) * 70  # more than a tile
    check(
        q_lengths,
        None if causal else k_lengths,
        causal,
        window,
        list(BOUNDS)[seed % 2],
        device,
        tail=tail,
    )


def test_a_batch_without_rows(device: torch.device) -> None:
    check([0], None, True, None, torch.float32, device, tail=0)
    check([0, 0], [0, 3], False, None, torch.float32, device, tail=0)
    check([2], [0], False, None, torch.bfloat16, device, tail=0)


@pytest.mark.skipif(IS_INTERPRETED, reason="no kernel; runs in the other process")
@settings(max_examples=60, deadline=None)
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
    queries = side(q_lengths, tails[0], torch.device("cpu"))
    keys = side(k_lengths, tails[1], torch.device("cpu"))
    if is_self:
        keys, k_lengths, tails = queries, q_lengths, (tails[0], tails[0])
    field = Field(queries, keys, causal, window)
    may = relation(q_lengths, k_lengths, tails, causal, window)
    for intervals, of_rows, n_live in (
        (field.seen, may, queries.n_live),
        (field.seeing, may.T, keys.n_live),
    ):
        assert intervals.dtype == torch.int32 and intervals.shape == (2, len(of_rows))
        first, last = intervals
        others = torch.arange(of_rows.shape[1])
        assert torch.equal((first[:, None] <= others) & (others < last[:, None]), of_rows)
        assert not intervals[:, n_live:].any()
        sees = first < last
        assert (first[sees].diff() >= 0).all() and (last[sees].diff() >= 0).all()


def test_repeats_to_the_bit(device: torch.device) -> None:
    torch.manual_seed(2)
    queries, keys = side([40, 1, 0, 70], 3, device), side([3, 33, 2, 70], 3, device)
    field = Field(queries, keys)
    q, k, v = [
        x.detach().requires_grad_()
        for x in packed_heads(queries, keys, torch.bfloat16, (2, 32, 32))
    ]
    runs = []
    for _ in range(2):
        out = packed_attention(q, k, v, field.seen, field.seeing)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b) and a.any()


def test_one_graph_under_the_compiler(device: torch.device) -> None:
    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def attention(*arguments: Any) -> Tensor:
        return packed_attention(*arguments)

    torch.manual_seed(3)
    check([6, 1, 35], None, True, None, torch.float32, device, attention=attention)


@pytest.mark.skipif(IS_INTERPRETED, reason="no kernel; runs in the other process")
def test_intervals_compile_as_one_graph() -> None:
    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    def intervals(
        tokens: Tensor, q_offsets: Tensor, k_offsets: Tensor, causal: bool, window: int | None
    ) -> Any:
        queries, keys = Packed(tokens, q_offsets, 9, 20), Packed(tokens, k_offsets, 9, 20)
        field = Field(queries, queries if causal else keys, causal, window)
        return field.seen, field.seeing

    tokens = torch.zeros(20, dtype=torch.int64)
    for lengths in ([3, 0, 9], [1, 1, 9]):
        ends = [
            torch.tensor([0, *lengths]).cumsum(0),
            torch.tensor([0, *reversed(lengths)]).cumsum(0),
        ]
        for causal, window in ((True, None), (True, 2), (False, 2), (False, None)):
            queries, keys = (Packed(tokens, offsets, 9, 20) for offsets in ends)
            field = Field(queries, queries if causal else keys, causal, window)
            seen, seeing = intervals(tokens, *ends, causal, window)
            assert torch.equal(seen, field.seen) and torch.equal(seeing, field.seeing)


def test_the_ops_keep_torchs_rules(device: torch.device) -> None:
    torch.manual_seed(4)
    queries, keys = side([2, 0, 33], 2, device), side([4, 1, 3], 2, device)
    field = Field(queries, keys)
    intervals = field.seen, field.seeing
    heads = [x.detach() for x in packed_heads(queries, keys, torch.float32, (1, 16, 16))]
    leaves = [x.clone().requires_grad_() for x in heads]
    torch.library.opcheck(attention_triton._attention, (*leaves, *intervals))
    out, lse = attention_triton._attention(*heads, *intervals)
    torch.library.opcheck(
        attention_triton._gradients, (torch.randn_like(out), *heads, out, lse, *intervals)
    )
    logits, labels = torch.randn(3, 40, device=device), torch.tensor([4, -1, 39], device=device)
    torch.library.opcheck(rows_in_place, (logits, labels, 0.9, 0.001, 40, True))


@pytest.mark.parametrize(
    ("d_k", "d_v", "dtype", "is_taken"),
    [
        (64, 64, torch.float32, True),
        (128, 128, torch.bfloat16, True),
        (16, 24, torch.float32, True),
        (512, 64, torch.float32, False),
        (64, 512, torch.float32, False),
        (64, 64, torch.float64, False),
    ],
)
def test_what_is_not_supported_is_announced(
    d_k: int, d_v: int, dtype: torch.dtype, is_taken: bool, device: torch.device
) -> None:
    q, v = (torch.zeros(3, 1, size, dtype=dtype, device=device) for size in (d_k, d_v))
    assert supports(q, v) == is_taken and not supports(q, v.half())
    assert loss_triton.supports(q) == (dtype != torch.float64)


@pytest.mark.skipif(IS_INTERPRETED, reason="no kernel; runs in the other process")
def test_without_triton_the_modules_load_and_say_so() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\nimport torch\nfrom nmt.model import attention_triton as a\n"
        "from nmt.train import loss_triton as b\nx = torch.zeros(3, 1, 16)\n"
        "assert a.triton is None and not a.supports(x, x) and not b.supports(x)"
    )
    subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True, timeout=60
    )


def losses(logits: Tensor, labels: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of each row, smoothed and not: 1 - eps on the gold piece, eps / (V - 1) on each other."""
    log_p, at_label = logits.log_softmax(-1), labels.clamp(min=0)[:, None]
    target = torch.full_like(log_p, eps / (logits.shape[1] - 1)).scatter_(1, at_label, 1 - eps)
    smoothed, nll = -(target * log_p).sum(1), -log_p.gather(1, at_label).squeeze(1)
    return smoothed.where(labels >= 0, 0.0), nll.where(labels >= 0, 0.0)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("n_vocab", "n_columns"),
    [(37, 64), (37, 37), (64, 64), (150, 768), (9000, 9024), (49_160, 49_160)],
)  # 9000: many parts
@pytest.mark.parametrize(("eps", "size"), [(0.0, 1.0), (0.1, 1.0), (0.1, 100.0)])
def test_rows_equal_the_definition(
    dtype: torch.dtype, n_vocab: int, n_columns: int, eps: float, size: float, device: torch.device
) -> None:
    torch.manual_seed(5)
    others = eps / (n_vocab - 1)
    labels = torch.tensor([0, n_vocab - 1, -1, 17, -1], device=device)
    logits = (size * torch.randn(5, n_columns, device=device)).to(dtype)
    logits[:, n_vocab:] = NAN
    logits[2] = NAN
    exact = logits[:, :n_vocab].double().requires_grad_()
    expected, live, before = losses(exact, labels, eps), labels >= 0, logits.clone()
    (grad,) = torch.autograd.grad(expected[0][live].sum(), exact)
    quiet = rows_in_place(logits, labels, 1 - eps - others, others, n_vocab, False)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    loud = rows_in_place(logits, labels, 1 - eps - others, others, n_vocab, True)
    for a, b, c in zip(quiet, loud, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == torch.float32 and error(a, c.detach()) < 1e-6
        assert (a[labels < 0] == 0).all()
    assert error(logits[live, :n_vocab], grad[live]) < BOUNDS[dtype]
    assert (logits[:, n_vocab:] == 0).all() and (logits[labels < 0] == 0).all()


@pytest.mark.parametrize(("rows", "padding"), [(4096, 0), (16, 27), (7, 0)])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_fused_loss_equals_the_definition(
    rows: int, padding: int, is_mixed: bool, device: torch.device
) -> None:
    torch.manual_seed(6)
    hidden, weight = torch.randn(50, 16, device=device), torch.randn(37, 16, device=device)
    labels = torch.randint(-1, 37, (50,), device=device)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    sums = [x.sum() for x in losses(exact[0] @ exact[1].T, labels, 0.1)]
    expected = (*sums, *torch.autograd.grad(sums[0], exact))
    padded = torch.cat((weight, weight.new_full((padding, 16), 9.0)))
    with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
        ours = fused_loss_forward(hidden, padded, labels, 0.1, True, 37, rows)
        quiet = fused_loss_forward(hidden, padded, labels, 0.1, False, 37, rows)
    assert [x.item() for x in ours[:2] if x is not None] == [
        x.item() for x in quiet[:2] if x is not None
    ]
    assert quiet[2] is None and quiet[3] is None and ours[3] is not None and not ours[3][37:].any()
    for a, b in zip((*ours[:3], ours[3][:37]), expected, strict=True):
        assert a is not None and a.dtype == torch.float32
        assert error(a, b.detach()) < (1e-2 if is_mixed else 1e-6)
