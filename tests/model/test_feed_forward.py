"""Fused linear layers give the same results as a product, a bias and an activation one after another."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pytest import mark, raises
from torch import Tensor

from nmt.engines.cpu.backend import CpuBackend, can_fuse
from nmt.model.backend import use_backend
from nmt.model.feed_forward import ActivatedLinear, BiasedLinear
from nmt.system.device import has_bf16_products

pytestmark = mark.skipif(not has_bf16_products(), reason="oneDNN has no bf16 on this processor")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "swish": F.silu,
}


@mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_layer_and_its_gradients_are_those_of_the_formula(activation: str) -> None:
    torch.manual_seed(1)
    layer = ActivatedLinear(24, 40, activation)
    use_backend(layer, CpuBackend())
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(37, 24).bfloat16().requires_grad_()
    d_y = torch.randn(37, 40).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert can_fuse(x, layer.weight)
        y = layer(x)
    inputs = [x, layer.weight, layer.bias]
    gradients = torch.autograd.grad(y, inputs, d_y)

    # in fp64, from the same rounded numbers
    rounded = [each.detach().bfloat16().double().requires_grad_() for each in inputs]
    exact_y = ACTIVATIONS[activation](F.linear(*rounded))
    exact = torch.autograd.grad(exact_y, rounded, d_y.double())

    assert [each.dtype for each in (y, *gradients)] == 2 * [x.dtype] + 2 * [torch.float32]
    for ours, theirs in zip([y, *gradients], [exact_y, *exact], strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 2**-7, error  # a rounding or two of bf16


@mark.parametrize("where", ["input", "weight", "bias"])
def test_nan_stays_nan(where: str) -> None:
    layer, x = ActivatedLinear(8, 4, "relu").bfloat16(), torch.ones(3, 8, dtype=torch.bfloat16)
    use_backend(layer, CpuBackend())
    with torch.no_grad():
        layer.bias.zero_()
        {"input": x, "weight": layer.weight, "bias": layer.bias}[where].view(-1)[0] = torch.nan
        assert can_fuse(x, layer.weight)
        assert layer(x).isnan().any()


def test_what_cannot_be_fused_is_computed_apart_and_frozen_weights_get_no_gradient() -> None:
    layer, x = BiasedLinear(8, 4).bfloat16(), torch.ones(2, 3, 8, dtype=torch.bfloat16)
    use_backend(layer, CpuBackend())
    assert not can_fuse(x, layer.weight) and layer(x).shape == (2, 3, 4)
    layer.weight.requires_grad_(False)
    layer(x[0]).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None
    layer.float()
    assert not can_fuse(x[0], layer.weight) and not can_fuse(x[0].float(), layer.weight)
    with raises(RuntimeError, match="dtype"):
        layer(x[0])
