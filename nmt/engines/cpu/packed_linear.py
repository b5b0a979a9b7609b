"""torch's search with the matrices of linear layers in oneDNN's layout.

torch would convert the layout in every product, and so read each matrix twice, which for a few rows
is most of the time. The bias is added before the product leaves the registers, and so are the
activations of FUSED. Any other is computed as the model computes it. ReLU is among those: oneDNN's would
turn NaN into 0, and a broken model would translate in silence.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nmt.model.feed_forward import ActivatedLinear, BiasedLinear, apply_activation
from nmt.model.transformer import Transformer
from nmt.system.device import has_bf16_products
from nmt.translate.engine import SearchEngine

# The layout is chosen for this many rows. It serves any number, but one chosen for a single row is slow.
LAYOUT_ROWS = 16
# The activations that oneDNN computes, each with its algorithm; GELU is GELU itself, not its approximation.
FUSED = {"swish": "", "gelu": "none"}


class PackedEngine(SearchEngine):
    @torch.inference_mode()
    def prepare(self, model: Transformer, is_bf16: bool) -> Transformer:
        model = super().prepare(model, is_bf16)
        replace_linears(model, PackedLinear)
        return model


def find_fault_of_packing(is_bf16: bool) -> str | None:
    """Say why this processor or this torch cannot use oneDNN's layout; None if it can."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if is_bf16 and not has_bf16_products():
        return "this processor does not multiply bf16"
    return None


class PackedLinear(nn.Module):
    """A linear layer, with the activation that follows it if it has one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.activation = find_activation(linear)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.activation if self.activation in FUSED else "none"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, fused, [], FUSED.get(fused, "")
        )
        return y if fused == self.activation else apply_activation(y, self.activation)


def replace_linears(model: nn.Module, make_layer: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the linear layers of a model, in place, so that each frees its weights before the next is made."""
    kinds = (nn.Linear, BiasedLinear, ActivatedLinear)
    # Only the modules around the layers are kept here: a layer that is kept would not free its weights.
    owners = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) in kinds
    ]
    for module, name in owners:
        setattr(module, name, make_layer(getattr(module, name)))


def count_layer_weights(model: Transformer) -> int:
    """Count the weights of a layer of the decoder."""
    return sum(weight.numel() for weight in model.decoder[0].parameters())


def find_activation(linear: nn.Linear) -> str:
    return linear.activation if isinstance(linear, ActivatedLinear) else "none"
