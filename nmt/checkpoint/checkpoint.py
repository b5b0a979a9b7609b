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

import re
from collections.abc import Set
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from nmt.checkpoint.tensors import (
    check_finite,
    check_tensors,
    copy_tensors,
    list_moment_shapes,
    list_weight_shapes,
    open_tensors,
)
from nmt.config import RunConfig
from nmt.config_files import MAX_CONFIG_BYTES, format_config, load_recorded_config
from nmt.data.plan import Cursor
from nmt.data.vocab import (
    MAX_MODEL_BYTES,
    Vocabulary,
    load_vocab_files,
    write_vocab,
)
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import (
    check_digests,
    check_own_folder,
    check_sizes,
    has_plain_file,
    read_json,
    read_manifest,
    write_folder,
    write_json,
    write_text,
)
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
    find_vocab_files,
)
from nmt.system.tensor_files import Tensors, write_tensors

# The files of every checkpoint, beside those of its vocabulary; a training checkpoint also has
# OPTIMIZER_FILE.
COMMON_FILES = (MODEL_FILE, STATE_FILE, CONFIG_FILE)

# Small files are read into memory whole, so their size is limited in case one is damaged or
# hostile.
MAX_BYTES = {STATE_FILE: 1 << 20, CONFIG_FILE: MAX_CONFIG_BYTES}
MAX_BYTES |= dict.fromkeys((VOCAB_FILE, *SIDE_VOCAB_FILES), MAX_MODEL_BYTES)
# Tensors with a row for each piece of the source's vocabulary, 0, or the target's, 1. One that is tied
# has its first name, and two sides share only one vocabulary.
SIDE_OF_ROWS = {
    "src_embedding.weight": 0,
    "tgt_embedding.weight": 1,
    "projection.weight": 1,
    "projection.bias": 1,
}


@dataclass(frozen=True)
class Window:
    """Sums over the updates since the last log line, which nmt/train/update.py adds up."""

    loss: float = 0.0  # label-smoothed
    nll: float = 0.0
    tokens: int = default(0, COUNT)  # target tokens

    @property
    def mean_loss(self) -> float:
        """Per target token, as is `mean_nll`."""
        return self.loss / self.tokens

    @property
    def mean_nll(self) -> float:
        return self.nll / self.tokens


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
    window: Window = Window()


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
    vocab_files = find_vocab_files(entries)
    common_files = (*COMMON_FILES, *vocab_files)
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
    has_moments = has_plain_file(path / OPTIMIZER_FILE)
    digests = {name: entry["sha256"] for name, entry in entries.items()}
    check_sizes(path, entries, (*common_files, OPTIMIZER_FILE) if has_moments else common_files)
    check_digests(path, digests, [name for name in common_files if name in MAX_BYTES])
    origin = read_origin(path)
    config = load_recorded_config(path / CONFIG_FILE)
    vocab = load_vocab_files(path, vocab_files)
    if config.vocab.joint != (vocab.src is vocab.tgt):
        raise UserError(
            f"{path / CONFIG_FILE}: vocab.joint is not that of the vocabulary beside it; use another copy"
        )
    weight_shapes = partial(list_weight_shapes, config.model, vocab.sizes, path / CONFIG_FILE)
    check_tensors(path / MODEL_FILE, weight_shapes())
    if isinstance(origin, TrainState) and has_moments:
        check_tensors(path / OPTIMIZER_FILE, list_moment_shapes(config, weight_shapes()))
    return Checkpoint(path, config, vocab, origin, digests)


def verify_content(checkpoint: Checkpoint, with_moments: bool = False) -> None:
    """Verify the content of everything that is read to use a model, or to continue its training. This
    comes last, because hashing takes about a second for each gigabyte or two.
    """
    names = [name for name in checkpoint.sha256 if with_moments or name != OPTIMIZER_FILE]
    check_digests(checkpoint.path, checkpoint.sha256, names)


def _check_place(path: Path) -> None:
    """Refuse one of a run's checkpoints that is a link to a folder elsewhere."""
    if path.parent.name == "checkpoints":
        check_own_folder(path, inside=path.parent.parent)


def read_origin(folder: Path) -> Origin:
    """Read the state.json of a checkpoint; refuse a key that is missing, unknown or of the wrong type."""
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


def parse_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for any other name."""
    match = re.fullmatch(r"step-([0-9]{7}|[1-9][0-9]{7,})", name)
    return int(match[1]) if match else None


# ---- weights ------------------------------------------------------------------------------------------------------


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the weights into `model`, whose parameters must have the checkpoint's names and shapes."""
    copy_tensors(checkpoint.path / MODEL_FILE, dict(model.named_parameters()))


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
