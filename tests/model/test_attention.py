"""Packed attention against torch's scaled_dot_product_attention, sentence by sentence, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from nmt.data.batch import pack
from nmt.model.attention import Field, attend

LENGTHS = [(1, 4), (6, 1), (3, 3), (7, 9)]


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 2), (False, 1)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_torch_for_each_sentence(
    causal: bool, window: int | None, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    lengths = [(a, a) for a, _ in LENGTHS] if causal or window else LENGTHS
    queries, keys = pack([[5] * a for a, _ in lengths]), pack([[5] * b for _, b in lengths])
    q = torch.randn(queries.n_live, 2, 8, dtype=dtype, requires_grad=True)
    k = torch.randn(keys.n_live, 2, 8, dtype=dtype, requires_grad=True)
    v = torch.randn(keys.n_live, 2, 6, dtype=dtype, requires_grad=True)
    ours = attend(q, k, v, Field(queries, keys, causal, window))
    theirs = []
    for one_q, one_k, one_v in zip(
        *(
            x.split(sizes)
            for x, sizes in (
                (q, [a for a, _ in lengths]),
                (k, [b for _, b in lengths]),
                (v, [b for _, b in lengths]),
            )
        ),
        strict=True,
    ):
        gap = torch.arange(len(one_k))[None] - torch.arange(len(one_q))[:, None]
        may = torch.ones_like(gap, dtype=torch.bool)
        may &= gap <= 0 if causal else True
        may &= gap.abs() <= window if window is not None else True
        heads = F.scaled_dot_product_attention(
            one_q.transpose(0, 1), one_k.transpose(0, 1), one_v.transpose(0, 1), may
        )
        theirs.append(heads.transpose(0, 1))
    expected = torch.cat(theirs)
    assert (ours - expected).abs().max() < bound
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert (a - b).abs().max() < bound * 10
