"""Models as the engines of a CPU read them. The models themselves stay as they are."""

from nmt.model.decoding_copy import copy_sharing_weights
from nmt.model.transformer import Transformer
from nmt.translate.engine import SearchEngine


def prepare_for_torch(model: Transformer, is_bf16: bool = False) -> Transformer:
    """Return a copy with packed matrices, if there is that engine and this processor can use it."""
    return _choose(is_bf16).prepare(copy_sharing_weights(model), is_bf16)


def _choose(is_bf16: bool) -> SearchEngine:
    try:
        from nmt.engines.cpu.packed_linear import PackedEngine, find_fault_of_packing
    except ModuleNotFoundError:  # a copy without engines
        return SearchEngine()
    return PackedEngine() if find_fault_of_packing(is_bf16) is None else SearchEngine()
