"""Linear layers with their bias and ReLU inside the product compute what they compute apart."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.model.linear import ActivatedLinear, BiasedLinear, can_fuse

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 on this processor"
)

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "swish": F.silu,
}


@needs_bf16
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(
    ("n_rows", "n_inputs", "n_outputs"), [(1, 8, 8), (37, 24, 40), (300, 64, 16)]
)
def test_a_fused_layer_and_its_gradients_are_those_of_the_formula(
    activation: str | None, n_rows: int, n_inputs: int, n_outputs: int
) -> None:
    torch.manual_seed(1)
    if activation is None:
        layer: BiasedLinear = BiasedLinear(n_inputs, n_outputs)
    else:
        layer = ActivatedLinear(n_inputs, n_outputs, activation)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(n_rows, n_inputs).bfloat16().requires_grad_()
    d_y = torch.randn(n_rows, n_outputs).bfloat16()
    assert can_fuse(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    gradients = torch.autograd.grad(y, [x, layer.weight, layer.bias], d_y)

    # in fp64, from the same rounded numbers
    inputs = x.detach().double().requires_grad_()
    weight = layer.weight.detach().bfloat16().double().requires_grad_()
    bias = layer.bias.detach().bfloat16().double().requires_grad_()
    exact_y = ACTIVATIONS[activation](F.linear(inputs, weight, bias))
    exact = torch.autograd.grad(exact_y, [inputs, weight, bias], d_y.double())

    assert y.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in gradients] == [x.dtype, torch.float32, torch.float32]
    for ours, theirs in zip([y, *gradients], [exact_y, *exact], strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 2**-7, error  # a rounding or two of bf16


def test_in_fp32_the_layer_is_exact() -> None:
    torch.manual_seed(2)
    layer, x = ActivatedLinear(16, 24, "relu"), torch.randn(5, 16)
    torch.nn.init.normal_(layer.bias)
    assert not can_fuse(x)
    exact = F.relu(F.linear(x.double(), layer.weight.double(), layer.bias.double()))
    assert torch.allclose(layer(x).double(), exact, atol=1e-6)
