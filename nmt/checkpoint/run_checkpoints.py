"""The checkpoints of a run, and the config that it was begun with.

Each is a folder of its own (checkpoint.py). A run goes on from the newest that is undamaged, and a model
that is named by its run is the same one.
"""

import os
from pathlib import Path

from nmt.checkpoint.checkpoint import (
    Checkpoint,
    TrainState,
    open_unverified,
    parse_step,
    verify_content,
)
from nmt.config import RunConfig
from nmt.config_files import list_differences, load_recorded_config
from nmt.system.errors import Failure, UserError, explain_missing
from nmt.system.files import (
    check_own_folder,
    has_plain_file,
    point_link,
    read_bytes,
    read_status,
    remove_folder,
)
from nmt.system.progress import say
from nmt.system.run_folder import CONFIG_FILE, MANIFEST_FILE, OPTIMIZER_FILE, STATE_FILE, RunFolder


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
        raise explain_missing(
            path,
            "give RUN, RUN/average or RUN/checkpoints/step-...; a setting is decoding.key=value",
        )
    if path.is_symlink():
        path = path.resolve()  # `best` and `last` may move before the weights are read
    checkpoint = open_unverified(path)
    verify_content(checkpoint)
    return checkpoint


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
            verify_content(checkpoint, with_moments=config is not None)
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
            f"{reasons[-1]}); restore one, or train again with another out=DIR"
        )
    return None


def link_checkpoint(run: RunFolder, name: str, step: int) -> None:
    """Point the link `checkpoints/NAME` (`last` or `best`) at the folder of a step."""
    link = run.checkpoints / name
    if link.is_dir() and not link.is_symlink():
        _remove_copy(link, run)
    point_link(link, run.checkpoint(step).name)


def _remove_copy(folder: Path, run: RunFolder) -> None:
    """Remove the checkpoint that copying a run without its links has put in the place of one."""
    manifests = [run.checkpoint(step) / MANIFEST_FILE for step in list_steps(run)]
    own = folder / MANIFEST_FILE
    if not has_plain_file(own) or read_bytes(own) not in map(
        read_bytes, filter(has_plain_file, manifests)
    ):
        raise UserError(
            f"{folder}: is a folder of its own, in the place of a link to a checkpoint; move it away"
        )
    remove_folder(folder)
