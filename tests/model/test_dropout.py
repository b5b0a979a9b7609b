"""Dropout: rate, scale, independence, that the seed governs it, and that numba changes no mask."""

import numpy as np
import torch
from pytest import mark
from torch import Tensor

from nmt.engines.cpu.backend import load_compiled
from nmt.model.dropout import Dropout
from nmt.model.dropout_masks import BITS, mask_by_arrays
from nmt.train.update import dropout_seed


def test_neighbours_rows_and_calls_are_independent() -> None:
    torch.manual_seed(2)
    layer, x = Dropout(0.5), torch.ones(1024, 1024)
    a, b = (layer(x) != 0).float() - 0.5, (layer(x) != 0).float() - 0.5
    limit = 4 * 0.25 / 1024  # four standard errors of the mean of a million products of +-1/2
    pairs = [(a, b), (a[1:], a[:-1])] + [(a[:, lag:], a[:, :-lag]) for lag in (1, 2, 3, 4, 8)]
    assert all((p * q).mean().abs() < limit for p, q in pairs)


def test_the_seed_decides_and_the_gradient_passes_the_same_mask() -> None:
    layer, x = Dropout(0.3), torch.randn(37, 5, requires_grad=True)
    torch.manual_seed(5)
    y = layer(x)
    torch.manual_seed(5)
    assert torch.equal(y, layer(x))
    assert not torch.equal(y, layer(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad * x, y)


def test_silent_in_evaluation_and_at_rate_zero() -> None:
    x = torch.randn(4, 4)
    assert Dropout(0.5).eval()(x) is x and Dropout(0.0)(x) is x


@mark.parametrize("rate", [1e-4, 0.1, 1 / 3, 0.9])
@mark.parametrize("shape", [(1_000_003,), (1001, 333)])
def test_what_is_kept_has_the_scale_of_the_share_that_is_kept(
    rate: float, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(3)
    y = Dropout(rate)(torch.ones(shape))
    share = 1 - round(rate * 2**BITS) / 2**BITS
    assert y[y != 0].unique().tolist() == [torch.tensor(1 / share).item()]
    assert (
        abs((y != 0).double().mean().item() - share) < 4 * (share * (1 - share) / y.numel()) ** 0.5
    )


def uncorrelated(masks: list[Tensor]) -> bool:
    """No two of these random masks agree more often than chance lets them, five standard errors
    wide.
    """
    rows = torch.stack([mask.flatten().double() for mask in masks])
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
    among = rows @ rows.T / rows.shape[1] - torch.eye(len(rows))
    return bool(among.abs().max() < 5 / rows.shape[1] ** 0.5)


def test_masks_of_seeds_updates_and_micro_batches_are_independent() -> None:
    masks = []
    for seed, step, number in [
        (1, 1, 0),
        (1, 1, 1),
        (1, 2, 0),
        (1, 2, 1),
        (2, 1, 0),
        (1, 11, 0),
        (11, 1, 0),
    ]:
        torch.manual_seed(dropout_seed(seed, step, number))
        masks.append(Dropout(0.1)(torch.ones(300, 512)) != 0)
    assert uncorrelated(masks)


@mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@mark.parametrize("rate", [0.0, 0.1, 0.5, 1 - 2**-BITS])
def test_compiled_masks_are_those_of_numpy(dtype: torch.dtype, rate: float) -> None:
    """numba's loop and numpy's arrays give identical bits, of NaN, too."""
    compiled = load_compiled(dtype)
    assert compiled is not None
    random = np.random.default_rng(3)
    for size in (0, 1, 17, 100_003):
        seed = int(random.integers(2**63))
        x = torch.randn(size).to(dtype)
        x[size // 2 :: 7] = float("nan")
        x[size // 3 :: 7] = float("inf")
        found, expected = (mask(x, rate, seed) for mask in (compiled.mask, mask_by_arrays))
        assert found.dtype == dtype and torch.equal(found.nan_to_num(5), expected.nan_to_num(5))
        assert found.isnan().sum() >= x.isnan().sum()
