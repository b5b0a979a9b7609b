"""Which engines train and search with a model on a device. The one place where engines are chosen.

With `decoding.compile=auto`, the search on a CPU is compiled in bf16, and in fp32 for models of base's
size or larger. Otherwise torch searches with packed matrices. On a GPU torch searches in large batches,
because the host launches as many kernels for a few sentences as for many.
"""

import functools
from collections.abc import Sequence

import torch

from nmt.config import DecodingConfig
from nmt.engines.cpu.backend import CpuBackend
from nmt.engines.cpu.packed_linear import (
    PackedEngine,
    count_layer_weights,
    find_fault_of_packing,
)
from nmt.model.backend import Backend
from nmt.model.transformer import Transformer
from nmt.system.extras import warn_uncompiled
from nmt.system.progress import say_once
from nmt.train.engine import TrainingEngine
from nmt.translate.engine import SearchEngine
from nmt.translate.search_rules import make_rules

# In fp32 the search of smaller models is not compiled: loading it takes a second, which is more than it
# saves on a test set. Base has 4M weights in a layer of the decoder, for which it is twice as fast.
MIN_FP32_WEIGHTS = 2 << 20
# Of a batch on a GPU: a test set in two, of which more would not be faster.
MOST_TOKENS = 131_072
# Numbers in the keys of a batch's sources: 65,536 pieces of base. In bf16 such a batch fits into 12 GB;
# with twice as many a test set would take a tenth less time (docs/benchmarks.md).
SOURCE_KEYS = 201_326_592


@functools.cache
def choose_backend(kind: str) -> Backend:
    """Return the backend of models on this kind of device."""
    if kind == "cuda":
        from nmt.engines.cuda.backend import CudaBackend

        return CudaBackend()
    return CpuBackend()


def choose_for_training(device: torch.device) -> TrainingEngine:
    backend = choose_backend(device.type)
    if device.type == "cpu":
        from nmt.engines.cpu.training import CpuTraining

        return CpuTraining(backend)
    from nmt.engines.cuda.training import RecordedTraining

    return RecordedTraining(backend)


def choose_for_search(
    models: Sequence[Transformer], config: DecodingConfig, device: torch.device
) -> SearchEngine:
    if device.type == "cuda":
        engine = SearchEngine()
        engine.batch_tokens = choose_batch_tokens(models)
    else:
        engine = choose_cpu_engine(models, config)
    engine.backend = choose_backend(device.type)
    return engine


def choose_batch_tokens(models: Sequence[Transformer]) -> int:
    """Choose the size of a batch on a GPU: by the models alone, whatever memory is free, so that
    results repeat on any GPU where it fits.
    """
    piece = sum(model.config.decoder_depth * model.config.d_model for model in models)
    return min(MOST_TOKENS, SOURCE_KEYS // piece)


def choose_cpu_engine(models: Sequence[Transformer], config: DecodingConfig) -> SearchEngine:
    is_bf16 = config.precision == "bf16"
    reason = find_fault_of_packing(is_bf16)
    if reason is not None:
        return SearchEngine()
    gains = is_bf16 or count_layer_weights(models[0]) >= MIN_FP32_WEIGHTS
    if config.compile == "off" or (config.compile == "auto" and not gains):
        return PackedEngine()
    try:
        from nmt.engines.cpu.compiled_search import (
            CompiledEngine,
            find_fault_of_compiler,
            supports,
        )
    except Exception as error:  # numba is missing, or too old for this processor
        warn_uncompiled(error)
        return PackedEngine()
    reason = supports(models, make_rules(config), is_bf16)
    if reason is not None:
        if config.compile == "on":
            say_once(f"searching with torch, because the search cannot be compiled: {reason}")
        return PackedEngine()
    fault = find_fault_of_compiler(is_bf16)
    if fault is not None:
        warn_uncompiled(fault)
        return PackedEngine()
    say_once("the search is compiled")
    return CompiledEngine()
