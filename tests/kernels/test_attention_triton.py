"""The attention kernels against float64 written out, values and gradients: on a GPU, else interpreted.

Without a GPU the process that tests/engines/test_interpreted.py starts runs this file.
"""

import numpy as np
import pytest
import torch
from support.interpreted import (
    TAKES_ALL,
    kernel_device,  # noqa: F401 (the fixture `device`)
)
from support.packed_pairs import (
    CASES,
    EMPTY_CASES,
    AttentionCase,
    check_attention,
    packed_heads,
    side,
)
from torch import Tensor

from nmt.engines.cuda import attention_triton
from nmt.engines.cuda.attention_triton import supports_triton, triton_attention
from nmt.model.attention_mask import AttentionMask


def attend_by_kernel(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    return triton_attention(q, k, v, mask.key_intervals, mask.query_intervals)


@pytest.mark.parametrize("case", [*CASES, *EMPTY_CASES])
def test_equals_the_definition(case: AttentionCase, device: torch.device) -> None:
    check_attention(attend_by_kernel, case, device)


@pytest.mark.parametrize("seed", range(6) if TAKES_ALL else [0, 3])
def test_random_batches(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    q_lengths, k_lengths = rng.choice([0, 1, 2, 7, 31, 32, 33, 65], (2, 3)).tolist()
    causal = seed % 4 < 2
    window = [None, 1, 40][rng.integers(3)]
    tail = int(rng.integers(2)) * 70  # more than a tile
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    keys = None if causal else k_lengths
    case = AttentionCase(q_lengths, keys, causal, window, (2, 16, 16), dtype, tail)
    check_attention(attend_by_kernel, case, device, seed)


@pytest.mark.on_gpu
@pytest.mark.soak  # the interpreter repeats itself anyway
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


@pytest.mark.on_gpu
@pytest.mark.soak  # the compiler takes seconds to load
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
