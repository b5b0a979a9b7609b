"""The attention kernels against float64 written out, values and gradients: on a GPU, else
interpreted.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.interpreted import (
    BOUNDS,
    IS_INTERPRETED,
    TAKES_ALL,
    error,
    kernel_device,  # noqa: F401 (the fixture `device`)
    needs_interpreter,
    run_interpreted,
)
from support.packed_pairs import relation, side
from support.soaking import counted
from torch import Tensor

from nmt.data.batch import Packed
from nmt.engines.cuda import attention_triton
from nmt.engines.cuda.attention_triton import supports_triton, triton_attention
from nmt.model.attention_mask import AttentionMask

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")
CASES = [
    ([5, 0, 32], [32, 4, 0], False, None, (2, 32, 16), FP32),  # sides without tokens
    ([1, 70], None, True, 3, (2, 12, 20), FP32),
    ([3, 65, 70], None, True, None, (1, 16, 16), BF16),
    ([70, 5], [10, 64], False, 2, (2, 16, 16), BF16),  # queries that see nothing
    ([4, 33], None, True, None, (1, 128, 80), FP32),
]


@needs_interpreter
@pytest.mark.timeout(330)
def test_in_the_interpreter() -> None:
    """These kernels and those of the loss; in make soak the graph of both too."""
    train = Path(__file__).parents[1] / "train"
    graph = f"{train}/test_fast_paths.py::test_what_a_gpu_runs_is_one_graph"
    run_interpreted(__file__, f"{train}/test_loss_triton.py", *counted([], [graph]))


def written_out(q: Tensor, k: Tensor, v: Tensor, may: Tensor) -> Tensor:
    """`may` (Tq, Tk) says which key each query sees."""
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    weights = torch.where(may, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
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


def check(
    q_lengths: list[int],
    k_lengths: list[int] | None,
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int, int] = (2, 16, 16),
    tail: int = 5,
    attention: Callable[..., Tensor] = triton_attention,
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
    field = AttentionMask(queries, keys, causal, window)
    heads = packed_heads(queries, keys, dtype, sizes)
    exact = [x.double().nan_to_num().requires_grad_() for x in heads]
    for x, live in zip(heads, is_live, strict=True):
        x[~live] = NAN
    ours = [x.detach().requires_grad_() for x in heads]
    out = attention(*ours, field.key_intervals, field.query_intervals)
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


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "causal", "window", "sizes", "dtype"),
    CASES,
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


@pytest.mark.parametrize("seed", range(6) if TAKES_ALL else [0, 3])
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


@pytest.mark.skipif(not TAKES_ALL, reason="make soak: the interpreter repeats itself anyway")
def test_repeats_to_the_bit(device: torch.device) -> None:
    torch.manual_seed(2)
    queries, keys = side([40, 1, 0, 70], 3, device), side([3, 33, 2, 70], 3, device)
    field = AttentionMask(queries, keys)
    q, k, v = [
        x.detach().requires_grad_()
        for x in packed_heads(queries, keys, torch.bfloat16, (2, 32, 32))
    ]
    runs = []
    for _ in range(2):
        out = triton_attention(q, k, v, field.key_intervals, field.query_intervals)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b) and a.any()


@pytest.mark.skipif(not TAKES_ALL, reason="make soak: the compiler takes seconds to load")
def test_the_ops_follow_the_rules_of_torch(device: torch.device) -> None:
    torch.manual_seed(4)
    queries, keys = side([2, 0, 33], 2, device), side([4, 1, 3], 2, device)
    field = AttentionMask(queries, keys)
    intervals = field.key_intervals, field.query_intervals
    heads = [x.detach() for x in packed_heads(queries, keys, torch.float32, (1, 16, 16))]
    leaves = [x.clone().requires_grad_() for x in heads]
    torch.library.opcheck(attention_triton._attention, (*leaves, *intervals))
    out, lse = attention_triton._attention(*heads, *intervals)
    torch.library.opcheck(
        attention_triton._gradients, (torch.randn_like(out), *heads, out, lse, *intervals)
    )


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
    assert supports_triton(q, v) == is_taken and not supports_triton(q, v.half())


@pytest.mark.skipif(IS_INTERPRETED, reason="no kernel; runs in the other process")
def test_without_triton_the_modules_load_and_say_so() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\nimport torch\nfrom nmt.engines.cuda import attention_triton as a\n"
        "from nmt.engines.cuda import loss_triton as b\nx = torch.zeros(3, 1, 16)\n"
        "assert a.triton is None and not a.supports_triton(x, x) and not b.supports_fused_loss(x)"
    )
    subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True, timeout=60
    )
