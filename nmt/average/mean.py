"""Averages checkpoints, as the paper does before it evaluates (section 6.1): summed in float64,
rounded to fp32 once.

Files are read tensor by tensor, so that twenty checkpoints take no more memory than one model. An
average is a checkpoint folder without the optimizer; its state.json lists the checkpoints it was
made from, oldest first.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nmt.agreement import check_agreement
from nmt.checkpoint.checkpoint import (
    Average,
    Checkpoint,
    TrainState,
    is_without_optimizer,
    write_small_files,
)
from nmt.checkpoint.run_checkpoints import list_steps, open_checkpoint
from nmt.checkpoint.tensors import check_finite, open_tensors
from nmt.config_files import list_differences
from nmt.system.errors import UserError
from nmt.system.files import check_exchangeable, write_folder
from nmt.system.output_folder import check_replaceable
from nmt.system.progress import track
from nmt.system.run_folder import MODEL_FILE, RunFolder
from nmt.system.tensor_files import write_tensors


def average_tensors(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the mean by name, in fp32."""
    with contextlib.ExitStack() as stack:
        # While a file is open it can be read, even if training prunes its checkpoint meanwhile.
        files = [
            stack.enter_context(open_tensors(checkpoint.path / MODEL_FILE, "numpy"))
            for checkpoint in checkpoints
        ]
        for name in sorted(files[0].keys()):
            total: Tensor | None = None
            for checkpoint, file in zip(checkpoints, files, strict=True):
                tensor = torch.from_numpy(file.get_tensor(name))
                check_finite(tensor, name, checkpoint.path / MODEL_FILE)
                if total is None:  # not zeros: 0.0 + -0.0 would lose the sign
                    total = tensor.double()
                else:
                    total.add_(tensor)
            assert total is not None
            yield name, total.div_(len(files)).float()


def describe_mean(checkpoints: Sequence[Checkpoint]) -> Average:
    """Return what the state.json of the mean will hold."""
    # resolved, because a link such as `best` will point elsewhere later
    names = [checkpoint.path.resolve().name for checkpoint in checkpoints]
    origins = [checkpoint.origin for checkpoint in checkpoints]
    step = max(origin.step for origin in origins)

    # times, unless one of them is an average itself, which has no time of its own
    times = [origin.elapsed_s for origin in origins if isinstance(origin, TrainState)]
    elapsed_s = times if len(times) == len(origins) else None
    return Average(names, step, elapsed_s, origins[-1].store_sha256)


def average_checkpoints(
    paths: Sequence[Path],
    out: Path,
    is_forced: bool = False,
) -> list[str]:
    """Write the mean of the checkpoints' weights as the folder `out`; return their names, oldest
    first.
    """
    out = out.resolve()
    _check_place(out)
    check_replaceable(out, "an average", is_without_optimizer, is_forced, paths)
    check_exchangeable(out)
    checkpoints = sort_as_one_run(open_all(paths))
    newest, origin = checkpoints[-1], describe_mean(checkpoints)

    def fill(folder: Path) -> None:
        tensors = dict(track(average_tensors(checkpoints), "averaging", "tensors"))
        write_tensors(folder / MODEL_FILE, tensors, {"format": "pt"})
        write_small_files(folder, origin, newest.config, newest.vocab)

    write_folder(out, fill)
    return origin.averaged


def _check_place(out: Path) -> None:
    """Refuse a folder among a run's checkpoints: training would take the average for one of them,
    or prune it.
    """
    for folder in (out, *out.parents):
        run = RunFolder(folder.parent)
        if folder.name == run.checkpoints.name and (run.config.is_file() or list_steps(run)):
            raise UserError(
                f"{out}: {folder} is reserved for training checkpoints; choose another -o DIR, "
                f"such as {run.average}"
            )


def open_all(paths: Sequence[Path]) -> list[Checkpoint]:
    """Open and verify checkpoints; refuse one that is given twice."""
    progress = track(paths, "verifying", "checkpoints", len(paths))
    checkpoints = [open_checkpoint(path) for path in progress]
    # the path of a run has become that of its newest checkpoint
    opened = [checkpoint.path.resolve() for checkpoint in checkpoints]
    for path in opened:
        if opened.count(path) > 1:
            raise UserError(f"{path}: the same checkpoint is given twice; give each once")
    return checkpoints


def sort_as_one_run(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Check that the checkpoints belong to one run, and return them from the oldest to the newest.

    Checkpoints of one run have the same settings and vocabulary. Then their tensors have the same
    shapes too, because each file was compared with its own config when it was opened.
    """
    first, *others = ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    for other in others:
        changes = list_differences(first.config, other.config)
        remedy = "average only one run's checkpoints"
        if changes:
            what = "; ".join(changes)[:300]
            raise UserError(
                f"{other.path}: belongs to another run than {first.path} ({what}); {remedy}"
            )
        digest, data = other.vocab.digest, other.origin.store_sha256
        check_agreement("BPE model", other.path, digest, first.path, first.vocab.digest, remedy)
        first_data = first.origin.store_sha256
        check_agreement("training data", other.path, data, first.path, first_data, remedy)
    return ordered
