"""Checkpoints: folders that are complete or absent, verified on the way in, never unpickled, and self-contained.

`model.safetensors` holds each weight once (tied ones too), `optimizer.safetensors` Adam's moments by the weight's name,
`state.json` the few integers that training continues from; `config.yaml` and `vocab.model` make the folder translate
anywhere; `manifest.json` has the sha256 of each. An average is the same without the optimizer.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nmt.config import RunConfig, dump, load_config
from nmt.data.plan import Cursor
from nmt.errors import UserError
from nmt.files import MANIFEST, RunFolder, point, read_json, remove_folder, verify, write_folder, write_json, write_text
from nmt.progress import say

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
CONFIG, VOCAB = "config.yaml", "vocab.model"
PARTS = (MODEL, STATE, CONFIG, VOCAB)  # of every checkpoint; training adds the optimizer


@dataclass(frozen=True)
class TrainState:
    """All that training continues from, beside weights and moments."""

    step: int = 0  # updates done
    cursor: Cursor = Cursor()
    tokens_seen: int = 0  # target tokens
    best: float | None = None  # the dev score of the best checkpoint, higher is better
    best_step: int = 0
    elapsed_s: float = 0.0  # of training, validation and saving, over all sittings
    metrics_bytes: int = 0  # how much of metrics.jsonl belongs to it


@dataclass(frozen=True)
class Checkpoint:
    """A verified folder."""

    path: Path
    config: RunConfig
    vocab_model: bytes
    state: dict[str, Any]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Adam, state: TrainState, config: RunConfig,
         vocab_model: bytes) -> None:
    """Write the folder `path`: complete or absent."""
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    moments = {f"{key}.{name}": value.detach().cpu().contiguous() for name, p in model.named_parameters()
               for key, value in optimizer.state[p].items()}

    def fill(folder: Path) -> None:
        save_file(moments, folder / OPTIMIZER)
        _fill(folder, weights, asdict(state), config, vocab_model)

    write_folder(path, fill)


def _fill(folder: Path, weights: dict[str, Tensor], state: dict[str, Any], config: RunConfig, vocab: bytes) -> None:
    save_file(weights, folder / MODEL, metadata={"format": "pt"})
    write_json(folder / STATE, state)
    write_text(folder / CONFIG, dump(config))
    (folder / VOCAB).write_bytes(vocab)


def load(path: Path) -> Checkpoint:
    """Open a checkpoint folder, or the newest one of a run folder, after comparing each file with the manifest."""
    if (path / "checkpoints").is_dir():
        found = newest(RunFolder(path))
        if found is None:
            raise UserError(f"{path}: this run has no checkpoint yet")
        return found
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint folder; give RUN, RUN/average or RUN/checkpoints/step-...")
    verify(path, PARTS)
    return Checkpoint(path, load_config(str(path / CONFIG)), (path / VOCAB).read_bytes(), read_json(path / STATE))


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the weights into `model`; names and shapes must be those of the config."""
    _copy(checkpoint.path / MODEL, dict(model.named_parameters()))


def load_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Adam) -> TrainState:
    """Copy Adam's moments into `optimizer` and return where training stood."""
    slots: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        state = {"step": torch.zeros((), device=p.device),
                 "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p] = state
        slots |= {f"{key}.{name}": value for key, value in state.items()}
    _copy(checkpoint.path / OPTIMIZER, slots)
    return TrainState(**checkpoint.state | {"cursor": Cursor(**checkpoint.state["cursor"])})


@torch.no_grad()
def _copy(path: Path, targets: dict[str, Tensor]) -> None:
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            for name in sorted(names ^ targets.keys()):
                raise UserError(f"{path}: {'lacks' if name in targets else 'has a stray'} tensor {name}; "
                                "it does not belong to this config")
            for name, target in targets.items():
                shape = list(file.get_slice(name).get_shape())
                if shape != list(target.shape):
                    raise UserError(f"{path}: tensor {name} has shape {shape}, "
                                    f"the config asks for {list(target.shape)}")
                target.copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def steps(run: RunFolder) -> list[int]:
    """The updates of which there are checkpoints, ascending."""
    names = [p.name for p in run.checkpoints.iterdir()] if run.checkpoints.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{7,})", name)))


def newest(run: RunFolder) -> Checkpoint | None:
    """The newest checkpoint that verifies; None if there is none at all, an error if all are damaged."""
    found = steps(run)
    for step in reversed(found):
        try:
            verify(run.checkpoint(step), PARTS)
        except UserError as error:
            say(f"warning: {error}; trying the one before")
        else:
            return load(run.checkpoint(step))
    if found:
        raise UserError(f"{run.checkpoints}: all {len(found)} checkpoints are damaged; "
                        "restore one or choose another out=DIR")
    return None


def prune(run: RunFolder, keep: int, best_step: int) -> None:
    """Remove all but the newest `keep` and the best."""
    for step in steps(run)[:-keep]:
        if step != best_step:
            remove_folder(run.checkpoint(step))


def name_checkpoint(run: RunFolder, name: str, step: int) -> None:
    """Let `checkpoints/NAME` (last, best) lead to that step's folder."""
    point(run.checkpoints / name, run.checkpoint(step).name)


def average(paths: Sequence[Path], out: Path) -> None:
    """Write the fp32 mean of the checkpoints' weights to `out`; of each file, one tensor at a time is in memory."""
    out = out.resolve()
    if os.path.lexists(out) and not _is_average(out):
        raise UserError(f"{out}: exists and is not just an average; choose another -o DIR, nothing was changed")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("the same checkpoint is given twice; give each once")
    checkpoints = [load(path) for path in paths]
    first = checkpoints[0]
    for other in checkpoints[1:]:
        if other.vocab_model != first.vocab_model:
            raise UserError(f"{other.path}: has another BPE model than {first.path}; "
                            "only one run's checkpoints average")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(checkpoint.path / MODEL, "pt")) for checkpoint in checkpoints]
        shapes = [{name: file.get_slice(name).get_shape() for name in file.keys()} for file in files]
        for checkpoint, these in zip(checkpoints, shapes, strict=True):
            for name in sorted({**these, **shapes[0]}):
                if these.get(name) != shapes[0].get(name):
                    raise UserError(f"{checkpoint.path}: tensor {name} is {these.get(name)}, in {first.path} it is "
                                    f"{shapes[0].get(name)}; only one run's checkpoints average")
        means = {name: sum((file.get_tensor(name).float() for file in files), torch.zeros(())) / len(files)
                 for name in shapes[0]}
    state = {"averaged": [str(c.path.name) for c in checkpoints], "step": max(c.state["step"] for c in checkpoints)}
    write_folder(out, lambda folder: _fill(folder, means, state, first.config, first.vocab_model))


def _is_average(folder: Path) -> bool:
    """Whether `folder` is what `average` wrote and nothing else: then it may be replaced."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or names == {MANIFEST, *PARTS} and "averaged" in read_json(folder / STATE)
