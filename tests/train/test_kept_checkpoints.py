"""Which checkpoints are left of those that a run has written."""

from pathlib import Path

from pytest import mark

from nmt.checkpoint.run_checkpoints import list_steps
from nmt.config import TrainingConfig
from nmt.system.run_folder import RunFolder
from nmt.train.kept_checkpoints import prune_checkpoints


@mark.parametrize(
    "every, keep, kept",
    [
        (None, 3, [4, 8, 9, 10]),
        (3, 2, [4, 6, 9, 10]),  # 10 is written for safety alone, and it is the newest
        (3, 1, [4, 9, 10]),
        (5, 2, [4, 5, 10]),
        (7, 9, [4, 7, 10]),
        (20, 3, [4, 10]),  # none is counted yet
    ],
)
def test_checkpoints_written_for_safety_do_not_displace_those_that_are_averaged(
    every: int | None, keep: int, kept: list[int], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    for step in range(1, 11):
        run.checkpoint(step).mkdir(parents=True)
    training = TrainingConfig(steps=30, checkpoint_every=every, keep_checkpoints=keep)
    prune_checkpoints(run, training, best_step=4, last_step=10)
    assert list_steps(run) == kept


def test_a_damaged_checkpoint_is_not_counted(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (5, 10, 15, 20):
        run.checkpoint(step).mkdir(parents=True)
    prune_checkpoints(run, TrainingConfig(keep_checkpoints=2), best_step=5, last_step=20)
    assert list_steps(run) == [5, 15, 20]
    # training resumed from 15, because 20 is damaged
    prune_checkpoints(run, TrainingConfig(keep_checkpoints=1), best_step=5, last_step=15)
    assert list_steps(run) == [5, 15, 20]
