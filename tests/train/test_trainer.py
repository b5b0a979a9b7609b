"""The promises of training, each through the real command: exact continuation, ranks, refusals."""

import errno
import os
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch, approx, fixture, raises
from support.capture import Capture, read_errors, read_stderr
from support.finished_run import list_differing, read_lines, read_losses, read_tensors
from support.forks import run_on_ranks
from support.ground import Ground, check_same
from support.in_process import refuse, succeed
from support.processor import ALONE

from nmt.checkpoint import checkpoint
from nmt.checkpoint.run_checkpoints import list_steps
from nmt.commands.average import main as nmt_average
from nmt.commands.train import main
from nmt.config_files import load_config, load_recorded_config
from nmt.data.loader import Update
from nmt.system.errors import UserError
from nmt.system.files import read_bytes, read_json, write_json
from nmt.system.ranks import World
from nmt.system.run_folder import MODEL_FILE, OPTIMIZER_FILE, RunFolder
from nmt.train import run_start
from nmt.train.checkpoint_writer import Mirror
from nmt.train.events import Listener, Phase
from nmt.train.run_start import find_begun_run
from nmt.train.update import Outcomes, UpdateOutcome

# A line for each update, and no validation in between.
LOGGED = ("training.log_every=1", "training.validate_every=100", "training.steps=20")


@fixture(scope="module")
def whole(ground: Ground) -> RunFolder:
    """A run of 20 updates that nobody disturbed."""
    return train(ground, "whole", *LOGGED)


def train(ground: Ground, name: str, *settings: str) -> RunFolder:
    """Train in this process."""
    assert main(ground.argv(name, *settings)) == 0
    return ground.run(name)


def test_twenty_updates_are_ten_a_stop_and_ten_more(ground: Ground, whole: RunFolder) -> None:
    train(ground, "two", *LOGGED, "training.steps=10")
    two = train(ground, "two", *LOGGED)
    assert list_differing(read_tensors(whole.path, 20), read_tensors(two.path, 20)) == []
    assert read_losses(whole.path) == read_losses(two.path)
    other = train(ground, "other", *LOGGED, "seed=4")
    assert list_differing(read_tensors(whole.path, 20), read_tensors(other.path, 20))


class Notes(Listener):
    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.losses: dict[int, float] = {}

    def enter(self, phase: Phase) -> None:
        self.phases.append(phase)

    def hear_update(self, step: int, update: Update, micro_sums: torch.Tensor) -> None:
        assert len(update.micros) == len(micro_sums)
        self.losses[step] = float(micro_sums[:, 0].sum() / update.n_tgt)


def test_a_listener_hears_what_a_rank_does(ground: Ground, whole: RunFolder) -> None:
    settings = [*LOGGED, "training.validate_every=10", f"out={ground.folder / 'heard'}"]
    notes = Notes()
    config = load_config(str(ground.config), settings)
    assert run_start.train(config, config, ALONE, notes, Mirror()) == 0
    expected = {line["step"]: line["loss"] for line in read_lines(whole.path, "train")}
    assert notes.losses == approx(expected, abs=1e-5) and len(expected) == 20
    found = [phase for phase, _ in groupby(notes.phases)]
    assert found[:2] == ["training", "saving"] and found[-1] == "end"
    assert found.count("validating") == 2


def test_what_a_run_began_with_is_read_once(ground: Ground, monkeypatch: MonkeyPatch) -> None:
    auto = (*LOGGED, "training.precision=auto", "training.micro_tokens=auto")
    run = train(ground, "read", *auto, "training.steps=1")
    opened, open_file = [], os.open

    def note(path: Any, *rest: Any, **named: Any) -> int:
        opened.append(path)
        return open_file(path, *rest, **named)

    monkeypatch.setattr(os, "open", note)
    train(ground, "read", *auto, "training.steps=2")
    start = opened[: opened.index(str(run.metrics))]
    assert start.count(str(run.config)) == 1


class Late(Outcomes):
    """As on a GPU, the newest outcome stays behind unless it is waited for."""

    n_behind = 0

    def __init__(self, _: torch.device) -> None:
        super().__init__(torch.device("meta"))

    def take_completed(self, wait_for_newest: bool) -> Iterator[UpdateOutcome]:
        yield from super().take_completed(wait_for_newest)
        Late.n_behind += len(self.in_flight)


def test_outcomes_that_come_late_change_no_figure(ground: Ground, monkeypatch: MonkeyPatch) -> None:
    settings = ("training.log_every=2", "training.validate_every=5", "training.checkpoint_every=7")
    at_once = train(ground, "at-once", *settings)
    monkeypatch.setattr("nmt.train.loop.Outcomes", Late)
    check_same(train(ground, "late", *settings), at_once)
    assert Late.n_behind == 4  # after updates 3, 9, 11 and 13; the others log, validate or save


def test_ranks_with_different_texts_are_refused(
    ground: Ground, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    """As where each machine has a store of its own."""
    monkeypatch.setattr(World, "collect", lambda self, data: [data, b"another"])
    line = refuse(capsys, main, *ground.argv("torn", *LOGGED))
    assert "holds other data on another machine" in line


def test_what_was_killed_before_its_first_checkpoint_makes_way(
    ground: Ground, capsys: Capture
) -> None:
    killed = train(ground, "early", *LOGGED, "training.steps=2")
    shutil.rmtree(killed.checkpoints)
    other = (*LOGGED, "training.steps=1", "seed=9", "model.d_ff=16")
    metrics = killed.metrics.read_bytes()

    def check_refused() -> None:
        line = refuse(capsys, main, *ground.argv("early", *other))
        assert "started with different settings (seed: 3 -> 9; " in line
        assert killed.metrics.read_bytes() == metrics

    check_refused()  # it is done, and somebody removed its checkpoints
    status = read_json(killed.status)
    write_json(killed.status, status | {"state": "running", "step": 0})
    for made in (killed.average, killed.results, killed.curve, killed.sweep):
        made.touch()
        check_refused()
        made.unlink()
    assert list(read_losses(train(ground, "early", *other).path)) == [1]
    assert load_recorded_config(killed.config).seed == 9


def test_the_folder_of_another_program_is_refused(ground: Ground, capsys: Capture) -> None:
    run = ground.run("foreign")
    run.checkpoints.mkdir(parents=True)
    texts = {run.config: "learning_rate: 0.1\n", run.metrics: "precious", run.status: '{"step": 0}'}
    for path, text in texts.items():
        path.write_text(text)
    assert main(ground.argv("foreign")) == 2
    refused = "config.yaml:1: learning_rate: unknown key; damaged, or of another version of nmt"
    assert refused in read_stderr(capsys)
    assert {path: path.read_text() for path in texts} == texts


def test_the_root_folder_is_refused(ground: Ground) -> None:
    with raises(UserError, match="is the root folder; choose another out=DIR"):
        find_begun_run(load_config(str(ground.config), ["out=/"]))


def test_the_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    ground: Ground, capsys: Capture
) -> None:
    settings = (*LOGGED, "training.checkpoint_every=4", "training.steps=8")
    run = train(ground, "damaged", *settings)
    expected = read_tensors(run.path, 8)
    damaged = run.checkpoint(8) / "optimizer.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    capsys.readouterr()
    train(ground, "damaged", *settings)
    written = read_stderr(capsys)
    assert str(damaged) in written and "continuing after update 4" in written
    assert list_differing(read_tensors(run.path, 8), expected) == []
    shutil.rmtree(run.checkpoint(4))
    damaged.write_bytes(data)
    assert main(ground.argv("damaged", *settings)) == 1
    *_, last = read_errors(capsys)
    assert "none of its 1 checkpoints can be used" in last and str(damaged) in last
    assert last.endswith("restore one, or train again with another out=DIR")


def test_checkpoints_that_follow_soon_have_weights_alone_and_no_bit_is_lost(
    ground: Ground, whole: RunFolder, capsys: Capture
) -> None:
    keys = ("training.checkpoint_every=4", "training.checkpoint_minutes=10")
    settings = [*LOGGED, *keys, "training.keep_checkpoints=9"]
    run = train(ground, "light", *settings)
    assert list_steps(run) == [4, 8, 12, 16, 20]
    with_moments = [s for s in list_steps(run) if (run.checkpoint(s) / OPTIMIZER_FILE).exists()]
    assert with_moments == [4, 20]  # the first, because there was none, and the last
    weights = {step: read_bytes(run.checkpoint(step) / MODEL_FILE) for step in list_steps(run)}

    # as after a kill between updates 16 and 20
    shutil.rmtree(run.checkpoint(20))
    capsys.readouterr()
    train(ground, "light", *settings)
    assert "continuing after update 4" in read_stderr(capsys)
    assert list_differing(read_tensors(whole.path, 20), read_tensors(run.path, 20)) == []
    again = {step: read_bytes(run.checkpoint(step) / MODEL_FILE) for step in list_steps(run)}
    assert again == weights
    succeed(nmt_average, run.path, "--last", "3")


def test_weights_alone_do_not_hide_that_moments_cannot_be_written(
    ground: Ground, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    save = checkpoint.save_checkpoint

    def save_if_small(path: Path, snapshot: checkpoint.Snapshot, *rest: Any) -> None:
        if snapshot.moments:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(path, snapshot, *rest)

    monkeypatch.setattr(checkpoint, "save_checkpoint", save_if_small)
    settings = (*LOGGED, "training.checkpoint_every=2", "training.checkpoint_minutes=10")
    assert main(ground.argv("full", *settings)) == 1
    said = read_stderr(capsys)
    assert (
        "failure 3 in a row" in said and "the checkpoint of update 6 could not be written" in said
    )
    assert list_steps(ground.run("full")) == []


def test_what_training_continues_from_is_kept(ground: Ground) -> None:
    settings = (*LOGGED, "training.checkpoint_every=2", "training.checkpoint_minutes=10")
    run = train(ground, "kept", *settings, "training.keep_checkpoints=2", "training.steps=10")
    assert list_steps(run) == [2, 8, 10]


def test_best_and_last_are_known_by_name_and_old_ones_go(ground: Ground) -> None:
    settings = ("training.checkpoint_every=2", "training.validate_every=4")
    run = train(ground, "named", *settings, "training.keep_checkpoints=3")
    last, best = run.checkpoints / "last", run.checkpoints / "best"
    assert (run.path / "vocab.model").read_bytes() == (last / "vocab.model").read_bytes()
    assert last.resolve() == run.checkpoint(16)
    best_step = int(best.resolve().name.removeprefix("step-"))
    kept = {path.name for path in run.checkpoints.glob("step-*")}
    assert kept == {run.checkpoint(step).name for step in (12, 14, 16, best_step)}
    dev = {line["step"]: line["bleu"] for line in read_lines(run.path, "valid")}
    assert sorted(dev) == [4, 8, 12, 16] and dev[best_step] == max(dev.values())


def test_two_ranks_leave_together_when_the_user_is_mistaken(
    ground: Ground, whole: RunFolder
) -> None:
    start = ground.start(whole.path.name, *LOGGED, "model.dropout=0.5", size=2, at="-mistaken")
    assert start.wait(is_agent=False) == [2, 2], start.told()
    assert start.told().count("nmt-train: error:") == 1
    assert "model.dropout: 0.2 -> 0.5" in start.told()
    assert "nmt/train/" not in start.told()  # no traceback of ours on either rank


def test_a_table_of_positions_that_grows_on_one_rank(ground: Ground) -> None:
    """Only the main rank decodes, and so needs more positions than were reserved."""
    settings = ("training.log_every=1", "training.validate_every=1", "training.steps=3")
    run = ground.finish("grown", *settings, "model.max_positions=3", size=2)
    assert sorted(read_losses(run.path)) == [1, 2, 3]


def test_the_page_of_a_run_is_written_when_it_is_done(
    whole: RunFolder, ground: Ground, capsys: Capture
) -> None:
    assert whole.report.is_file()
    whole.report.unlink()
    whole.report.mkdir()  # it cannot be replaced: training is not lost for that
    assert main(ground.argv("whole", *LOGGED)) == 0
    assert "warning: no report" in read_stderr(capsys)
    whole.report.rmdir()
    assert main(ground.argv("whole", *LOGGED)) == 0
    next_line = f"its curves and samples: {whole.report}\nnext: nmt-average {whole.path}\n"
    assert read_stderr(capsys).endswith(next_line)


def test_what_only_a_compiled_model_needs_is_not_imported(ground: Ground) -> None:
    """Importing it takes a second, a fifth of the time to the first update of a base model."""
    argv = ground.argv("quick", "training.steps=2", "training.validate_every=2")
    program = (
        "import sys; from nmt.commands.train import main; code = main(); "
        "sys.exit(code or 2 * ('torch._dynamo' in sys.modules))"
    )
    ended = run_on_ranks(1, program, ground.folder / "quick.py", *argv)
    assert ended.codes == [0], ended.told()
    assert ground.run("quick").checkpoint(2).is_dir()


def test_settings_that_cannot_be_meant_are_named(ground: Ground, capsys: Capture) -> None:
    odd = ("training.steps=2", "optimizer.warmup_steps=3", "training.freeze=[encoder]")
    train(ground, "odd", *odd)
    said = read_stderr(capsys)
    assert "optimizer.warmup_steps is 3, but training.steps is 2" in said
    assert "training.freeze keeps random weights (encoder)" in said
    train(ground, "sane", "training.steps=2", "optimizer.warmup_steps=2")
    assert "warning" not in read_stderr(capsys)


def test_a_run_that_was_moved_is_not_trained_in_its_old_place(
    ground: Ground, tmp_path: Path, capsys: Capture
) -> None:
    run = train(ground, "before", "training.steps=2", "training.checkpoint_every=1")
    moved = tmp_path / "after"
    shutil.copytree(run.path, moved)  # which makes folders of links, as some ways of copying do
    line = refuse(capsys, main, "--config", moved / "config.yaml", "training.steps=3")
    assert f"give out={moved} to continue this run" in line
    assert list_steps(run) == [1, 2]
    for copy in (moved / "checkpoints" / "last", moved / "checkpoints" / "best"):
        assert copy.is_dir() and not copy.is_symlink()

    succeed(main, "--config", moved / "config.yaml", "training.steps=3", f"out={moved}")
    assert "could not update the links" not in read_stderr(capsys)
    assert (moved / "checkpoints" / "last").readlink() == Path("step-0000003")
    assert (moved / "checkpoints" / "best").is_symlink()
    succeed(main, "--config", moved / "config.yaml", f"out={moved}", "training.steps=3")


def test_a_folder_in_the_place_of_a_link_is_named_and_kept(ground: Ground, capsys: Capture) -> None:
    run = train(ground, "taken", "training.steps=1", "training.validate_every=100")
    last = run.checkpoints / "last"
    last.unlink()
    last.mkdir()
    (last / "mine.txt").write_text("mine")
    train(ground, "taken", "training.steps=2", "training.validate_every=100")
    assert f"{last}: is a folder of its own" in read_stderr(capsys)
    assert list_steps(run)[-1] == 2 and (last / "mine.txt").exists()
