"""A copy of a model, prepared for decoding: on the CPU its matrices are in oneDNN's layout; in bf16 if
asked for, on a GPU too.

torch would convert the layout in every product, and so read each matrix twice, which for a few rows
is most of the time. Bias and activation are applied before the product leaves the registers. The layers
of a small model are compiled for single sentences and few hypotheses (`compiled_layers.py`). The copy
computes what the model computes, but it cannot be trained.
"""

import importlib.util
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nmt.data.batch import Packed
from nmt.model.cache import Cache, Step
from nmt.model.linear import ActivatedLinear
from nmt.model.transformer import Transformer
from nmt.system.progress import say

if TYPE_CHECKING:
    from nmt.model.compiled_layers import CompiledLayers

# The layout is chosen for this many rows. It serves any number, but one chosen for a single row is slow.
LAYOUT_ROWS = 16
HAS_NUMBA = importlib.util.find_spec("numba") is not None
# Where compiled layers are faster: few hypotheses, a lone source of few pieces, and as many weights of a
# layer as a core's own cache holds.
MAX_COMPILED_HYPOTHESES = 16
MAX_COMPILED_PIECES = 128
MAX_COMPILED_WEIGHTS = 1 << 20
# Loading compiled code costs a process that translates little more than it gains. About 600 single
# sentences take this many steps.
STEPS_BEFORE_COMPILING = 10_000


class CpuLinear(nn.Module):
    """A linear layer, with the activation that follows it if it has one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), LAYOUT_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.activation = linear.activation if isinstance(linear, ActivatedLinear) else "none"
        self.algorithm = (
            "none" if self.activation == "gelu" else ""
        )  # GELU itself, not its approximation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.activation, [], self.algorithm
        )
        return y


class DecodingTransformer(Transformer):
    """A model for decoding. Its linear layers may be packed; `source` has their weights."""

    def set_source(self, source: Transformer, can_compile: bool) -> None:
        self.source_holder = (source,)  # in a tuple, because it is no part of this module
        layer = source.decoder[0]
        n_weights = sum(weight.numel() for weight in layer.parameters())
        self.is_compilable = can_compile and HAS_NUMBA and n_weights <= MAX_COMPILED_WEIGHTS
        self.n_small_steps = 0

    @cached_property
    def compiled_layers(self) -> "CompiledLayers":
        from nmt.model.compiled_layers import CompiledLayers

        return CompiledLayers(self.source_holder[0])

    def is_worth_compiling(self) -> bool:
        return self.is_compilable and self.n_small_steps > STEPS_BEFORE_COMPILING

    def try_compiled(self, compute: Callable[["CompiledLayers"], Tensor]) -> Tensor | None:
        """Compute with the compiled layers. Return None if numba fails, for example with this numpy or
        on damaged compiled code, and never try again.
        """
        try:
            return compute(self.compiled_layers)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            say(f"warning: the layers cannot be compiled ({reason}); decoding goes on more slowly")
            self.is_compilable = False
            return None

    def encode_layers(self, x: Tensor, src: Packed, weights: list[Tensor] | None) -> Tensor:
        is_lone = src.n_sentences == 1 and len(x) == src.longest <= MAX_COMPILED_PIECES
        if is_lone and weights is None and self.is_worth_compiling():
            encoded = self.try_compiled(lambda layers: layers.encode(x))
            if encoded is not None:
                return encoded
        return super().encode_layers(x, src, weights)

    def step_layers(self, x: Tensor, step: Step) -> Tensor:
        cache = step.cache
        if len(x) <= MAX_COMPILED_HYPOTHESES and isinstance(cache, Cache):
            self.n_small_steps += 1
            if self.is_worth_compiling():
                decoded = self.try_compiled(lambda layers: layers.step(x, cache))
                if decoded is not None:
                    return decoded
        return super().step_layers(x, step)


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
        ready = DecodingTransformer(model.config, *model.sizes).eval()
    ready.set_source(model, can_compile=can_pack and not is_bf16)
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
