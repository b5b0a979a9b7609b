"""The tensors of a checkpoint: which it must have, and reading them.

A header is checked before any tensor is read, against the names and shapes that the config implies. So a
stranger's file can ask for no memory that the model would not need.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nmt.config import ModelConfig, RunConfig
from nmt.model.moments import WEIGHT_BYTES, choose_moments
from nmt.model.size import count_model_bytes
from nmt.model.transformer import Transformer
from nmt.model.weightless import without_weights
from nmt.system.errors import UserError
from nmt.system.files import open_plain_file
from nmt.system.memory import find_memory_limit, format_memory
from nmt.system.tensor_files import Tensors

NamedShape = tuple[str, list[int]]  # of a weight
MAX_HEADER_BYTES = 8 << 20  # of safetensors: enough for hundreds of layers


def list_weight_shapes(
    config: ModelConfig, vocab_sizes: tuple[int, int], path: Path
) -> Iterator[NamedShape]:
    """Yield the name and shape of each weight that the config in `path` implies.

    A hostile config may ask for millions of layers, so only one layer is built and nothing is
    collected in a list.
    """
    n_bytes = count_model_bytes(config, vocab_sizes, WEIGHT_BYTES)
    limit = find_memory_limit()
    if n_bytes > limit.n_bytes:  # sinusoids take memory, and no file has them
        raise UserError(
            f"{path}: model: it would take {format_memory(n_bytes)}, and there are at most "
            f"{format_memory(limit.n_bytes)} ({limit.name}); use another copy"
        )
    try:
        with without_weights():
            one_layer = replace(config, n_layers=1, encoder_layers=None, decoder_layers=None)
            model = Transformer(one_layer, *vocab_sizes)
    except UserError as error:
        raise UserError(f"{path}: {error}; use another copy") from None
    except (RuntimeError, TypeError):
        raise UserError(
            f"{path}: model: its sizes are too large for a tensor; use another copy"
        ) from None
    for name, p in model.named_parameters():
        side, _, rest = name.partition(".0.")
        if not rest:  # it belongs to no layer
            yield name, list(p.shape)
            continue
        for layer in range(config.encoder_depth if side == "encoder" else config.decoder_depth):
            yield f"{side}.{layer}.{rest}", list(p.shape)


def list_moment_shapes(
    config: RunConfig, weight_shapes: Iterable[NamedShape]
) -> Iterator[NamedShape]:
    for name, shape in weight_shapes:
        yield f"step.{name}", []
        for key in choose_moments(config.optimizer, name, shape).names:
            yield f"{key}.{name}", shape
        if config.training.ema is not None:
            yield f"weight.{name}", shape


@contextlib.contextmanager
def open_tensors(path: Path, framework: str) -> Iterator[Any]:
    """Open a safetensors file, reading its header but no tensors."""
    try:
        with open_plain_file(path) as file:
            n_bytes = int.from_bytes(file.read(8), "little")
        if n_bytes > MAX_HEADER_BYTES:
            raise UserError(
                f"{path}: not a safetensors file, or its header is damaged ({n_bytes} bytes long); "
                "use another copy"
            )
        with safe_open(path, framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); use another copy") from None


def check_tensors(path: Path, expected: Iterable[NamedShape]) -> None:
    """Raise UserError unless a file's header lists exactly the `expected` names and shapes, all in
    fp32.
    """
    # "numpy", because with "pt" the kernel would have to commit memory for the whole file.
    with open_tensors(path, "numpy") as file:
        remaining = set(file.keys())
        for name, shape in expected:
            if name not in remaining:
                raise UserError(
                    f"{path}: tensor {name} is missing, so the file is damaged or does not match "
                    "its config; use another copy"
                )
            remaining.remove(name)
            tensor = file.get_slice(name)
            found_shape, dtype = tensor.get_shape(), tensor.get_dtype()
            if found_shape != shape:
                raise UserError(
                    f"{path}: tensor {name} has shape {found_shape}, "
                    f"but the config and the vocabulary require {shape}; use another copy"
                )
            if dtype != "F32":
                raise UserError(
                    f"{path}: tensor {name} has type {dtype} instead of F32; use another copy"
                )
        if remaining:
            raise UserError(
                f"{path}: has an unexpected tensor {min(remaining)}, so the file is damaged or does not "
                "match its config; use another copy"
            )


@torch.no_grad()
def copy_tensors(path: Path, targets: Tensors) -> None:
    """Fill tensors from a file that has them by these names."""
    with open_tensors(path, "pt") as file:
        for name, target in targets.items():
            tensor = file.get_tensor(name)
            check_finite(tensor, name, path)
            target.copy_(tensor)


def check_finite(tensor: Tensor, name: str, path: Path) -> None:
    """Refuse a tensor with a NaN or an infinity: a search may never meet it, and translate in silence."""
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise UserError(
            f"{path}: tensor {name} has a weight that is NaN or infinite; use another checkpoint"
        )
