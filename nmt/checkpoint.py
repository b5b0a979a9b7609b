"""Checkpoints: folders that are complete or absent, verified on the way in, never unpickled, and self-contained.

`model.safetensors` holds each weight once (tied ones too), `optimizer.safetensors` Adam's moments by the weight's name,
`state.json` the few integers that training continues from; `config.yaml` and `vocab.model` make the folder translate
anywhere; `manifest.json` has the sha256 of each. An average (nmt/average/mean.py) is the same without the optimizer.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nmt.config import MAX_CONFIG_BYTES, ModelConfig, RunConfig, differences, dump, load_config
from nmt.data.plan import Cursor
from nmt.data.vocab import Vocab
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.system.files import (
    point,
    read_json,
    read_manifest,
    remove_folder,
    verify,
    write_folder,
    write_json,
    write_text,
)
from nmt.system.progress import say
from nmt.system.ranks import put, whole
from nmt.system.run_folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    VOCAB_FILE,
    RunFolder,
)
from nmt.system.strict_yaml import parse_yaml

# Of every checkpoint; training adds the optimizer.
PARTS = (MODEL_FILE, STATE_FILE, CONFIG_FILE, VOCAB_FILE)
SMALL = {
    STATE_FILE: 1 << 20,
    CONFIG_FILE: MAX_CONFIG_BYTES,
    VOCAB_FILE: 8 << 20,
}  # how many bytes each may have: they are read whole
FLOATS = ("F32", "BF16", "F16")  # of safetensors; what is not for a mean is of the first
AVERAGE = {
    "averaged": list[str],
    "step": int,
    "elapsed_s": list[float],
    "weights": list[float],
}  # the state of one
NEEDED = (
    "averaged",
    "step",
)  # of these; the others are training seconds and share of each, where there are such
MAX_HEADER_BYTES = 8 << 20  # of safetensors: hundreds of layers


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
    validated: int = 0  # the last update after which the dev set was scored
    skipped: int = 0  # updates up to this one that were not applied, in a row
    window_loss: float = 0.0  # sums since the last log line
    window_nll: float = 0.0
    window_tokens: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A verified folder."""

    path: Path
    config: RunConfig
    vocab_model: bytes
    state: dict[str, Any]
    sha256: dict[str, str]  # of its files, as its manifest had them when it was opened


@dataclass(frozen=True)
class Snapshot:
    """The tensors of a checkpoint by name, each whole."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]  # of Adam, by the weight's name

    @property
    def size(self) -> int:
        return sum(
            value.nbytes for tensors in (self.weights, self.moments) for value in tensors.values()
        )


def snapshot(model: nn.Module, optimizer: torch.optim.Adam, is_main: bool = True) -> Snapshot:
    """The tensors as they are, not copied. All ranks take part, for each may hold but a share; then one tensor after
    the other is made whole and goes to the host of the main rank."""

    def taken(tensor: Tensor) -> Tensor:
        share = tensor.detach()
        full = whole(share)
        return full if full is share else full.cpu() if is_main else full.new_empty(0)

    weights = {name: taken(p) for name, p in model.named_parameters()}
    moments = {
        f"{key}.{name}": taken(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return Snapshot(weights, moments)


def save(
    path: Path, snapshot: Snapshot, state: TrainState, config: RunConfig, vocab_model: bytes
) -> None:
    """Write the folder `path`: complete or absent."""

    def fill(folder: Path) -> None:
        save_file(_on_host(snapshot.moments), folder / OPTIMIZER_FILE)
        save_file(_on_host(snapshot.weights), folder / MODEL_FILE, metadata={"format": "pt"})
        write_small(folder, asdict(state), config, vocab_model)

    write_folder(path, fill)


def write_small(folder: Path, state: dict[str, Any], config: RunConfig, vocab: bytes) -> None:
    """What a checkpoint has beside its tensors."""
    write_json(folder / STATE_FILE, state)
    write_text(folder / CONFIG_FILE, dump(config))
    (folder / VOCAB_FILE).write_bytes(vocab)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu().contiguous() for name, value in tensors.items()}


def load(path: Path) -> Checkpoint:
    """Open a checkpoint folder, or the newest one of a run folder, once it can be trusted."""
    if (path / "checkpoints").is_dir():
        try:
            found = newest(RunFolder(path))
        except Failure as error:
            raise UserError(str(error)) from None
        if found is None:
            raise UserError(f"{path}: this run has no checkpoint yet")
        return found
    if not path.is_dir():
        raise UserError(
            f"{path}: no such checkpoint folder; give RUN, RUN/average or RUN/checkpoints/step-..."
        )
    return _open(path)


def load_for_mean(path: Path) -> Checkpoint:
    """The same for a mean: the weights may be of 16 bits, and of training's moments no more than their size is read."""
    if not path.is_dir() or (path / "checkpoints").is_dir():
        path = load(path).path
    if path.is_symlink():
        path = path.resolve()  # best and last may move before the weights are read
    checkpoint = _look_into(path, FLOATS)
    verify(path, only=PARTS)
    return checkpoint


def _open(path: Path) -> Checkpoint:
    """Compare each file with the manifest, and names, shapes and types of tensors with the config."""
    checkpoint = _look_into(path)
    verify(path)  # last what takes long: a second for each gigabyte or two
    return checkpoint


def _look_into(path: Path, types: Sequence[str] = FLOATS[:1]) -> Checkpoint:
    """All that can be checked before a tensor is read."""
    entries = read_manifest(path)
    for name, entry in entries.items():
        if name not in (*PARTS, OPTIMIZER_FILE):
            raise UserError(
                f"{path / MANIFEST_FILE}: names {name}, which is no part of a checkpoint; use another copy"
            )
        if entry["size"] > SMALL.get(name, 2**63):
            raise UserError(f"{path / name}: {entry['size']} bytes are too many; use another copy")
    verify(path, PARTS, only=SMALL)
    state = read_state(path)
    config = _read_config(path / CONFIG_FILE)
    vocab = Vocab.load(path / VOCAB_FILE)
    shapes = partial(_shapes, config.model, vocab.size, path / CONFIG_FILE)
    _compare(path / MODEL_FILE, shapes(), types)
    if "averaged" not in state:
        verify(path, (OPTIMIZER_FILE,), only=())
        _compare(
            path / OPTIMIZER_FILE,
            (
                (f"{key}.{name}", [] if key == "step" else shape)
                for name, shape in shapes()
                for key in ("step", "exp_avg", "exp_avg_sq")
            ),
        )
    return Checkpoint(
        path, config, vocab.model, state, {name: entry["sha256"] for name, entry in entries.items()}
    )


def _read_config(path: Path) -> RunConfig:
    """The config, which must stand by itself: another file could be anything on this machine."""
    try:
        source = parse_yaml(path.read_bytes().decode(errors="replace"), str(path))
        if "extends" in source.values:
            raise UserError(
                f"{source.places['extends']}: extends: the config of a checkpoint stands by itself; "
                "use another copy"
            )
        return load_config(str(path))
    except UserError as error:
        raise UserError(
            str(error)[: len(str(path)) + 300]
        ) from None  # a stranger's values may be long


def read_state(folder: Path) -> dict[str, Any]:
    """The state of training, or what an average says of itself; nothing missing, nothing more."""
    path = folder / STATE_FILE
    state = read_json(path)
    if not isinstance(state, dict):
        raise UserError(f"{path}: is no mapping; damaged, use another copy")
    is_average = "averaged" in state
    hints = AVERAGE if is_average else get_type_hints(TrainState)
    for key in (*hints, *state):
        if is_average and key in hints and key not in state and key not in NEEDED:
            continue
        if key not in hints or key not in state or not _fits(state[key], hints[key]):
            what = (
                "unknown"
                if key not in hints
                else "missing"
                if key not in state
                else "no value of its kind"
            )
            raise UserError(
                f"{path}: {ascii(key[:99])} is {what}; damaged, or of another version of nmt"
            )
        if is_average and key != "step" and len(state[key]) != len(state["averaged"]):
            raise UserError(
                f"{path}: {key} has {len(state[key])} values for {len(state['averaged'])} checkpoints; "
                "damaged, use another copy"
            )
    for place in {folder.name, folder.resolve().name}:
        match = re.fullmatch(r"step-([0-9]{7,})", place)
        if match and int(match[1]) != state["step"]:
            raise UserError(
                f"{path}: is of step {state['step']}; files or folders were exchanged, use another copy"
            )
    return state


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is what a field of `TrainState` may hold."""
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return (
            isinstance(value, dict)
            and value.keys() == hints.keys()
            and all(_fits(value[key], hints[key]) for key in hints)
        )
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if options := get_args(hint):
        return any(_fits(value, option) for option in options)
    if hint is int:
        return type(value) is int and 0 <= value < 2**63
    if hint is float:
        return type(value) in (int, float) and abs(value) < 2**63  # not NaN, not infinite
    return type(value) is hint


def _shapes(config: ModelConfig, vocab_size: int, path: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the weights that the config in `path` asks for, one by one: they may be absurdly many."""
    try:
        with torch.device("meta"):  # takes no memory
            model = Transformer(replace(config, n_layers=1), vocab_size)
    except (RuntimeError, TypeError):
        raise UserError(f"{path}: model: no tensor can be that large; use another copy") from None
    for name, p in model.named_parameters():
        side, _, rest = name.partition(".0.")
        for layer in range(config.n_layers if rest else 1):
            yield f"{side}.{layer}.{rest}" if rest else name, list(p.shape)


@contextlib.contextmanager
def _tensors(path: Path, kind: str) -> Iterator[Any]:
    """An open safetensors file, whose header has been read and whose tensors have not."""
    try:
        with open(path, "rb") as file:
            n_bytes = int.from_bytes(file.read(8), "little")
        if n_bytes > MAX_HEADER_BYTES:
            raise UserError(
                f"{path}: no safetensors file, or its header is damaged ({n_bytes} bytes long); "
                "use another copy"
            )
        with safe_open(path, kind) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read: {ascii(str(error)[:199])[1:-1]}") from None


def _compare(
    path: Path, expected: Iterable[tuple[str, list[int]]], types: Sequence[str] = FLOATS[:1]
) -> None:
    """Hold a file's header against names and shapes of tensors, which are fp32 unless other types may be."""
    with _tensors(
        path, "numpy"
    ) as file:  # for torch it would promise the kernel memory for the whole file
        strays = set(file.keys())
        for name, shape in expected:
            if name not in strays:
                raise UserError(f"{path}: lacks tensor {name}; damaged, or not of this config")
            strays.remove(name)
            found = file.get_slice(name)
            if found.get_shape() != shape:
                raise UserError(
                    f"{path}: tensor {name} has shape {str(found.get_shape())[:99]}, "
                    f"the config and the vocabulary ask for {shape}"
                )
            if found.get_dtype() not in types:
                raise UserError(
                    f"{path}: tensor {name} is of type {found.get_dtype()}, not {' or '.join(types)}; "
                    "use another copy"
                )
        if strays:
            raise UserError(
                f"{path}: has a stray tensor {ascii(min(strays)[:99])[1:-1]}; "
                "damaged, or not of this config"
            )


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the weights into `model`; names and shapes must be those of the config."""
    _copy(checkpoint.path / MODEL_FILE, dict(model.named_parameters()))


def load_optimizer(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Adam
) -> TrainState:
    """Copy Adam's moments into `optimizer` and return where training stood."""
    slots: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        state = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
        optimizer.state[p] = state
        slots |= {f"{key}.{name}": value for key, value in state.items()}
    _copy(checkpoint.path / OPTIMIZER_FILE, slots)
    return TrainState(**checkpoint.state | {"cursor": Cursor(**checkpoint.state["cursor"])})


@torch.no_grad()
def _copy(path: Path, targets: dict[str, Tensor]) -> None:
    _compare(path, ((name, list(target.shape)) for name, target in targets.items()))
    with _tensors(path, "pt") as file:
        for name, target in targets.items():
            put(target, file.get_tensor(name))


def steps(run: RunFolder) -> list[int]:
    """The updates of which there are checkpoints, ascending."""
    names = [p.name for p in run.checkpoints.iterdir()] if run.checkpoints.is_dir() else []
    return sorted(
        int(match[1])
        for name in names
        if (match := re.fullmatch(r"step-([0-9]{7}|[1-9][0-9]{7,})", name))
    )


def newest(run: RunFolder, config: RunConfig | None = None) -> Checkpoint | None:
    """The newest checkpoint that can be trusted and, where `config` is given, continues its training; None if there is
    none at all, a failure if all are damaged."""
    found = steps(run)
    for step in reversed(found):
        path = run.checkpoint(step)
        try:
            checkpoint = _open(path)
            if "averaged" in checkpoint.state:
                raise UserError(
                    f"{path / STATE_FILE}: of an average, from which training cannot continue"
                )
            if config and (changes := differences(config, checkpoint.config)):
                raise UserError(f"{path / CONFIG_FILE}: of another run ({'; '.join(changes)})")
            return checkpoint
        except UserError as error:
            say(f"warning: {error}; trying the one before")
    if found:
        raise Failure(
            f"{run.checkpoints}: all {len(found)} checkpoints are damaged; "
            "restore one or choose another out=DIR"
        )
    return None


def found_by_main(run: RunFolder, step: int) -> Checkpoint:
    """The one that another rank has just verified."""
    return _look_into(run.checkpoint(step))


def prune(run: RunFolder, keep: int, best_step: int, last_step: int) -> None:
    """Remove all but the newest `keep` and the best; any after `last_step` are damaged, do not count, and will be
    replaced."""
    for step in [step for step in steps(run) if step <= last_step][:-keep]:
        if step != best_step:
            remove_folder(run.checkpoint(step))


def name_checkpoint(run: RunFolder, name: str, step: int) -> None:
    """Let `checkpoints/NAME` (last, best) lead to that step's folder."""
    point(run.checkpoints / name, run.checkpoint(step).name)
