"""The cheap CPU dropout: rate, scale, independence, and that the seed governs it."""

import pytest
import torch

from nmt.model.dropout import Dropout


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_rate_and_scale(rate: float) -> None:
    torch.manual_seed(1)
    x = torch.ones(1000, 1000)
    y = Dropout(rate)(x)
    kept = y != 0
    sigma = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs(1 - kept.float().mean().item() - rate) < 4 * sigma + 2**-17  # the rate is rounded to 16 bits
    assert y[kept].unique().numel() == 1 and y[kept][0].item() == pytest.approx(1 / (1 - rate), rel=1e-4)


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
