"""Models as the engines of a CPU read them. The models themselves stay as they are."""

from nmt.engines.cpu.packed_linear import PackedEngine, find_fault_of_packing
from nmt.model.decoding_copy import copy_sharing_weights
from nmt.model.transformer import Transformer
from nmt.translate.engine import SearchEngine


def prepare_for_torch(model: Transformer, is_bf16: bool = False) -> Transformer:
    """Return a copy with packed matrices, if this processor can use them."""
    engine = PackedEngine() if find_fault_of_packing(is_bf16) is None else SearchEngine()
    return engine.prepare(copy_sharing_weights(model), is_bf16)
