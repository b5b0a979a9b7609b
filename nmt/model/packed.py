"""A model made ready for decoding: on CPU each matrix laid out once as oneDNN wants it, in bf16 if asked for.

Laid out by torch itself a matrix is read twice in each product, which for a few rows is most of the time. Bias and ReLU
are done where the product leaves the registers. The result computes what the model computes; it cannot be trained.
"""

import copy

import torch
from torch import Tensor, nn

from nmt.model.transformer import Rectified, Transformer

ROWS = 16  # what the layout is chosen for; it serves any number, but one made for a single row is slow in fp32


class Packed(nn.Module):
    """A linear layer, with the ReLU that follows it if it has one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.after = "relu" if isinstance(linear, Rectified) else "none"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.after, [], "")
        return y


@torch.inference_mode()
def packed(model: Transformer, is_bf16: bool) -> Transformer:
    """A copy for decoding; `model` stays as it is, and is itself the answer where there is nothing to gain."""
    is_on_cpu = model.projection.weight.device.type == "cpu"
    can_pack = is_on_cpu and torch.backends.mkldnn.is_available() and model.projection.weight.dtype == torch.float32
    if not (is_bf16 or can_pack):
        return model
    ready = copy.deepcopy(model).eval()
    if is_bf16:
        ready.bfloat16()
    if can_pack:
        for module in list(ready.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Packed(child))
    return ready
