"""The kernels of scripts/bench/queue/fused_kernels.py against float64 and the model's own code:
on a GPU, else interpreted.

Nothing uses them yet, so `make gpu-dry` runs this and `make test` does not.
"""

import importlib
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.interpreted import (
    BOUNDS,
    error,
    kernel_device,  # noqa: F401 (the fixture `device`)
)
from support.untrained import TINY, make_random_model
from torch import Tensor

from nmt.data.batch import Batch, pack
from nmt.model.dropout_masks import fill_by_arrays
from nmt.model.transformer import Transformer
from nmt.train.loss import Objective

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench" / "queue"))
pytest.importorskip("triton", reason="triton is not installed")
fused_kernels: Any = importlib.import_module("fused_kernels")

pytestmark = pytest.mark.gpu_dry
FP32, BF16 = torch.float32, torch.bfloat16
SHAPE = replace(TINY, d_model=32, d_ff=48, n_layers=1, dropout=0.0)


def make_mask(seed: Tensor, n: int, width: int, rate: float) -> Tensor:
    """The factors of the elements, by the arrays that a CPU falls back to."""
    low, high = seed.tolist()
    mask = np.empty(n * width, np.float64)
    fill_by_arrays(mask, np.full(1, 1 / (1 - rate)), low | high << 32, round(rate * 2**32))
    return torch.from_numpy(mask).view(n, width)


@pytest.mark.parametrize(
    ("dtype", "rate", "has_bias"), [(FP32, 0.0, True), (FP32, 0.3, False), (BF16, 0.1, True)]
)
def test_residual_dropout_and_norm(
    dtype: torch.dtype, rate: float, has_bias: bool, device: torch.device
) -> None:
    torch.manual_seed(3)
    n, width = 71, 32  # rows of two programs, the last block not full
    x, f, d_y, d_twin = (torch.randn(n, width, device=device).to(dtype) for _ in range(4))
    bias, weight, shift = (torch.rand(width, device=device) + 0.5 for _ in range(3))
    given = [x, f, bias, weight, shift] if has_bias else [x, f, weight, shift]
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    exact = [tensor.double().cpu().requires_grad_() for tensor in given]

    torch.manual_seed(9)
    mask = make_mask(torch.randint(2**31, (2,), device=device), n, width, rate)
    assert abs(1 - (mask > 0).double().mean().item() - rate) < 0.03
    expected = exact[0] + (exact[1] + (exact[2] if has_bias else 0.0)) * mask
    expected = F.layer_norm(expected, (width,), exact[-2], exact[-1], 1e-5)
    d_exact = torch.autograd.grad(expected, exact, (d_y.double() + d_twin.double()).cpu())

    torch.manual_seed(9)
    own_bias = leaves[2] if has_bias else None
    y, twin = fused_kernels.AddedAndNormed.apply(*leaves[:2], own_bias, *leaves[-2:], 1e-5, rate)
    assert torch.equal(y, twin)
    d_ours = torch.autograd.grad((y, twin), leaves, (d_y, d_twin))
    for ours, theirs in zip((y, *d_ours), (expected, *d_exact), strict=True):
        assert error(ours.detach().cpu(), theirs.detach()) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_bias_and_relu(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(4)
    n, width = 71, 200  # columns of two programs, the last not full
    h, d_h = (torch.randn(n, width, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(width, device=device)
    exact = [tensor.double().cpu().requires_grad_() for tensor in (h, bias)]
    expected = F.relu(exact[0] + exact[1])
    d_exact = torch.autograd.grad(expected, exact, d_h.double().cpu())

    leaves = [h.clone().requires_grad_(), bias.clone().requires_grad_()]
    y = fused_kernels.BiasedReLU.apply(leaves[0].clone(), leaves[1])
    d_ours = torch.autograd.grad(y, leaves, d_h)
    for ours, theirs in zip((y, *d_ours), (expected, *d_exact), strict=True):
        assert error(ours.detach().cpu(), theirs.detach()) < BOUNDS[dtype]

    leaves[0].detach()[3, 5] = torch.nan
    with torch.no_grad():
        assert fused_kernels.BiasedReLU.apply(leaves[0].clone(), leaves[1]).isnan().sum() == 1


def find_gradients(model: Transformer) -> list[Tensor]:
    device = next(model.parameters()).device
    sources = [(4, 5, 6, 7), (8, 9), (4, 9, 10, 11, 5)]
    targets = [(5, 6, 7), (11, 4, 9, 8, 10), (6, 6)]
    torch.manual_seed(6)
    labels = torch.tensor([piece for target in targets for piece in (*target[1:], 3)])
    batch = Batch(pack(sources).to(device), pack(targets).to(device), labels.to(device), 0)
    model.train().requires_grad_()
    smoothed, _ = Objective(model, 0.1)(batch)
    return [smoothed.detach(), *torch.autograd.grad(smoothed, list(model.parameters()))]


def test_a_model_trains_as_it_does_without_them(device: torch.device) -> None:
    model = make_random_model(SHAPE, 12, 2).to(device)
    exact, plain = find_gradients(deepcopy(model).double()), find_gradients(model)
    fused_kernels.use_fused_kernels(model)
    for ours, others, value in zip(find_gradients(model), plain, exact, strict=True):
        assert error(ours, value) < max(2 * error(others, value), 1e-6)


def test_dropout_repeats_with_the_seed(device: torch.device) -> None:
    model = make_random_model(replace(SHAPE, dropout=0.4), 12, 2).to(device)
    fused_kernels.use_fused_kernels(model)
    first, again = find_gradients(model), find_gradients(model)
    assert all(map(torch.equal, first, again))
