"""What is averaged does not depend on how fast the machine is (section 6.1), nor what is trained on what else it does.

The paper's ten minutes are a number of updates at its speed. So the configs plan checkpoints by
updates, and those that the clock adds for safety neither displace the planned ones nor are averaged.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import cast

from pytest import MonkeyPatch, approx, mark
from support.ground import Ground, digest
from support.in_process import succeed
from support.rings import amount

import nmt.train.loop
from nmt.average.select import choose_checkpoints
from nmt.checkpoint.checkpoint import Average, Checkpoint, TrainState
from nmt.commands.average import main as nmt_average
from nmt.commands.train import main as nmt_train
from nmt.config import RunConfig
from nmt.config_files import format_config, load_config
from nmt.corpus.test_sets import TestSet
from nmt.data.plan import Cursor
from nmt.data.vocab import Vocab
from nmt.evaluate.systems import System
from nmt.evaluate.training_text import TrainingText
from nmt.evaluate.verdict import judge
from nmt.paper import check_conformance
from nmt.score.metrics import find_paper_metric
from nmt.score.score import Score
from nmt.system.files import read_json
from nmt.system.run_folder import STATE_FILE, RunFolder
from nmt.train.kept_checkpoints import prune_checkpoints
from nmt.translate.translator import LoadedModel, TextToText

BIG = load_config("big.yaml")
A_MINUTE, HOURS = 0.01, 500.0  # seconds between two looks at the clock


class Clock:
    """A clock that advances by the same time whenever somebody looks."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


@contextlib.contextmanager
def keep_busy(n_processes: int) -> Iterator[None]:
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_processes)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_a_busy_machine_trains_the_same_model(ground: Ground) -> None:
    seen = set()
    for i in range(amount(2, 20)):  # alone, and beside others
        with keep_busy(2 * (i % 2)):
            run = ground.finish(f"run-{i}", "training.precision=auto")
        seen.add((load_config(str(run.config)).training.precision, digest(run)))
    assert len(seen) == 1


def has_papers_interval(config: RunConfig) -> bool:
    """Whether --explain finds nothing in the row of the checkpoints' interval."""
    (row,) = [row for row in check_conformance(config).rows if row.name == "checkpoint every"]
    return not row.deviates


@mark.parametrize("seconds", [A_MINUTE, HOURS])
def test_a_run_of_any_speed_averages_the_same_twenty(
    seconds: float, toy: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    clock = Clock(seconds)
    monkeypatch.setattr(nmt.train.loop, "clock", clock)
    training = BIG.training
    settings = [
        f"training.grouping={training.grouping}",
        f"training.checkpoint_minutes={training.checkpoint_minutes}",
        f"training.keep_checkpoints={training.keep_checkpoints}",
        "training.checkpoint_every=3",
        "training.steps=66",
        "training.log_every=100",
        "training.validate_every=1000",
        "training.src_tokens=60",
        "training.tgt_tokens=60",
        "model.n_layers=1",
    ]
    succeed(nmt_train, "--config", toy, *settings)
    run = RunFolder(tmp_path / "run")
    if seconds == HOURS:
        assert clock.now > 24 * 3600
    else:
        assert clock.now < 60

    succeed(nmt_average, run.path, "--last", "20")
    averaged = read_json(run.average / STATE_FILE)["averaged"]
    assert averaged == [run.checkpoint(step).name for step in range(9, 67, 3)]


def list_missing_averaging(config: RunConfig, steps: Sequence[int]) -> list[str]:
    """List what the verdict finds wrong with the mean of these checkpoints."""
    made = Average([f"step-{step:07}" for step in steps], steps[-1], [0.0] * len(steps))
    checkpoint = Checkpoint(Path("average"), config, cast(Vocab, None), made, {})
    model = LoadedModel(cast(TextToText, None), config, ["average"], (checkpoint,))
    test = TestSet("wmt14/full", [], [], "", "", "newstest2014", None, None)
    metric = find_paper_metric(config.data.tgt)
    score = Score(metric.name, 0.0, "", 0.0, 0.0)
    system = System("average", config.data, test, [], model=model, scores=[score])
    missing = judge(metric, [system], [TrainingText()]).not_applied
    return [step for step in missing if step.startswith("averaging")]


def save_at(run: RunFolder, step: int, seconds: float) -> None:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    state = TrainState(step, Cursor(0, step), 1, elapsed_s=seconds)
    (folder / STATE_FILE).write_text(json.dumps(asdict(state)))


@mark.parametrize(
    "name, n, share", [("base", 5, 0.055), ("base-enfr", 5, 0.055), ("big", 20, 0.038)]
)
@mark.parametrize("update_s", [0.01, 4.0])
def test_the_papers_runs_average_the_same_share_at_any_speed(
    update_s: float, name: str, n: int, share: float, tmp_path: Path
) -> None:
    """The end of the paper's run, saved by its plan and by the clock as the trainer does."""
    config = load_config(f"{name}.yaml")
    training = config.training
    assert training.checkpoint_every is not None and training.checkpoint_minutes is not None
    run = RunFolder(tmp_path)
    run.config.write_text(format_config(config))
    saved_at = 0.0
    first = training.steps - 40 * training.checkpoint_every
    for step in range(first, training.steps + 1):
        seconds = step * update_s
        is_late = seconds - saved_at >= 60 * training.checkpoint_minutes
        if is_late or training.is_checkpoint_step(step):
            save_at(run, step, seconds)
            saved_at = seconds
            prune_checkpoints(run, training, best_step=first, last_step=step)

    chosen = choose_checkpoints(run, n, None, None)
    steps = [candidate.step for candidate in chosen]
    *planned, last = steps
    assert last == training.steps  # base's 100,000 is no multiple of 1,500
    assert {after - before for before, after in pairwise(planned)} == {training.checkpoint_every}
    assert 0 < last - planned[-1] <= training.checkpoint_every
    assert (last - steps[0]) / training.steps == approx(share)
    assert has_papers_interval(config) and list_missing_averaging(config, steps) == []
    by_clock = replace(training, checkpoint_every=None)
    assert not has_papers_interval(replace(config, training=by_clock))
