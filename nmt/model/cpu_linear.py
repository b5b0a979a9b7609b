"""A model prepared for decoding on the CPU: matrices in oneDNN's layout, in bf16 if asked for.

torch would convert the layout in every product, and so read each matrix twice, which for a few rows
is most of the time. Bias and activation are applied before the product leaves the registers. The result
computes what the model computes, but it cannot be trained.
"""

import torch
from torch import Tensor, nn

from nmt.model.transformer import ActivatedLinear, Transformer

LAYOUT_ROWS = (
    16  # the layout is chosen for so many; it serves any number, but one for a single row is slow
)


class CpuLinear(nn.Module):
    """A linear layer, with the activation that follows it if it has one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), LAYOUT_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.after = linear.activation if isinstance(linear, ActivatedLinear) else "none"
        self.how = "none" if self.after == "gelu" else ""  # GELU itself, not its approximation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.after, [], self.how
        )
        return y


@torch.inference_mode()
def prepare_for_decoding(model: Transformer, is_bf16: bool) -> Transformer:
    """Return a copy for decoding, which shares what it can with `model`, or `model` itself if
    nothing can be gained.
    """
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
        ready = Transformer(model.config, *model.sizes).eval()
    ready.load_state_dict(model.state_dict(), assign=True)
    for mine, its in (
        (ready.src_positions, model.src_positions),
        (ready.tgt_positions, model.tgt_positions),
    ):
        # A learned table came with the weights. Sinusoids are shared, and must not become bf16.
        if not mine.is_learned:
            mine.table = its.table
    if is_bf16:
        ready.bfloat16()
    if can_pack:
        for module in list(ready.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, CpuLinear(child))
    return ready
