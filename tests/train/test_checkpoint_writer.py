"""Checkpoints on a disk that is full for a while: on a real small file system that is really full."""

import threading
from dataclasses import replace
from pathlib import Path

import torch
from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_errors, read_stderr
from support.finished_run import list_differing, read_losses, read_tensors
from support.ground import Ground
from support.in_process import succeed
from support.small_disk import SmallDisk
from test_checkpoint import VOCAB

from nmt.checkpoint import checkpoint
from nmt.checkpoint.checkpoint import Snapshot, TrainState
from nmt.checkpoint.run_checkpoints import list_steps
from nmt.commands.train import main
from nmt.config import ModelConfig, RunConfig, TrainingConfig
from nmt.extras import mirror
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure
from nmt.system.files import read_json, verify
from nmt.system.run_folder import RunFolder
from nmt.train import checkpoint_writer
from nmt.train.checkpoint_writer import CheckpointWriter, Mirror
from nmt.train.optimizer import Adam, make_optimizer, set_learning_rate, take_snapshot
from nmt.train.run_log import MetricsLog

CONFIG = RunConfig(
    model=ModelConfig(d_model=16, d_ff=24, n_heads=2, n_layers=1),
    seed=1,
    training=TrainingConfig(keep_checkpoints=2),
)


@fixture
def no_spare(monkeypatch: MonkeyPatch) -> None:
    """Ask for no spare room, so that the disk can be small: a save then fails while it writes, not
    before.
    """
    monkeypatch.setattr(checkpoint_writer, "SPARE_BYTES", 0)


def make_trained() -> tuple[Transformer, Adam]:
    torch.manual_seed(1)
    model = Transformer(CONFIG.model, 20)
    optimizer = make_optimizer(model, CONFIG.optimizer)
    train_on(model, optimizer)
    return model, optimizer


def take(model: Transformer, optimizer: Adam) -> Snapshot:
    return take_snapshot(model, optimizer)


def train_on(model: Transformer, optimizer: Adam) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    set_learning_rate(optimizer, 0.01)
    optimizer.step()


def make_writer(folder: Path) -> CheckpointWriter:
    run = RunFolder(folder)
    run.checkpoints.mkdir(parents=True)
    return CheckpointWriter(run, CONFIG, VOCAB, MetricsLog(run.metrics, 0), 0, Mirror())


@mark.usefixtures("no_spare")
def test_training_goes_on_while_the_disk_is_full(
    toy: Path,
    tmp_path: Path,
    small_disk: SmallDisk,
    capsys: Capture,
    monkeypatch: MonkeyPatch,
) -> None:
    """The disk fills up before the checkpoint of update 6, in the middle of a file, and has room
    again before 10.
    """
    settings = ["--config", str(toy), "training.checkpoint_every=2", "training.steps=10"]
    straight, run = tmp_path / "straight", small_disk.path / "run"
    succeed(main, *settings, f"out={straight}")
    save = checkpoint.save_checkpoint
    ballast: list[Path] = []

    def fill_and_save(path: Path, *args: object) -> None:
        step = int(path.name.removeprefix("step-"))
        if step == 6:
            ballast.append(small_disk.fill(30_000))  # room for a part of the optimizer
        if step == 10:
            ballast.pop().unlink()
        save(path, *args)  # type: ignore[arg-type]

    class Usage:
        free = 1 << 40  # until others fill the disk, between this question and the save

    monkeypatch.setattr(checkpoint, "save_checkpoint", fill_and_save)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    capsys.readouterr()
    succeed(main, *settings, f"out={run}", "training.keep_checkpoints=3")
    lines = read_errors(capsys)
    first, second = (line for line in lines if line.startswith("warning: the checkpoint"))
    assert "update 6" in first and "update 8" in second
    assert "No space left" in first and "failure 1 in a row; after 3" in first
    assert list_differing(read_tensors(run, 10), read_tensors(straight, 10)) == []
    # No line is lost either.
    assert read_losses(run) == read_losses(straight)


@mark.usefixtures("no_spare")
def test_the_third_failure_ends_the_run_and_the_last_good_checkpoint_stays(
    toy: Path, small_disk: SmallDisk, capsys: Capture
) -> None:
    run = small_disk.path / "run"
    settings = ["--config", str(toy), f"out={run}", "training.keep_checkpoints=2"]
    succeed(main, *settings, "training.steps=2")
    ballast = small_disk.fill(20_000)
    before = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}
    capsys.readouterr()
    settings += ["training.checkpoint_every=1", "training.steps=7"]
    assert main(settings) == 1
    *warnings, last = read_errors(capsys)
    full = [line for line in warnings if "bytes are needed" in line]
    assert len(full) == 3 and all(line.startswith("warning") for line in full)
    assert (
        last.startswith("nmt-train: failed: the checkpoint of update 5")
        and "free some disk space" in last
    )
    assert {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")} == before
    verify(run / "checkpoints/last")
    ballast.unlink()
    assert main(settings) == 0
    assert list(read_losses(run)) == list(range(1, 8))


def test_a_failure_is_counted_and_forgotten_and_the_third_ends_the_run(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    writer = make_writer(tmp_path)
    taken = take(*make_trained())
    with monkeypatch.context() as context:
        context.setattr("nmt.system.files.os.fsync", _full)
        for step in (1, 2):
            writer.save(taken, TrainState(step=step))
        with raises(Failure, match="update 2 could not be written.*No space left"):
            writer.finish()
    writer.save(taken, TrainState(step=3))
    writer.finish()
    assert writer.failures == 0 and list_steps(RunFolder(tmp_path)) == [3]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name[0] == "."] == []
    with monkeypatch.context() as context:
        context.setattr("nmt.system.files.os.fsync", _full)
        for step in (4, 5):
            writer.save(taken, TrainState(step=step))
        with raises(Failure, match="update 6 .* continues from .* of update 3"):
            writer.save(taken, TrainState(step=6))


def test_a_checkpoint_waits_for_the_copy_of_the_one_before(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    """Or it would be pruned while it is read."""
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir(parents=True)
    log, copied = MetricsLog(run.metrics, 0), mirror.RunMirror("memory://copy", CONFIG)
    writer = CheckpointWriter(run, CONFIG, VOCAB, log, 0, copied)
    seen: list[list[int]] = []
    is_free = threading.Event()

    def copy_slowly(*_: object) -> None:
        is_free.wait()
        seen.append(list_steps(run))
        raise ValueError("what nobody expects of a mirror")

    monkeypatch.setattr(mirror, "copy_run", copy_slowly)
    monkeypatch.setattr(mirror, "SLOW_S", 0.0)
    taken = take(*make_trained())
    writer.save(taken, TrainState(step=1))  # does not wait for its own copy
    threading.Timer(0.1, is_free.set).start()
    writer.save(taken, TrainState(step=2))
    writer.close()  # the run's lock is released next
    assert seen == [[1], [1, 2], [1, 2]]
    assert read_stderr(capsys).count("copied to training.mirror; raise") == 1


def test_a_damaged_newer_checkpoint_takes_no_place(tmp_path: Path) -> None:
    """As when a run resumes from 2 because 3 is damaged, with room for one."""
    taken = take(*make_trained())
    one = replace(CONFIG, training=replace(CONFIG.training, keep_checkpoints=1))
    run = RunFolder(tmp_path)
    for step in (2, 3):
        checkpoint.save_checkpoint(run.checkpoint(step), taken, TrainState(step=step), one, VOCAB)
    writer = CheckpointWriter(run, one, VOCAB, MetricsLog(run.metrics, 0), 2, Mirror())
    writer.link_and_prune(TrainState(step=2))
    assert list_steps(run) == [2, 3] and (run.checkpoints / "last").resolve() == run.checkpoint(2)
    writer.save(taken, TrainState(step=3))
    assert list_steps(run) == [3]
    verify(run.checkpoint(3))


def test_a_best_that_could_not_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    writer, taken = make_writer(tmp_path), take(*make_trained())
    writer.save(taken, TrainState(step=1, best=1.0, best_step=1))
    with monkeypatch.context() as context:
        context.setattr("nmt.system.files.os.fsync", _full)
        writer.save(taken, TrainState(step=2, best=2.0, best_step=2))
    for step in (3, 4, 5):
        writer.save(taken, TrainState(step=step, best=2.0, best_step=2))
    assert list_steps(writer.run) == [1, 4, 5]
    assert (writer.run.checkpoints / "best").resolve() == writer.run.checkpoint(1)


def test_a_run_that_is_moved_while_it_trains_is_to_be_moved_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    writer, taken = make_writer(run), take(*make_trained())
    writer.save(taken, TrainState(step=1))
    run.rename(tmp_path / "elsewhere")
    with raises(Failure, match=f"move {run} back .* it continues from its last checkpoint"):
        for step in (2, 3, 4):
            writer.save(taken, TrainState(step=step))


def test_links_that_cannot_be_made_are_no_failed_checkpoint(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    writer, taken = make_writer(tmp_path), take(*make_trained())
    with monkeypatch.context() as context:
        context.setattr("nmt.checkpoint.run_checkpoints.point_link", lambda *_: _full(0))
        writer.save(taken, TrainState(step=1))
    assert (writer.failures, writer.saved_step) == (0, 1)
    assert "could not update the links" in read_stderr(capsys)
    writer.link_and_prune(TrainState(step=1))
    assert (writer.run.checkpoints / "last").resolve() == writer.run.checkpoint(1)


def test_two_ranks_end_together_when_the_disk_stays_full(
    small_disk: SmallDisk, ground: Ground
) -> None:
    start = ground.start("run", f"out={small_disk.path}/run", "training.checkpoint_every=1", size=2)
    assert start.wait(is_agent=False) == [1, 1]
    output = start.told()
    assert output.count("nmt-train: failed: the checkpoint of update 3") == 1
    assert "Traceback" not in output
    assert read_json(small_disk.path / "run/status.json")["exit_code"] == 1


def _full(_: int) -> None:
    raise OSError(28, "No space left on device")
