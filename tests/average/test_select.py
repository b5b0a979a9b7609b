"""The checkpoints taken are those asked for."""

import errno
import json
from pathlib import Path

from pytest import MonkeyPatch, mark, raises
from support.saved_run import copy_template, make_template  # noqa: F401

from nmt.average import select
from nmt.average.select import choose_checkpoints, list_candidates, list_doubts, take_best
from nmt.config import EvaluationConfig, RunConfig, TrainingConfig
from nmt.config_files import format_config
from nmt.system.errors import UserError
from nmt.system.run_folder import RunFolder


@mark.parametrize(
    "asked, steps",
    [
        ((None, None, None), [10, 20, 30, 40, 50]),
        ((2, None, None), [40, 50]),
        ((None, 1, None), [50]),
        ((None, 2, None), [40, 50]),
        ((None, 3, None), [20, 40, 50]),
        ((3, None, 12.0), []),
        ((2, None, 6.0), [40, 50]),
        ((3, None, 6.5), [10, 30, 50]),
    ],
)
def test_which_checkpoints_are_taken(
    asked: tuple[int | None, int | None, float | None],
    steps: list[int],
    run: RunFolder,
) -> None:
    if not steps:
        with raises(
            UserError, match="has 2 checkpoints that are 12 minutes of training apart, but 3 were"
        ):
            choose_checkpoints(run, *asked)
        return
    chosen = choose_checkpoints(run, *asked)
    assert [candidate.step for candidate in chosen] == steps


def set_training(run: RunFolder, **settings: int) -> None:
    training = TrainingConfig(**settings)  # type: ignore[arg-type]
    run.config.write_text(format_config(RunConfig(name="toy", training=training)))


@mark.parametrize(
    "every, steps, counted",
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
    chosen = choose_checkpoints(run, len(counted), None, None)
    assert [candidate.step for candidate in chosen] == counted
    with raises(UserError, match=f"has {len(counted)} checkpoints that averaging counts, but"):
        choose_checkpoints(run, len(counted) + 1, None, None)
    # those some minutes apart are chosen among all
    apart = choose_checkpoints(run, 3, None, 6.5)
    assert [candidate.step for candidate in apart] == [10, 30, 50]


def test_the_best_by_likelihood_where_bleu_is_off(run: RunFolder) -> None:
    run.metrics.write_text(run.metrics.read_text().replace('"bleu": 22.0', '"bleu": null'))
    assert [candidate.step for candidate in take_best(run, 2)] == [40, 50]
    assert [candidate.step for candidate in take_best(run, 1)] == [40]
    with raises(UserError, match="has 5 checkpoints, of which 4 were validated"):
        take_best(run, 5)


def test_the_best_are_by_the_score_that_training_went_by(run: RunFolder) -> None:
    assert [candidate.step for candidate in take_best(run, 1)] == [50]
    evaluation = EvaluationConfig(best_by="nll")
    run.config.write_text(format_config(RunConfig(name="toy", evaluation=evaluation)))
    assert [candidate.step for candidate in take_best(run, 1)] == [40]


@mark.parametrize("state, counted", [("done", [20, 40, 50]), ("preempted", [20, 40])])
def test_the_last_checkpoint_counts_if_the_run_has_ended(
    state: str, counted: list[int], run: RunFolder
) -> None:
    set_training(run, checkpoint_every=20, steps=100, max_epochs=3)
    run.status.write_text(json.dumps({"state": state, "step": 50}))
    assert [candidate.step for candidate in list_candidates(run, None)] == counted


def test_members_of_different_quality_raise_doubts(run: RunFolder) -> None:
    set_training(run, steps=50)
    candidates = list_candidates(run, None)
    assert str(candidates[2]) == "update 30, minute 14.0, dev NLL 2.5000, BLEU 22.00 at 20"
    assert list_doubts(run, candidates) == [
        "it spans the warm-up: update 10 is one of the first 4,000",
        "dev NLL goes from 2.00 (update 40) to 3.00 (update 10)",
    ]
    lines = run.metrics.read_text().replace('"bleu": 20.0', '"bleu": 19.5')
    run.metrics.write_text(lines)
    assert "dev BLEU goes from 19.50 (update 10) to 22.00 (update 50)" in list_doubts(
        run, list_candidates(run, None)
    )
    run.metrics.unlink()  # without scores only the warm-up is known
    assert len(list_doubts(run, list_candidates(run, None))) == 1


@mark.parametrize("is_missing", [True, False])
def test_the_best_need_scores_that_can_be_read(
    is_missing: bool, run: RunFolder, monkeypatch: MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    if is_missing:
        run.metrics.unlink()
    else:
        monkeypatch.setattr(select, "read_events", refuse)
    with raises(UserError, match="metrics.jsonl: cannot be read .*; --best needs its dev"):
        take_best(run, 1)
