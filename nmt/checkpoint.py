"""Checkpoints: folders that are complete or absent, verified when they are opened, never unpickled,
self-contained.

- `model.safetensors`: each weight once, even if it is tied; with `training.ema`, their moving averages.
- `optimizer.safetensors`: Adam's moments, by the name of the weight; with `training.ema`, also the weights.
  A checkpoint that is written soon after another may lack it: it is for averages, not to continue from.
- `state.json`: the few numbers that training resumes from.
- `config.yaml` and `vocab.model`, or one vocabulary for each side, so that no other file is needed.
- `manifest.json`: the sha256 of each file.
An average (nmt/average/mean.py) has no `optimizer.safetensors`, and its `state.json` lists the
checkpoints it was made from.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nmt.config import ModelConfig, RunConfig
from nmt.config_files import MAX_CONFIG_BYTES, format_config, list_differences, load_recorded_config
from nmt.data.plan import Cursor
from nmt.data.vocab import (
    MAX_MODEL_BYTES,
    Vocabulary,
    load_vocab,
    write_vocab,
)
from nmt.model.size import WEIGHT_BYTES, count_model_bytes
from nmt.model.transformer import Transformer
from nmt.model.weightless import without_weights
from nmt.system.errors import Failure, UserError, explain_missing
from nmt.system.files import (
    check_own_folder,
    has_plain_file,
    open_plain_file,
    point_link,
    read_json,
    read_manifest,
    read_status,
    verify,
    write_folder,
    write_json,
    write_text,
)
from nmt.system.memory import find_memory_limit, format_memory
from nmt.system.progress import say
from nmt.system.ranks import Share
from nmt.system.records import (
    COUNT,
    OF_ANOTHER_VERSION,
    RecordReader,
    default,
    leave_out_none,
    name_places_in,
)
from nmt.system.run_folder import (
    CONFIG_FILE,
    EXPORT_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    SIDE_VOCAB_FILES,
    STATE_FILE,
    VOCAB_FILE,
    RunFolder,
    find_vocab_files,
)
from nmt.system.tensor_files import Tensors, write_tensors

NamedShape = tuple[str, list[int]]  # of a weight

# The files of every checkpoint, beside those of its vocabulary; a training checkpoint also has
# OPTIMIZER_FILE.
COMMON_FILES = (MODEL_FILE, STATE_FILE, CONFIG_FILE)

# Small files are read into memory whole, so their size is limited in case one is damaged or
# hostile.
MAX_BYTES = {STATE_FILE: 1 << 20, CONFIG_FILE: MAX_CONFIG_BYTES}
MAX_BYTES |= dict.fromkeys((VOCAB_FILE, *SIDE_VOCAB_FILES), MAX_MODEL_BYTES)
MAX_HEADER_BYTES = 8 << 20  # of safetensors: enough for hundreds of layers
# Tensors with a row for each piece of the source's vocabulary, 0, or the target's, 1. One that is tied
# has its first name, and two sides share only one vocabulary.
SIDE_OF_ROWS = {
    "src_embedding.weight": 0,
    "tgt_embedding.weight": 1,
    "projection.weight": 1,
    "projection.bias": 1,
}


@dataclass(frozen=True)
class TrainState:
    """Everything that training resumes from, apart from weights and moments. Its fields are the
    keys of state.json.
    """

    step: int = default(0, COUNT)  # updates done
    cursor: Cursor = Cursor()
    tokens_seen: int = default(0, COUNT)  # target tokens
    best: float | None = None  # the dev score of the best checkpoint, higher is better
    best_step: int = default(0, COUNT)
    elapsed_s: float = 0.0  # training, validation and saving, over all starts of the run
    metrics_bytes: int = default(0, COUNT)  # the length of metrics.jsonl at this update
    validated: int = default(0, COUNT)  # the last update after which the dev set was scored
    skipped: int = default(0, COUNT)  # the latest updates in a row that were not applied
    store_sha256: str | None = None  # of the training data, as the ledger of its store has it
    kernels: str | None = None  # what computes attention on a CPU, which decides the last bits
    # sums since the last log line
    window_loss: float = 0.0
    window_nll: float = 0.0
    window_tokens: int = default(0, COUNT)

    @property
    def mean_loss(self) -> float:
        """Per target token since the last log line, as is `mean_nll`."""
        return self.window_loss / self.window_tokens

    @property
    def mean_nll(self) -> float:
        return self.window_nll / self.window_tokens


@dataclass(frozen=True)
class Average:
    """The checkpoints an average was computed from, oldest first. Its fields are the keys of
    state.json.
    """

    averaged: list[str]  # the names of the checkpoints' folders
    step: int  # of the newest
    # elapsed_s of each checkpoint; None for an average of averages
    elapsed_s: list[float] | None = None
    store_sha256: str | None = None  # of the training data, as of a training checkpoint

    def check(self) -> str | None:
        times = self.elapsed_s
        if times is not None and len(times) != len(self.averaged):
            return f"elapsed_s has {len(times)} values for {len(self.averaged)} checkpoints"
        return None


Origin = TrainState | Average


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder."""

    path: Path
    config: RunConfig
    vocab: Vocabulary
    origin: Origin  # where its weights come from
    sha256: dict[str, str]  # of each file, from the manifest at the time of opening

    @property
    def step(self) -> int:
        return self.origin.step

    @property
    def has_moments(self) -> bool:
        """Whether training can continue from it."""
        return OPTIMIZER_FILE in self.sha256

    @property
    def averaged(self) -> list[str]:
        """The folder names of an average's checkpoints; empty for a training checkpoint."""
        return self.origin.averaged if isinstance(self.origin, Average) else []


@dataclass(frozen=True)
class Snapshot:
    """The whole tensors of a checkpoint, by name."""

    weights: Tensors  # or their moving averages
    # of Adam, by the weight's name; also the weights if those are averages. Empty: weights alone
    moments: Tensors

    @property
    def size(self) -> int:
        tensors = [*self.weights.values(), *self.moments.values()]
        return sum(tensor.nbytes for tensor in tensors)


# ---- writing ------------------------------------------------------------------------------------------------------


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Adam,
    shares: dict[str, Share],
    averages: Tensors | None = None,
    has_moments: bool = True,
    gather: Callable[[Tensors], Tensors] = dict,
) -> Snapshot:
    """Collect the weights, or their `averages`, and moments unless `has_moments` is false. No tensor is
    copied.

    `gather` makes whole tensors of the ranks' `shares` of averages and moments on the main rank. With
    several ranks this is a collective operation: all must call it.
    """
    weights = {name: p.detach() for name, p in model.named_parameters()}
    moments = {}
    if has_moments and averages is not None:
        moments = {f"weight.{name}": weight for name, weight in weights.items()}
    if has_moments:
        states = {name: optimizer.state[share.weight] for name, share in shares.items()}
        for key in ("exp_avg", "exp_avg_sq"):
            own = {name: state[key] for name, state in states.items() if key in state}
            for name, value in gather(own).items():
                moments[f"{key}.{name}"] = value
                # This rank has no state of other ranks' shares, but all have taken the same steps.
                state = states[name] if name in states else next(iter(states.values()))
                moments[f"step.{name}"] = state["step"]
    if averages is not None:
        weights = gather(averages)
    return Snapshot(weights, moments)


def save_checkpoint(
    path: Path, snapshot: Snapshot, origin: Origin, config: RunConfig, vocab: Vocabulary
) -> None:
    """Write a checkpoint to the folder `path`, atomically: after a crash it is complete or absent."""

    def fill(folder: Path) -> None:
        if snapshot.moments:
            write_tensors(folder / OPTIMIZER_FILE, snapshot.moments)
        write_tensors(folder / MODEL_FILE, snapshot.weights, {"format": "pt"})
        write_small_files(folder, origin, config, vocab)

    write_folder(path, fill)


def write_small_files(folder: Path, origin: Origin, config: RunConfig, vocab: Vocabulary) -> None:
    """Write the files of a checkpoint that hold no tensors."""
    values = asdict(origin)
    if isinstance(origin, Average):  # omit fields that do not apply
        values = leave_out_none(values)
    write_json(folder / STATE_FILE, values)
    write_text(folder / CONFIG_FILE, format_config(config))
    write_vocab(folder, vocab)


# ---- opening ------------------------------------------------------------------------------------------------------


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder, or the newest checkpoint of a run folder.

    All its files are verified, but of Adam's moments only the size: they are twice as large as the
    weights, and only a training reads them.
    """
    if (path / "checkpoints").is_dir():
        try:
            newest = find_newest(RunFolder(path))
        except Failure as error:
            raise UserError(str(error)) from None
        if newest is None:
            raise UserError(
                f"{path}: this run has no checkpoint yet; wait for nmt-train to save one"
            )
        return newest
    if not path.is_dir():
        raise explain_missing(path, "give RUN, RUN/average or RUN/checkpoints/step-...")
    if path.is_symlink():
        path = path.resolve()  # `best` and `last` may move before the weights are read
    checkpoint = open_unverified(path)
    _verify_weights(checkpoint)
    return checkpoint


def _verify_weights(checkpoint: Checkpoint) -> None:
    """Verify everything that is read to use a model. This comes last, because hashing takes about a
    second for each gigabyte or two.
    """
    verify(checkpoint.path, only=(*COMMON_FILES, *checkpoint.vocab.files))


def is_without_optimizer(names: Set[str]) -> bool:
    """Whether these are the files of an average or a converted model, not of a training checkpoint."""
    return names == {*COMMON_FILES, *find_vocab_files(names)}


def open_unverified(path: Path) -> Checkpoint:
    """Open a checkpoint after checking all that can be checked without reading tensor data: file sizes,
    the small files, and whether the tensors' names, shapes and dtypes match the config.

    That is enough where another rank has just verified the rest.
    """
    _check_place(path)
    entries = read_manifest(path)
    if EXPORT_FILE in entries:
        raise UserError(
            f"{path}: is an export, not a checkpoint; add --engine ctranslate2 if it is one for "
            "CTranslate2, otherwise give the checkpoint that it was made of"
        )
    common_files = (*COMMON_FILES, *find_vocab_files(entries))
    for name, entry in entries.items():
        if name not in (*common_files, OPTIMIZER_FILE):
            raise UserError(
                f"{path / MANIFEST_FILE}: lists {name}, which does not belong to a checkpoint; "
                "use another copy"
            )
        if name in MAX_BYTES and entry["size"] > MAX_BYTES[name]:
            raise UserError(
                f"{path / name}: has {entry['size']:,} bytes, but at most {MAX_BYTES[name]:,} are "
                "allowed; use another copy"
            )
    verify(path, common_files, only=[name for name in common_files if name in MAX_BYTES])
    origin = read_origin(path)
    config = load_recorded_config(path / CONFIG_FILE)
    vocab = load_vocab(path)
    if config.vocab.joint != (vocab.src is vocab.tgt):
        raise UserError(
            f"{path / CONFIG_FILE}: vocab.joint is not that of the vocabulary beside it; use another copy"
        )
    weight_shapes = partial(_weight_shapes, config.model, vocab.sizes, path / CONFIG_FILE)
    _check_tensors(path / MODEL_FILE, weight_shapes())
    has_moments = OPTIMIZER_FILE in entries or has_plain_file(path / OPTIMIZER_FILE)
    if isinstance(origin, TrainState) and has_moments:
        verify(path, (OPTIMIZER_FILE,), only=())  # must be in the manifest; nothing is hashed here
        has_averages = config.training.ema is not None
        _check_tensors(path / OPTIMIZER_FILE, _moment_shapes(weight_shapes(), has_averages))
    digests = {name: entry["sha256"] for name, entry in entries.items()}
    return Checkpoint(path, config, vocab, origin, digests)


def _check_place(path: Path) -> None:
    """Refuse one of a run's checkpoints that is a link to a folder elsewhere."""
    if path.parent.name == "checkpoints":
        check_own_folder(path, inside=path.parent.parent)


def read_origin(folder: Path) -> Origin:
    """Read state.json; refuse a key that is missing, unknown or of the wrong type."""
    _check_place(folder)
    path = folder / STATE_FILE
    values = read_json(path)
    is_average = isinstance(values, dict) and "averaged" in values
    reader = RecordReader(
        name_places_in(path), needs_all_keys=not is_average, remedy=OF_ANOTHER_VERSION
    )
    kind: type[Origin] = Average if is_average else TrainState
    origin: Origin = reader.read(kind, values)

    # `best` and `last` are links, so the folder's own name counts too
    for name in {folder.name, folder.resolve().name}:
        if parse_step(name) not in (None, origin.step):
            raise UserError(
                f"{path}: belongs to step {origin.step}, not to this folder; "
                "files or folders were mixed up, use another copy"
            )
    return origin


# ---- tensors ------------------------------------------------------------------------------------------------------


def _weight_shapes(
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


def _moment_shapes(weight_shapes: Iterable[NamedShape], has_averages: bool) -> Iterator[NamedShape]:
    for name, shape in weight_shapes:
        yield f"step.{name}", []
        yield f"exp_avg.{name}", shape
        yield f"exp_avg_sq.{name}", shape
        if has_averages:
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


def _check_tensors(path: Path, expected: Iterable[NamedShape]) -> None:
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


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the weights into `model`, whose parameters must have the checkpoint's names and shapes."""
    _copy_tensors(checkpoint.path / MODEL_FILE, dict(model.named_parameters()))


@torch.no_grad()
def load_grown_weights(checkpoint: Checkpoint, model: Transformer) -> None:
    """Copy the weights into a model whose vocabulary has further pieces at its end. Their rows of
    the embeddings and the projection begin as the mean of all rows that were trained.
    """
    path = checkpoint.path / MODEL_FILE
    with open_tensors(path, "pt") as file:
        for name, target in model.named_parameters():
            trained = file.get_tensor(name)
            check_finite(trained, name, path)
            side = SIDE_OF_ROWS.get(name)
            if side is None:
                target.copy_(trained)
                continue
            n_before, n_pieces = checkpoint.vocab.sizes[side], model.sizes[side]
            target[: len(trained)] = trained  # with model.vocab_rows, more than there were pieces
            target[n_before:n_pieces] = trained[:n_before].mean(0)


@torch.no_grad()
def load_optimizer(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Adam,
    shares: dict[str, Share],
) -> TrainState:
    """Copy Adam's moments into `optimizer`, of which this rank has `shares`; return the state that
    training continues from. With `training.ema`, also copy the weights themselves into `model`.
    """
    assert isinstance(checkpoint.origin, TrainState), "an average has no optimizer"
    path = checkpoint.path / OPTIMIZER_FILE
    with open_tensors(path, "pt") as file:
        for name, share in shares.items():
            device = share.weight.device
            state = {"step": file.get_tensor(f"step.{name}").to(device, copy=True)}
            for key in ("exp_avg", "exp_avg_sq"):
                value = share.cut_from(file.get_tensor(f"{key}.{name}"))
                state[key] = value.to(device, copy=True)
            optimizer.state[share.weight] = state
    if checkpoint.config.training.ema is not None:
        _copy_tensors(path, {f"weight.{name}": p for name, p in model.named_parameters()})
    return checkpoint.origin


@torch.no_grad()
def _copy_tensors(path: Path, targets: Tensors) -> None:
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


# ---- the checkpoints of a run ---------------------------------------------------------------------------------------


def list_steps(run: RunFolder) -> list[int]:
    """Return the steps at which the run has a checkpoint, in ascending order."""
    check_own_folder(run.checkpoints, inside=run.path)  # training prunes what is in it
    if not run.checkpoints.is_dir():
        return []
    steps = [parse_step(path.name) for path in run.checkpoints.iterdir()]
    return sorted(step for step in steps if step is not None)


def load_run_config(run: RunFolder) -> RunConfig | None:
    """Load the config that a run was begun with; None if another run may begin in its folder, because
    this one failed, or was killed, before its first checkpoint.
    """
    if not has_plain_file(run.config):
        return None
    recorded = load_recorded_config(run.config)  # which refuses a file that another program wrote
    return recorded if _has_results(run) else None


def _has_results(run: RunFolder) -> bool:
    """Whether the run has ever saved a checkpoint. Even if they were removed, their products or the
    run's status still show it.
    """
    made_of_them = (run.average, run.results, run.curve, run.sweep)
    if list_steps(run) or any(map(os.path.lexists, made_of_them)):
        return True
    return read_status(run).get("step") != 0


def parse_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for any other name."""
    match = re.fullmatch(r"step-([0-9]{7}|[1-9][0-9]{7,})", name)
    return int(match[1]) if match else None


def find_newest(run: RunFolder, config: RunConfig | None = None) -> Checkpoint | None:
    """Open the newest checkpoint whose weights are undamaged; given a `config`, the newest from which
    a training with it can continue.

    Return None if the run has no checkpoint at all; fail if none can be used.
    """
    steps = list_steps(run)
    reasons = []
    for step in reversed(steps):
        path = run.checkpoint(step)
        try:
            checkpoint = open_unverified(path)
            is_of_training = isinstance(checkpoint.origin, TrainState)
            if config and is_of_training and not checkpoint.has_moments:
                # as planned, so there is nothing to warn of
                reasons.append(f"{path}: has only weights, without {OPTIMIZER_FILE}")
                continue
            if config:
                verify(path)
            else:
                _verify_weights(checkpoint)
            if not is_of_training:
                raise UserError(
                    f"{path / STATE_FILE}: belongs to an average; training cannot continue from it"
                )
            if config and (changes := list_differences(config, checkpoint.config)):
                raise UserError(
                    f"{path / CONFIG_FILE}: belongs to another run ({'; '.join(changes)})"
                )
            return checkpoint
        except UserError as error:
            reasons.append(str(error))
            if step != steps[0]:
                say(f"warning: {error}; trying the previous checkpoint")
    if reasons:
        raise Failure(
            f"{run.checkpoints}: none of its {len(steps)} checkpoints can be used (the oldest: "
            f"{reasons[-1]}); restore one or choose another out=DIR"
        )
    return None


def link_checkpoint(run: RunFolder, name: str, step: int) -> None:
    """Point the link `checkpoints/NAME` (`last` or `best`) at the folder of a step."""
    point_link(run.checkpoints / name, run.checkpoint(step).name)
