"""The attention kernels against float64 written out, values and gradients: on a GPU, else interpreted.

Without a GPU the process that tests/engines/test_interpreted.py starts runs this file.
"""

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch, mark
from support.interpreted import (
    TAKES_ALL,
    kernel_device,  # noqa: F401 (the fixture `device`)
)
from support.packed_pairs import (
    BF16,
    CASES,
    EMPTY_CASES,
    FP32,
    AttentionCase,
    check_attention,
    packed_heads,
    side,
)
from torch import Tensor

from nmt.engines.cuda import attention_triton
from nmt.engines.cuda.attention_triton import supports_triton, triton_attention
from nmt.engines.cuda.cuda_graph import capture
from nmt.model.attention_mask import AttentionMask
from nmt.model.dropout_masks import draw_seed, mask_by_arrays


def attend_by_kernel(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    return triton_attention(q, k, v, mask.key_intervals, mask.query_intervals)


@mark.parametrize("case", [*CASES, *EMPTY_CASES])
def test_equals_the_definition(case: AttentionCase, device: torch.device) -> None:
    check_attention(attend_by_kernel, case, device)


@mark.parametrize("seed", range(6) if TAKES_ALL else [0, 3])
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


@mark.parametrize("n_parts", [3, 2])
def test_gradients_lie_as_the_model_cut_the_heads(n_parts: int, device: torch.device) -> None:
    """Queries, keys and values from one product, or keys and values alone: their gradients need no copy to
    lie side by side, and are those of heads that lie apart.
    """
    torch.manual_seed(4)
    queries = side([5, 40], 3, device)
    keys = queries if n_parts == 3 else side([7, 33], 2, device)
    field = AttentionMask(queries, keys)
    widths = [32, 32, 48][-n_parts:]
    joint = torch.randn(keys.tokens.numel(), sum(widths), device=device)
    apart = [] if n_parts == 3 else [torch.randn(queries.tokens.numel(), 32, device=device)]
    cut = [part.unflatten(1, (2, -1)) for part in (*apart, *joint.split(widths, 1))]
    found = []
    for heads in (cut, [part.contiguous() for part in cut]):
        q, k, v = (part.detach().requires_grad_() for part in heads)
        out = triton_attention(q, k, v, field.key_intervals, field.query_intervals)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(map(torch.equal, *found))
    *_, first, last = found[0]
    assert len({part.untyped_storage().data_ptr() for part in found[0][-n_parts:]}) == 1
    assert first.stride(0) == last.stride(0) == sum(widths)


DROPOUT_CASES = [
    AttentionCase([1, 6, 3, 7], [4, 1, 3, 9], False, None, (2, 8, 6), FP32),
    AttentionCase([1, 70], None, True, 3, (2, 12, 20), FP32),
    AttentionCase([3, 65, 70], None, True, None, (1, 16, 16), BF16),
    AttentionCase([70, 5], [10, 64], False, 2, (2, 16, 16), BF16),
]


@mark.parametrize("dropout", [0.1, 0.5])
@mark.parametrize("case", [*CASES, *EMPTY_CASES] if TAKES_ALL else DROPOUT_CASES)
def test_dropout_drops_what_the_hash_of_the_cpu_says(
    case: AttentionCase, dropout: float, device: torch.device, monkeypatch: MonkeyPatch
) -> None:
    seed = 0x9ABCDEF012345678 >> 1  # both halves of it matter
    monkeypatch.setattr(
        attention_triton, "draw_seed", lambda device: torch.tensor(seed, device=device)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return triton_attention(q, k, v, mask.key_intervals, mask.query_intervals, dropout)

    def draw(weights: Tensor) -> Tensor:
        return mask_by_arrays(torch.ones_like(weights), dropout, seed)

    check_attention(attend, case, device, draw=draw)


@mark.parametrize("dropout", [0.1, 0.5])
def test_each_call_drops_its_own_share(dropout: float, device: torch.device) -> None:
    """Queries of zeros weigh all keys alike, so ones as values count what is kept."""
    torch.manual_seed(5)
    n, heads = (64, 4) if TAKES_ALL else (32, 2)
    field = AttentionMask(side([n], 0, device), side([n], 0, device))
    x = torch.zeros(n, heads, 16, device=device)
    calls = [
        triton_attention(
            x, x, torch.ones_like(x), field.key_intervals, field.query_intervals, dropout
        )
        for _ in range(2)
    ]
    assert not torch.equal(calls[0], calls[1])
    kept = torch.stack(calls)[..., 0] * (1 - dropout)  # the share of each query's weights
    deviation = (dropout * (1 - dropout) / (kept.numel() * n)) ** 0.5
    assert abs(kept.double().mean().item() - (1 - dropout)) < 4 * deviation
    torch.manual_seed(5)
    again = triton_attention(
        x, x, torch.ones_like(x), field.key_intervals, field.query_intervals, dropout
    )
    assert torch.equal(again, calls[0])


@mark.on_gpu
def test_a_recorded_graph_draws_another_seed_at_each_replay(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("nothing is recorded without a GPU")
    n = 64
    field = AttentionMask(side([n], 0, device), side([n], 0, device))
    intervals = field.key_intervals, field.query_intervals
    x = torch.ones(n, 2, 16, device=device)
    replay = capture(lambda: triton_attention(x, x, x, *intervals, 0.5), device)
    torch.manual_seed(5)
    calls = [replay().clone() for _ in range(2)]
    assert not torch.equal(calls[0], calls[1])
    torch.manual_seed(5)
    assert torch.equal(replay(), calls[0])


@mark.on_gpu
@mark.soak  # the interpreter repeats itself anyway
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
        torch.manual_seed(3)
        out = triton_attention(q, k, v, field.key_intervals, field.query_intervals, 0.1)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b) and a.any()


@mark.on_gpu
@mark.soak  # the compiler takes seconds to load
def test_the_ops_follow_the_rules_of_torch(device: torch.device) -> None:
    torch.manual_seed(4)
    queries, keys = side([2, 0, 33], 2, device), side([4, 1, 3], 2, device)
    field = AttentionMask(queries, keys)
    others = field.key_intervals, field.query_intervals, draw_seed(device)
    heads = [x.detach() for x in packed_heads(queries, keys, torch.float32, (1, 16, 16))]
    leaves = [x.clone().requires_grad_() for x in heads]
    for dropped in (0, 2**30):
        inputs = *heads, *others, dropped
        torch.library.opcheck(attention_triton._attention, (*leaves, *others, dropped))
        results = attention_triton._attention(*inputs)
        torch.library.opcheck(
            attention_triton._gradients,
            (torch.randn_like(results[0]), *heads, *others, *results, dropped),
        )


@mark.parametrize(
    "d_k, d_v, dtype, is_taken",
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
