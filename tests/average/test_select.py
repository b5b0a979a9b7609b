"""The checkpoints taken are those asked for."""

import errno
from pathlib import Path

import pytest
from support.saved_run import copy_template, make_template, skip_fsync  # noqa: F401

from nmt.average import select
from nmt.average.select import choose_checkpoints, take_best
from nmt.config import EvaluationConfig, RunConfig, TrainingConfig, format_config
from nmt.system.errors import UserError
from nmt.system.run_folder import RunFolder


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ((None, None, None, None), [10, 20, 30, 40, 50]),
        ((2, None, None, None), [40, 50]),
        ((None, 1, None, None), [50]),
        ((None, 2, None, None), [20, 50]),
        ((None, 3, None, None), [20, 40, 50]),
        ((3, None, 12.0, None), []),
        ((2, None, 6.0, None), [40, 50]),
        ((3, None, 6.5, None), [10, 30, 50]),
        ((None, None, None, 0.5), [10, 20, 30, 40, 50]),
        ((2, None, 6.5, 0.5), [30, 50]),
    ],
)
def test_which_checkpoints_are_taken(
    asked: tuple[int | None, int | None, float | None, float | None],
    steps: list[int],
    run: RunFolder,
) -> None:
    n_last, n_best, minutes, decay = asked
    if not steps:
        with pytest.raises(
            UserError, match="has 2 checkpoints that are 12 minutes of training apart, but 3 were"
        ):
            choose_checkpoints(run, *asked)
        return
    chosen, _ = choose_checkpoints(run, n_last, n_best, minutes, decay)
    assert [candidate.step for candidate in chosen] == steps
    ages = range(len(steps) - 1, -1, -1)
    assert [candidate.weight for candidate in chosen] == [
        1.0 if decay is None else decay**age for age in ages
    ]


def set_training(run: RunFolder, **settings: int) -> None:
    training = TrainingConfig(**settings)  # type: ignore[arg-type]
    run.config.write_text(format_config(RunConfig(name="toy", training=training)))


@pytest.mark.parametrize(
    ("every", "steps", "counted"),
    [
        (20, 100, [20, 40]),
        (20, 50, [20, 40, 50]),  # the last update ends the run
        (10, 50, [10, 20, 30, 40, 50]),
        (25, 60, [50]),
    ],
)
def test_of_a_run_with_planned_checkpoints_no_others_are_averaged(
    every: int, steps: int, counted: list[int], run: RunFolder
) -> None:
    set_training(run, checkpoint_every=every, steps=steps)
    chosen, _ = choose_checkpoints(run, len(counted), None, None, None)
    assert [candidate.step for candidate in chosen] == counted
    with pytest.raises(
        UserError, match=f"has {len(counted)} checkpoints that averaging counts, but"
    ):
        choose_checkpoints(run, len(counted) + 1, None, None, None)
    # those some minutes apart are chosen among all
    apart, _ = choose_checkpoints(run, 3, None, 6.5, None)
    assert [candidate.step for candidate in apart] == [10, 30, 50]


def test_the_best_by_likelihood_where_bleu_is_off(run: RunFolder) -> None:
    run.metrics.write_text(run.metrics.read_text().replace('"bleu": 22.0', '"bleu": null'))
    chosen, scored = take_best(run, 2)
    assert ([candidate.step for candidate in chosen], scored) == (
        [40, 50],
        "dev NLL 2.0000, 2.2000",
    )
    with pytest.raises(UserError, match="has 5 checkpoints, of which 4 were validated"):
        take_best(run, 5)


def test_the_best_are_by_the_score_that_training_went_by(run: RunFolder) -> None:
    by_bleu, _ = take_best(run, 2)
    assert [candidate.step for candidate in by_bleu] == [20, 50]
    evaluation = EvaluationConfig(best_by="nll")
    run.config.write_text(format_config(RunConfig(name="toy", evaluation=evaluation)))
    by_nll, scored = take_best(run, 2)
    assert [candidate.step for candidate in by_nll] == [40, 50]
    assert scored == "dev NLL 2.0000, 2.2000"


@pytest.mark.parametrize("is_missing", [True, False])
def test_the_best_need_scores_that_can_be_read(
    is_missing: bool, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    if is_missing:
        run.metrics.unlink()
    else:
        monkeypatch.setattr(select, "read_events", refuse)
    with pytest.raises(UserError, match="metrics.jsonl: cannot be read .*; --best needs its dev"):
        take_best(run, 1)
