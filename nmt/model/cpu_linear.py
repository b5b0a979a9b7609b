"""A copy of a model, prepared for decoding: on the CPU its matrices are in oneDNN's layout; in bf16 if
asked for, on a GPU too.

torch would convert the layout in every product, and so read each matrix twice, which for a few rows
is most of the time. Bias and activation are applied before the product leaves the registers. The copy
computes what the model computes, but it cannot be trained. For searches that are compiled
(nmt/translate/cpu_search.py) it can be packed another way.
"""

import importlib.util
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nmt.model.linear import ActivatedLinear
from nmt.model.transformer import Transformer
from nmt.model.weightless import without_weights

if TYPE_CHECKING:
    from nmt.engines.cpu.compiled_layers import CompiledModel

# The layout is chosen for this many rows. It serves any number, but one chosen for a single row is slow.
LAYOUT_ROWS = 16
HAS_NUMBA = importlib.util.find_spec("numba") is not None


class CpuLinear(nn.Module):
    """A linear layer, with the activation that follows it if it has one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.activation = linear.activation if isinstance(linear, ActivatedLinear) else "none"
        self.algorithm = (
            "none" if self.activation == "gelu" else ""
        )  # GELU itself, not its approximation

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if (
            not weight.is_mkldnn
        ):  # not before it is used, because a compiled search has its own layout
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
            self.weight = weight
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, weight, self.bias, self.activation, [], self.algorithm
        )
        return y


class DecodingTransformer(Transformer):
    """A model for decoding. Its linear layers may be packed; `source` has their weights in fp32."""

    def set_source(self, source: Transformer, is_bf16: bool, is_compilable: bool) -> None:
        self.source_holder = (source,)  # in a tuple, because it is no part of this module
        self.is_bf16 = is_bf16
        self.is_compilable = is_compilable and HAS_NUMBA

    @property
    def source(self) -> Transformer:
        return self.source_holder[0]

    @cached_property
    def compiled(self) -> "CompiledModel":
        """The weights for a compiled search."""
        from nmt.engines.cpu.compiled_layers import CompiledModel

        return CompiledModel(self.source, self.is_bf16)


@torch.inference_mode()
def prepare_for_decoding(model: Transformer, is_bf16: bool) -> Transformer:
    """Return a copy for decoding, or `model` itself if nothing can be gained.

    The copy shares what it can, and lays out the rest when it is first used, so the weights of `model` must
    not change as long as the copy is used.
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
    with without_weights():
        ready = DecodingTransformer(model.config, *model.sizes).eval()
    ready.set_source(model, is_bf16, is_compilable=can_pack)
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
