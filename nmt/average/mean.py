"""The mean of checkpoints, as the paper evaluates its models: read in pieces, summed in float64, written as it comes.

Files may be fp32, bf16 or fp16; the mean is fp32, every number rounded once. No file is in memory as a whole, so twenty
checkpoints need no more room than one. An average is a checkpoint folder without the optimizer; its state.json names
what it was made of, oldest first. It may be replaced by another, but nothing that a person wrote into it is ever lost.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmt.checkpoint import (
    MAX_BYTES,
    PARTS,
    Average,
    Checkpoint,
    TrainState,
    list_steps,
    open_for_average,
    write_small_files,
)
from nmt.config import list_differences
from nmt.system.errors import UserError
from nmt.system.files import make_folder, read_json, size_of, write_folder
from nmt.system.progress import Progress, tracked
from nmt.system.run_folder import CARD_FILE, MANIFEST_FILE, MODEL_FILE, STATE_FILE, RunFolder

PIECE = 1 << 20  # numbers that are summed at a time
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MARK = "<!-- Written by nmt; once edited, it is left alone. sha256 of all above: {} -->\n"


@dataclass(frozen=True)
class Place:
    """Where the numbers of a tensor lie in a file."""

    dtype: torch.dtype
    shape: list[int]
    begin: int


@dataclass(frozen=True)
class Mix:
    """Checkpoints that fit together, and how much each weighs."""

    checkpoints: Sequence[Checkpoint]
    weights: Sequence[float]
    places: Sequence[dict[str, Place]]  # of each checkpoint

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: place.shape for name, place in sorted(self.places[0].items())}

    def pieces(self) -> Iterator[tuple[str, slice, Tensor]]:
        """The mean, piece by piece: a tensor's name, which of its numbers, and these in fp32."""
        buffer, total = bytearray(PIECE * 4), sum(self.weights)
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(_open(checkpoint.path / MODEL_FILE))
                for checkpoint in self.checkpoints
            ]
            for name, shape in self.shapes.items():
                for begin in range(0, prod(shape), PIECE):
                    part = slice(begin, min(begin + PIECE, prod(shape)))
                    mean: Tensor | None = None
                    for file, places, weight in zip(files, self.places, self.weights, strict=True):
                        numbers = _numbers(file, places[name], part, buffer)
                        mean = (
                            numbers.double().mul_(weight)
                            if mean is None
                            else mean.add_(numbers, alpha=weight)
                        )
                    assert mean is not None
                    if not bool(mean.sum().isfinite()):
                        for file, places in zip(files, self.places, strict=True):
                            _check_finite(file, name, _numbers(file, places[name], part, buffer))
                    yield name, part, mean.div_(total).float()


def opened(paths: Sequence[Path]) -> list[Checkpoint]:
    """Those checkpoints, verified."""
    _check_each_is_another(paths)
    found = [
        open_for_average(path) for path in tracked(paths, "verifying", "checkpoints", len(paths))
    ]
    _check_each_is_another(
        [checkpoint.path for checkpoint in found]
    )  # a run folder stood for its newest
    return found


def _check_each_is_another(paths: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UserError(f"{path}: the same checkpoint is given twice; give each once")
        seen.add(path.resolve())


def mixed(checkpoints: Sequence[Checkpoint], weights: Sequence[float] | None = None) -> Mix:
    """Checkpoints of one run, the oldest first, equal in weight unless told. Of another run is what has other settings
    or other pieces; where these are equal the tensors are, for each file was held against its own config."""
    given = zip(checkpoints, weights or [1.0] * len(checkpoints), strict=True)
    checkpoints, weights = zip(*sorted(given, key=lambda pair: pair[0].step), strict=True)
    first = checkpoints[0]
    for other in checkpoints[1:]:
        changes = list_differences(first.config, other.config)
        if changes or other.vocab.digest != first.vocab.digest:
            what = ascii("; ".join(changes)[:300])[1:-1] or "another BPE model"
            raise UserError(
                f"{other.path}: is of another run than {first.path} ({what}); "
                "only one run's checkpoints average"
            )
    return Mix(
        checkpoints, weights, [_places(checkpoint.path / MODEL_FILE) for checkpoint in checkpoints]
    )


def average(paths: Sequence[Path], out: Path, weights: Sequence[float] | None = None) -> list[str]:
    """Write the mean of the checkpoints' weights as the folder `out`, and tell their names; one that is there is
    replaced only if all in it is ours."""
    out = out.resolve()
    _check_place(out)
    _check_replaceable(out)
    make_folder(out.parent)
    mix = mixed(opened(paths), weights)
    newest, origin = mix.checkpoints[-1], origin_of(mix)

    def fill(folder: Path) -> None:
        _write(folder / MODEL_FILE, mix)
        write_small_files(folder, origin, newest.config, newest.vocab.model)
        _check_replaceable(out)  # somebody may have edited the card meanwhile

    write_folder(out, fill)
    return origin.checkpoints


@torch.no_grad()
def pour(mix: Mix, model: nn.Module) -> None:
    """Give `model` the mean for its weights."""
    weights = {name: p.detach().view(-1) for name, p in model.named_parameters()}
    for name, part, numbers in mix.pieces():
        weights[name][part] = numbers.to(weights[name].device)


def origin_of(mix: Mix) -> Average:
    """What state.json says of the average."""
    origins = [checkpoint.origin for checkpoint in mix.checkpoints]
    elapsed_s = [origin.elapsed_s for origin in origins if isinstance(origin, TrainState)]
    total = sum(mix.weights)
    is_weighted = len(set(mix.weights)) > 1
    return Average(
        [checkpoint.path.resolve().name for checkpoint in mix.checkpoints],  # not best, or .
        max(origin.step for origin in origins),
        elapsed_s if len(elapsed_s) == len(origins) else None,
        [weight / total for weight in mix.weights] if is_weighted else None,
    )


def averaged_in(folder: Path) -> list[str] | None:
    """What the weights in `folder` were made of, if `average` wrote them and there is nothing else but our own card:
    then the folder may be replaced. Nothing, if it is empty."""
    if not folder.is_dir():
        return None
    names = {path.name for path in folder.iterdir()}
    if not names:
        return []
    if (
        names - {CARD_FILE} != {MANIFEST_FILE, *PARTS}
        or size_of(folder / STATE_FILE) > MAX_BYTES[STATE_FILE]
    ):
        return None
    if CARD_FILE in names and not is_our_card(folder / CARD_FILE):
        return None
    state = read_json(folder / STATE_FILE)
    known = state.get("averaged") if isinstance(state, dict) else None
    return [str(one) for one in known] if isinstance(known, list) else None


def _check_place(out: Path) -> None:
    """A model among a run's checkpoints would be taken for one of them, or pruned."""
    for folder in (out, *out.parents):
        run = RunFolder(folder.parent)
        if folder.name == run.checkpoints.name and (run.config.is_file() or list_steps(run)):
            raise UserError(
                f"{out}: {folder} is for the checkpoints of training alone; choose another -o DIR, such as "
                f"{run.average}"
            )


def _check_replaceable(out: Path) -> None:
    known = averaged_in(out)
    if os.path.lexists(out) and known is None:
        if (
            (out / STATE_FILE).is_file()
            and os.path.lexists(out / CARD_FILE)
            and not is_our_card(out / CARD_FILE)
        ):
            raise UserError(
                f"{out / CARD_FILE}: was edited since nmt wrote it, or is not nmt's; move it away or choose "
                "another -o DIR, nothing was changed"
            )
        raise UserError(
            f"{out}: exists and is not just an average; choose another -o DIR, nothing was changed"
        )


def marked(card: str) -> str:
    """The text with a last line by which `is_our_card` knows it."""
    return card + MARK.format(hashlib.sha256(card.encode()).hexdigest())


def is_our_card(path: Path) -> bool:
    """Whether the file is as `marked` made it: neither somebody's own nor edited since."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES[STATE_FILE]:
        return False
    text = path.read_bytes().decode(errors="replace")
    above, _, last = text.removesuffix("\n").rpartition("\n")
    return text == marked(f"{above}\n") and bool(last)


def _open(path: Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read any more ({error.strerror}); a run in training prunes its oldest "
            "checkpoints, start again"
        ) from None


def _places(path: Path) -> dict[str, Place]:
    """By name, as the header says, which has been held against config and size when the checkpoint was opened."""
    with _open(path) as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n_bytes))
    header.pop("__metadata__", None)
    return {
        name: Place(TYPES[entry["dtype"]], entry["shape"], 8 + n_bytes + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _numbers(file: io.BufferedReader, place: Place, part: slice, buffer: bytearray) -> Tensor:
    """Some of a tensor's numbers; they lie in `buffer` until the next ones do."""
    n = part.stop - part.start
    file.seek(place.begin + part.start * place.dtype.itemsize)
    if file.readinto(memoryview(buffer)[: n * place.dtype.itemsize]) < n * place.dtype.itemsize:
        raise UserError(f"{file.name}: ends early; it was changed while it was read")
    return torch.frombuffer(buffer, dtype=place.dtype, count=n)


def _check_finite(file: io.BufferedReader, name: str, numbers: Tensor) -> None:
    if not bool(numbers.isfinite().all()):
        raise UserError(
            f"{file.name}: tensor {name} holds what is no number (NaN or infinite); average other "
            "checkpoints"
        )


def _write(path: Path, mix: Mix) -> None:
    """A safetensors file, in the very bytes that its library would write, without holding it in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in mix.shapes.items():
        header[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [end, end := end + 4 * prod(shape)],
        }
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    progress = Progress("averaging", end // 4, "numbers")
    with open(path, "wb") as file, contextlib.closing(progress):
        file.write(len(told).to_bytes(8, "little") + told)
        for _, part, numbers in mix.pieces():
            file.write(numbers.numpy().tobytes())
            progress.advance(part.stop - part.start)
