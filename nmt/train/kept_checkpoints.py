"""Which checkpoints of a run are kept, and the removal of the others.

Averaging wants checkpoints at equal distances, so only those of `checkpoint_every` are counted. One
that was written for safety, or for a good dev score, does not count. As many of those from
which training can continue are kept, because other checkpoints may have only weights.
"""

from nmt.checkpoint.run_checkpoints import list_steps
from nmt.config import TrainingConfig
from nmt.system.files import has_plain_file, remove_folder
from nmt.system.run_folder import OPTIMIZER_FILE, RunFolder


def prune_checkpoints(
    run: RunFolder, training: TrainingConfig, best_step: int, last_step: int
) -> None:
    """Remove all checkpoints but the newest `keep_checkpoints` that averaging counts, as many from
    which training can continue, the newest of all, and the best.

    Checkpoints after `last_step` must be damaged, because otherwise training would have resumed
    from them. They are not counted, and training will overwrite them.
    """
    steps = [step for step in list_steps(run) if step <= last_step]
    counted = [step for step in steps if training.is_counted(step)][-training.keep_checkpoints :]
    resumable = find_resumable_steps(run, last_step)[-training.keep_checkpoints :]
    for step in set(steps) - {best_step, *counted, *resumable, *steps[-1:]}:
        remove_folder(run.checkpoint(step))


def find_resumable_steps(run: RunFolder, last_step: int) -> list[int]:
    """Return the newest checkpoints up to a step that have an optimizer: two, in case one gets damaged."""
    steps = []
    for step in list_steps(run):
        if step <= last_step and has_plain_file(run.checkpoint(step) / OPTIMIZER_FILE):
            steps.append(step)
    return steps[-2:]
