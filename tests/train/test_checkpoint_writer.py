"""Checkpoints on a disk that is full for a while, and from a thread: a real small file system, real lack of room.

Where no file system can be mounted, a limit on the size of files stands in (the write itself fails just so).
"""

import json
import resource
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from soaking import make_ground

from nmt import checkpoint
from nmt.checkpoint import TrainState, take_snapshot
from nmt.commands.train import main
from nmt.config import ModelConfig, RunConfig, TrainingConfig
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure
from nmt.system.files import verify
from nmt.system.run_folder import RunFolder
from nmt.train import checkpoint_writer
from nmt.train.checkpoint_writer import CheckpointWriter
from nmt.train.metrics_log import MetricsLog
from nmt.train.optimizer import Adam, make_optimizer, set_learning_rate

CONFIG = RunConfig(
    model=ModelConfig(d_model=16, d_ff=24, n_heads=2, n_layers=1),
    seed=1,
    training=TrainingConfig(keep_checkpoints=2),
)
VOCAB = b"pieces"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, mounted for real."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the disk need not be larger than toys; what is asked beforehand is then less than what is written."""
    monkeypatch.setattr(checkpoint_writer, "SPARE_BYTES", 0)


def trained() -> tuple[Transformer, Adam]:
    torch.manual_seed(1)
    model = Transformer(CONFIG.model, 20)
    optimizer = make_optimizer(model, CONFIG.optimizer)
    train_on(model, optimizer)
    return model, optimizer


def train_on(model: Transformer, optimizer: Adam) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    set_learning_rate(optimizer, 0.01)
    optimizer.step()


def writer_in(folder: Path, in_background: bool = False) -> CheckpointWriter:
    run = RunFolder(folder)
    run.checkpoints.mkdir(parents=True)
    return CheckpointWriter(run, CONFIG, VOCAB, MetricsLog(run.metrics, 0), 0, in_background)


def metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def fill(disk: Path, leave: int) -> Path:
    """Take all but so many bytes of the disk."""
    ballast = disk / "ballast"
    free = (
        int(
            subprocess.run(
                ["stat", "-f", "-c", "%a*%S", disk], capture_output=True, text=True, check=True
            ).stdout.partition("*")[0]
        )
        * resource.getpagesize()
    )
    ballast.write_bytes(bytes(max(0, free - leave)))
    return ballast


@pytest.mark.usefixtures("no_spare")
def test_training_goes_on_while_the_disk_is_full(
    toy: Path,
    tmp_path: Path,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk fills up before the checkpoint of update 6, in the middle of a file, and has room again before 10."""
    assert (
        main(["--config", str(toy), "training.checkpoint_every=2", f"out={tmp_path}/straight"]) == 0
    )
    save = checkpoint.save_checkpoint
    ballast: list[Path] = []

    def crowded(path: Path, *args: object) -> None:
        step = int(path.name[5:])
        if step == 6:
            ballast.append(fill(small_disk, 30_000))  # room for a part of the optimizer
        if step == 10:
            ballast.pop().unlink()
        save(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save_checkpoint", crowded)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 40})
    )  # others fill it meanwhile
    capsys.readouterr()
    run = small_disk / "run"
    assert (
        main(
            [
                "--config",
                str(toy),
                "training.checkpoint_every=2",
                f"out={run}",
                "training.keep_checkpoints=3",
            ]
        )
        == 0
    )
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert [("update 6" in line, "update 8" in line) for line in told if "checkpoint" in line] == [
        (True, False),
        (False, True),
    ], told
    assert (
        "No space left" in told[0] and "1 of the 3" in told[0] and "training continues" in told[0]
    )
    ours, theirs = (
        load_file(folder / "checkpoints/last/model.safetensors")
        for folder in (run, tmp_path / "straight")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [
        [line.get("loss") for line in metrics(folder)] for folder in (run, tmp_path / "straight")
    ]
    assert losses[0] == losses[1]  # nor is a line lost


@pytest.mark.usefixtures("no_spare")
def test_the_third_failure_ends_the_run_and_the_last_good_checkpoint_stays(
    toy: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_disk / "run"
    assert main(["--config", str(toy), f"out={run}", "training.steps=4"]) == 0
    ballast = fill(small_disk, 20_000)
    before = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}
    capsys.readouterr()
    options = [
        "--config",
        str(toy),
        f"out={run}",
        "training.checkpoint_every=2",
        "training.keep_checkpoints=2",
    ]
    assert main(options) == 1
    told = capsys.readouterr().err.splitlines()
    assert sum("bytes are needed" in line and line.startswith("warning") for line in told) == 3
    assert (
        told[-1].startswith("nmt-train: failed: the checkpoint of update 10")
        and "make room" in told[-1]
    )
    assert {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")} == before
    verify(run / "checkpoints/last")
    ballast.unlink()
    assert main(options) == 0
    assert [line["step"] for line in metrics(run) if line["kind"] == "train"] == list(range(1, 21))


def test_a_disk_that_is_full_at_the_end_is_a_failure(toy: Path, small_disk: Path) -> None:
    run = small_disk / "run"  # a checkpoint asks for more to be free than this disk has
    assert main(["--config", str(toy), f"out={run}", "training.steps=3"]) == 1
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert not list((run / "checkpoints").iterdir())


def test_a_thread_writes_what_was_when_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: training continues at once, and changes the weights while they are being written."""
    writer = writer_in(tmp_path, in_background=True)
    model, optimizer = trained()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    save = checkpoint.save_checkpoint

    def slow(*args: object) -> None:
        time.sleep(0.5)
        save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    began = time.monotonic()
    writer.save(take_snapshot(model, optimizer), TrainState(step=1))
    assert time.monotonic() - began < 0.4
    train_on(model, optimizer)
    writer.poll()
    assert not (tmp_path / "checkpoints/last").exists()
    writer.finish()
    found = load_file(tmp_path / "checkpoints/last/model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(found["tgt_embedding.weight"], model.tgt_embedding.weight)
    writer.save(
        take_snapshot(model, optimizer), TrainState(step=2)
    )  # into the same memory, once it is free
    writer.save(take_snapshot(model, optimizer), TrainState(step=3))
    writer.finish()
    assert checkpoint.list_steps(RunFolder(tmp_path)) == [2, 3]


def test_a_failure_in_the_thread_is_counted_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_in(tmp_path, in_background=True)
    taken = take_snapshot(*trained())
    with monkeypatch.context() as context:
        context.setattr("nmt.system.files.os.fsync", _full)
        for step in (1, 2):
            writer.save(taken, TrainState(step=step))
        writer.wait()
        assert writer.failures == 2 and not writer.is_broken
        with pytest.raises(Failure, match="update 2 could not be written.*No space left"):
            writer.finish()
    writer.save(taken, TrainState(step=3))
    writer.finish()
    assert writer.failures == 0 and checkpoint.list_steps(RunFolder(tmp_path)) == [3]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name[0] == "."] == []


def test_a_damaged_newer_checkpoint_takes_no_place(tmp_path: Path) -> None:
    """As when a run resumes from 2 because 3 is damaged, with room for one."""
    taken = take_snapshot(*trained())
    one = replace(CONFIG, training=replace(CONFIG.training, keep_checkpoints=1))
    run = RunFolder(tmp_path)
    for step in (2, 3):
        checkpoint.save_checkpoint(run.checkpoint(step), taken, TrainState(step=step), one, VOCAB)
    writer = CheckpointWriter(run, one, VOCAB, MetricsLog(run.metrics, 0), 2, in_background=False)
    writer.link_and_prune(TrainState(step=2))
    assert checkpoint.list_steps(run) == [2, 3] and (
        run.checkpoints / "last"
    ).resolve() == run.checkpoint(2)
    writer.save(taken, TrainState(step=3))
    assert checkpoint.list_steps(run) == [3]
    verify(run.checkpoint(3))


def test_a_best_that_could_not_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, taken = writer_in(tmp_path), take_snapshot(*trained())
    writer.save(taken, TrainState(step=1, best=1.0, best_step=1))
    with monkeypatch.context() as context:
        context.setattr("nmt.system.files.os.fsync", _full)
        writer.save(taken, TrainState(step=2, best=2.0, best_step=2))
    for step in (3, 4, 5):
        writer.save(taken, TrainState(step=step, best=2.0, best_step=2))
    assert checkpoint.list_steps(writer.run) == [1, 4, 5]
    assert (writer.run.checkpoints / "best").resolve() == writer.run.checkpoint(1)


def test_links_that_cannot_be_made_are_no_failed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, taken = writer_in(tmp_path), take_snapshot(*trained())
    with monkeypatch.context() as context:
        context.setattr("nmt.checkpoint.point", lambda *_: _full(0))
        writer.save(taken, TrainState(step=1))
    assert (writer.failures, writer.saved_step) == (
        0,
        1,
    ) and "could not be updated" in capsys.readouterr().err
    writer.link_and_prune(TrainState(step=1))
    assert (writer.run.checkpoints / "last").resolve() == writer.run.checkpoint(1)


def test_two_ranks_end_together_when_the_disk_stays_full(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ground = make_ground(tmp_path_factory.mktemp("full"))
    start = ground.start("run", f"out={small_disk}/run", "training.checkpoint_every=1", size=2)
    assert start.wait(is_agent=False) == [1, 1]
    assert (
        start.told().count("nmt-train: failed: the checkpoint of update 3") == 1
        and "Traceback" not in start.told()
    )
    assert json.loads((small_disk / "run/status.json").read_text())["exit_code"] == 1


def test_the_lock_outlives_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_in(tmp_path, in_background=True)
    save = checkpoint.save_checkpoint

    def slow(*args: object) -> None:
        time.sleep(0.3)
        save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    writer.save(take_snapshot(*trained()), TrainState(step=1))
    writer.close()
    verify(tmp_path / "checkpoints/last")


def _full(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_lines_that_cannot_be_written_wait(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(small_disk / "metrics.jsonl", 0)
    log.write({"n": 0})
    ballast = fill(small_disk, 0)
    long = {"text": "x" * 5_000}
    for n in (1, 2):
        log.write(long | {"n": n})
    assert capsys.readouterr().err.count("warning") == 1
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    ballast.unlink()
    log.write({"n": 3})
    assert [line["n"] for line in metrics(small_disk)] == [0, 1, 2, 3]
    assert log.sync() == (small_disk / "metrics.jsonl").stat().st_size


def test_the_log_continues_where_its_checkpoint_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1}\n{"n"')
    MetricsLog(path, 9).write({"n": 5})
    assert path.read_bytes() == b'{"n": 0}\n{"n": 5}\n'
    assert not capsys.readouterr().err
    MetricsLog(path, 100).write({"n": 6})  # somebody has cut it
    assert [line["n"] for line in metrics(tmp_path)] == [0, 5, 6]
    assert "18 of 100 bytes" in capsys.readouterr().err
