"""A model made ready for decoding: on CPU each matrix laid out once as oneDNN wants it, in bf16 if asked for.

Laid out by torch itself a matrix is read twice in each product, which for a few rows is most of the time. Bias and ReLU
are done where the product leaves the registers. The result computes what the model computes; it cannot be trained.
"""

import torch
from torch import Tensor, nn

from nmt.model.transformer import ReluLinear, Transformer

LAYOUT_ROWS = 16  # what the layout is chosen for; it serves any number, but one made for a single row is slow in fp32


class CpuLinear(nn.Module):
    """A linear layer, with the ReLU that follows it if it has one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), LAYOUT_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.after = "relu" if isinstance(linear, ReluLinear) else "none"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.after, [], ""
        )
        return y


@torch.inference_mode()
def prepare_for_decoding(model: Transformer, is_bf16: bool) -> Transformer:
    """The model for decoding, which shares what it can with `model`; that one itself where there is nothing to gain."""
    weight = model.projection.weight
    can_pack = (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and (not is_bf16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
    if not (is_bf16 or can_pack):
        return model
    with torch.device("meta"):
        ready = Transformer(model.config, weight.shape[0]).eval()
    ready.load_state_dict(model.state_dict(), assign=True)
    for mine, its in (
        (ready.src_positions, model.src_positions),
        (ready.tgt_positions, model.tgt_positions),
    ):
        if (
            not mine.is_learned
        ):  # a learned table came with the weights; the model's own must not become bf16
            mine.table = its.table
    if is_bf16:
        ready.bfloat16()
    if can_pack:
        for module in list(ready.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, CpuLinear(child))
    return ready
