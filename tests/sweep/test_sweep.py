"""A sweep of tiny runs: what it leaves, how it continues, and that a kill changes nothing."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from pytest import MonkeyPatch, approx, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.in_process import refuse, succeed
from support.text_lines import read_text_lines
from support.toy_corpus import write_toy
from support.waiting import is_alive, until

import nmt.api
from nmt.commands.average import main as nmt_average
from nmt.commands.sweep import main as nmt_sweep
from nmt.corpus.prepare import prepare
from nmt.evaluate.results import read_results
from nmt.extras.sweep import jobs, run_one
from nmt.extras.sweep.grid import PlannedRun, Sweep, read_grid
from nmt.extras.sweep.jobs import RunQueue
from nmt.system.errors import UserError
from nmt.system.files import lock

GRID = """
base: toy.yaml
settings: {training.steps: 8, training.checkpoint_every: 2, training.validate_every: 4}
average: 2
score: [dev, test]
runs:
  base: {}
  "N = 2": {model.n_layers: 2}
"""


@fixture(scope="module", name="place")
def make_place(module_path: Path) -> Path:
    """A grid beside a toy config and its corpus."""
    folder = module_path
    write_toy(folder)
    (folder / "grid.yaml").write_text(GRID)
    return folder


@fixture(scope="module", name="whole")
def finish_whole(place: Path) -> Sweep:
    """A finished sweep, whose trainings ran in this process."""

    sweep = read_grid(str(place / "grid.yaml"), place / "whole")
    sweep.folder.mkdir()
    for run in sweep.runs:
        run_one.finish_run(sweep, run)
    assert nmt_sweep(argv(place, "whole")) == 0
    return sweep


def argv(place: Path, out: str, *words: str) -> list[str]:
    return [str(place / "grid.yaml"), "--out", str(place / out), *words]


def read_table(folder: Path) -> list[dict[str, str]]:
    """All of table.csv but for the minutes."""
    with open(folder / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["minutes"]
    return rows


def test_scores_are_those_of_other_commands(whole: Sweep, place: Path, capsys: Capture) -> None:
    table = read_table(whole.folder)
    assert [row["run"] for row in table] == ["base", "N = 2"]
    for run, row in zip(whole.runs, table, strict=True):
        dev, test = read_results(run.folder.path)
        assert row["dev BLEU"] == f"{dev.scores[0].value:.2f}"
        assert row["test BLEU"] == f"{test.scores[0].value:.2f}"
        assert dev.averaged == test.averaged == ["step-0000006", "step-0000008"]
        assert dev.checkpoint == "average"

        # the NLL, by another way: the log-probabilities of the dev set's pairs
        texts = [read_text_lines(place / f"corpus/valid.{side}") for side in ("en", "de")]
        scores = nmt.api.score_pairs(zip(*texts, strict=True), run.folder.average)
        n_pieces = sum(len(score.log_probs) for score in scores)
        nll = -sum(score.log_prob for score in scores) / n_pieces
        assert float(row["dev NLL"]) == approx(nll, abs=1e-4)

    capsys.readouterr()
    assert nmt_sweep(argv(place, "whole")) == 0  # nothing is left to do
    assert "N = 2  model.n_layers=2  1" in capsys.readouterr().out
    assert read_table(whole.folder) == table


def test_what_is_missing_is_made(whole: Sweep) -> None:
    table = read_table(whole.folder)
    run = whole.runs[0]
    run.folder.sweep.unlink()
    shutil.rmtree(run.folder.average)
    run.folder.results.unlink()
    # an average of other checkpoints is made anew
    succeed(nmt_average, run.folder.path, "--last", "3")
    assert nmt_sweep(argv(whole.folder.parent, "whole")) == 0
    assert len(read_results(run.folder.path)) == 2 and read_table(whole.folder) == table


def test_a_run_that_exists_keeps_its_text(whole: Sweep, place: Path, tmp_path: Path) -> None:
    def read_again(override: str) -> None:
        read_grid(str(place / "grid.yaml"), whole.folder, [override])

    moved, store = shutil.copytree(place / "corpus", tmp_path / "moved"), tmp_path / "store"
    elsewhere = f"data.root={moved}"
    read_again(elsewhere)
    shutil.copy(moved / "train.de", moved / "train.en")
    with raises(UserError, match="run 'base': .*moved/train.en: differs .*; restore what it had"):
        read_again(elsewhere)
    config = whole.runs[0].config
    data = replace(config.data, root=str(moved), store=str(store))
    assert prepare(data, config.vocab, config.seed)
    with raises(UserError, match="run 'base': .*store: holds other text .*; restore what it had"):
        read_again(f"data.store={store}")


def test_the_command_line_is_checked(place: Path, capsys: Capture) -> None:
    assert nmt_sweep(argv(place, "new", "--dry-run")) == 0
    assert "2  N-2-seed3  0.01M parameters, 8 updates" in capsys.readouterr().out
    line = refuse(capsys, nmt_sweep, *argv(place, "new", "--only", "3"))
    assert "--only 3: the grid has only 2 runs" in line
    with raises(SystemExit):
        nmt_sweep(argv(place, "new", "--only", "1", "--dry-run"))
    assert not (place / "new").exists()
    (place / "new").mkdir()
    with lock(place / "new", "nmt-sweep"):
        assert nmt_sweep(argv(place, "new")) == 2
    assert "is in use by nmt-sweep" in read_stderr(capsys)


# ---- processes that stand for runs --------------------------------------------------------------------


@fixture(name="pretended")
def pretend_runs(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Sweep]:
    """Two runs whose processes are shells."""
    sweep = read_grid(str(place / "grid.yaml"), tmp_path / "out")

    def make_shell_command(_: Sweep, run: PlannedRun) -> list[str]:
        return ["bash", "-c", (tmp_path / f"{run.label}.sh").read_text()]

    monkeypatch.setattr(jobs, "make_command", make_shell_command)
    yield sweep


def test_a_run_that_fails_leaves_the_others_alone(
    pretended: Sweep, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(jobs, "count_cores", lambda: 8)
    (tmp_path / "base-seed3.sh").write_text("echo fine; echo 'nmt-train: error: boom'; exit 2")
    (tmp_path / "N-2-seed3.sh").write_text(f"echo $OMP_NUM_THREADS > {tmp_path}/threads")
    done: list[str] = []
    queue = RunQueue(pretended, pretended.runs, 2)
    assert queue.finish_runs(lambda run: done.append(run.label)) == 0
    assert sorted(done) == ["N-2-seed3", "base-seed3"]
    assert queue.progress.done == 2
    (reason,) = queue.failures.values()
    assert reason.startswith("nmt-train: error: boom (exit code 2; ")
    assert (tmp_path / "threads").read_text() == "4\n"


def test_a_signal_is_handed_on(pretended: Sweep, tmp_path: Path) -> None:
    # late enough that a second run would have begun
    wait = "trap 'echo heard; exit 75' TERM; sleep 0.3; kill -INT $PPID; while true; do sleep 0.05; done"
    (tmp_path / "base-seed3.sh").write_text(wait)
    (tmp_path / "N-2-seed3.sh").write_text(f"touch {tmp_path}/begun")
    queue = RunQueue(pretended, pretended.runs, 1)
    assert queue.finish_runs(lambda _: None) == signal.SIGINT
    assert queue.failures == {}
    assert pretended.log_path(pretended.runs[0]).read_text() == "heard\n"
    assert not (tmp_path / "begun").exists()


# ---- real processes -----------------------------------------------------------------------------------


def start_sweep(place: Path, out: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "nmt.commands.sweep", *argv(place, out)]
    with open(place / f"{out}.log", "ab") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def list_processes(word: str) -> list[int]:
    """The processes whose command line holds a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return [pid for pid in found if is_alive(pid)]


@mark.soak  # takes ten seconds
def test_a_killed_sweep_ends_in_the_same_table(whole: Sweep, place: Path) -> None:
    """One run is finished, the other is killed while it trains."""
    shutil.copytree(whole.folder, place / "killed", symlinks=True)
    victim = place / "killed" / "N-2-seed3"
    shutil.rmtree(victim)
    (place / "killed" / "table.csv").unlink()
    process = start_sweep(place, "killed")
    until(lambda: any(victim.glob("checkpoints/step-*")))
    process.kill()
    process.wait()
    configs = str(place / "killed" / "configs")
    until(lambda: not list_processes(configs))  # no training outlives it
    assert start_sweep(place, "killed").wait() == 0
    assert read_table(place / "killed") == read_table(whole.folder)


@mark.soak  # takes minutes
@mark.timeout(3600)
def test_kills_at_random_moments(place: Path) -> None:
    (place / "grid.yaml").write_text(f"{GRID}seeds: [1, 2]\n")
    began_at = time.monotonic()
    assert start_sweep(place, "calm").wait() == 0
    run_s = (time.monotonic() - began_at) / 4
    for seed in range(5):
        rng = Random(seed)
        while True:
            process = start_sweep(place, f"storm{seed}")
            try:
                assert process.wait(rng.uniform(0.1, 2 * run_s)) == 0
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert read_table(place / f"storm{seed}") == read_table(place / "calm")
