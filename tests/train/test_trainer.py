"""The promises of training, each through the real command: exact continuation, ranks, refusals, interruption."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nmt.commands.train import main
from nmt.data.batch import Batch
from nmt.data.store import open_store
from nmt.train.memory_probe import try_worst
from nmt.train.parallel import Replica
from nmt.train.trainer import Trainer
from nmt.train.update import micro_seed


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:07d}"
    found = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
    return {
        name: value.clone() for name, value in found.items()
    }  # the file is mapped, and tests overwrite it


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_twenty_updates_are_ten_a_stop_and_ten_more(toy: Path, tmp_path: Path) -> None:
    assert main(["--config", str(toy)]) == 0
    assert main(["--config", str(toy), f"out={tmp_path}/two", "training.steps=10"]) == 0
    assert main(["--config", str(toy), f"out={tmp_path}/two"]) == 0
    assert differing(weights(tmp_path / "run", 20), weights(tmp_path / "two", 20)) == []
    assert losses(tmp_path / "run") == losses(tmp_path / "two")
    assert main(["--config", str(toy), f"out={tmp_path}/other", "seed=4"]) == 0
    assert differing(weights(tmp_path / "run", 20), weights(tmp_path / "other", 20))


def test_log_lines_after_the_checkpoint_are_written_once(toy: Path, tmp_path: Path) -> None:
    assert main(["--config", str(toy), "training.steps=10"]) == 0
    run = tmp_path / "run"
    before = (run / "metrics.jsonl").read_bytes()
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(
            b'{"kind": "train", "step": 11, "loss": 9.9}\n{"kind": "tr'
        )  # of updates that a crash lost
    assert main(["--config", str(toy)]) == 0
    after = (run / "metrics.jsonl").read_bytes()
    assert after.startswith(before) and sorted(losses(run)) == list(range(1, 21))


def torchrun(*options: str) -> subprocess.CompletedProcess[str]:
    """nmt-train on two ranks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "nmt.commands.train",
        *options,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.timeout(120)
def test_two_processes_see_the_same_examples_and_the_same_loss(toy: Path, tmp_path: Path) -> None:
    options = ["--config", str(toy), "model.dropout=0.0", "training.steps=8"]
    assert main([*options, f"out={tmp_path}/one"]) == 0
    done = torchrun(*options, f"out={tmp_path}/both")
    assert done.returncode == 0, done.stderr[-2000:]
    one, both = losses(tmp_path / "one"), losses(tmp_path / "both")
    assert one.keys() == both.keys()
    assert max(abs(one[k] - both[k]) for k in one) < 1e-5 + 1e-5  # the log rounds to 1e-5
    for name, value in weights(tmp_path / "one", 8).items():
        other = weights(tmp_path / "both", 8)[name]
        assert (value - other).abs().max() <= 2e-4 * max(1e-3, float(value.abs().max())), name


def test_a_run_continues_on_another_number_of_ranks(toy: Path, tmp_path: Path) -> None:
    options = ["--config", str(toy), "training.steps=6"]
    assert main([*options, f"out={tmp_path}/one"]) == 0
    assert main(["--config", str(toy), "training.steps=3", f"out={tmp_path}/mixed"]) == 0
    done = torchrun(*options, f"out={tmp_path}/mixed")
    assert done.returncode == 0, done.stderr[-2000:]
    one, mixed = (
        losses(tmp_path / "one"),
        losses(tmp_path / "mixed"),
    )  # dropout is on: masks follow the micro-batch
    assert one.keys() == mixed.keys() and max(abs(one[k] - mixed[k]) for k in one) < 5e-5


@pytest.mark.parametrize(
    "change", ["model.dropout=0.3", "seed=9", "training.tgt_tokens=200", "optimizer.scale=2.0"]
)
def test_a_changed_setting_is_refused_by_name(
    change: str, toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(toy), "training.steps=1"]) == 0
    capsys.readouterr()
    assert main(["--config", str(toy), "training.steps=2", change]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and change.split("=")[0] in error[0] and "out=" in error[0]


def test_the_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["--config", str(toy), "training.checkpoint_every=10"]) == 0
    expected = weights(run, 20)
    damaged = run / "checkpoints" / "step-0000020" / "optimizer.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    capsys.readouterr()
    assert main(["--config", str(toy), "training.checkpoint_every=10"]) == 0
    told = capsys.readouterr().err
    assert str(damaged) in told and "continuing after update 10" in told
    assert differing(weights(run, 20), expected) == []
    shutil.rmtree(run / "checkpoints" / "step-0000010")
    damaged.write_bytes(data)
    assert main(["--config", str(toy)]) == 1
    assert "all 1 checkpoints are damaged" in capsys.readouterr().err


def test_best_and_last_are_known_by_name_and_old_ones_go(toy: Path, tmp_path: Path) -> None:
    assert (
        main(
            [
                "--config",
                str(toy),
                "training.checkpoint_every=2",
                "training.validate_every=4",
                "training.keep_checkpoints=3",
            ]
        )
        == 0
    )
    folder = tmp_path / "run" / "checkpoints"
    assert (tmp_path / "run" / "vocab.model").read_bytes() == (
        folder / "last" / "vocab.model"
    ).read_bytes()
    best = (folder / "best").resolve().name
    assert (folder / "last").resolve().name == "step-0000020"
    kept = {p.name for p in folder.iterdir() if p.name.startswith("step-")}
    assert kept == {"step-0000016", "step-0000018", "step-0000020", best}
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    dev = {line["step"]: line["bleu"] for line in lines if line["kind"] == "valid"}
    assert sorted(dev) == [4, 8, 12, 16, 20] and dev[int(best[5:])] == max(dev.values())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_an_interrupted_run_saves_and_continues_exactly(
    number: int, code: int, toy: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "nmt.commands.train",
        "--config",
        str(toy),
        "training.steps=3000",
        "training.validate_every=100000",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    run = tmp_path / "run"
    deadline = time.monotonic() + 60
    while (
        not (run / "metrics.jsonl").exists()
        or len((run / "metrics.jsonl").read_bytes().splitlines()) < 5
    ):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in told, told
    stopped = int((run / "checkpoints" / "last").resolve().name[5:])
    assert main(["--config", str(toy), f"training.steps={stopped + 2}"]) == 0
    assert (
        main(["--config", str(toy), f"training.steps={stopped + 2}", f"out={tmp_path}/straight"])
        == 0
    )
    assert differing(weights(run, stopped + 2), weights(tmp_path / "straight", stopped + 2)) == []


def test_dropout_seeds_do_not_repeat() -> None:
    seeds = {
        micro_seed(seed, step, number)
        for seed in range(3)
        for step in range(40)
        for number in range(40)
    }
    assert len(seeds) == 3 * 40 * 40


def test_bf16_learns_about_the_same(toy: Path, tmp_path: Path) -> None:
    assert main(["--config", str(toy), "training.steps=4", f"out={tmp_path}/a"]) == 0
    assert (
        main(
            [
                "--config",
                str(toy),
                "training.steps=4",
                f"out={tmp_path}/b",
                "training.precision=bf16",
            ]
        )
        == 0
    )
    a, b = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert a != b and max(abs(a[k] - b[k]) for k in a) < 0.02


def test_two_ranks_leave_together_when_the_user_is_mistaken(toy: Path, tmp_path: Path) -> None:
    assert main(["--config", str(toy), "training.steps=1"]) == 0
    done = torchrun("--config", str(toy), "training.steps=2", "model.dropout=0.5")
    assert done.returncode != 0
    assert (
        done.stderr.count("nmt-train: error:") == 1 and "model.dropout: 0.2 -> 0.5" in done.stderr
    )
    assert "nmt/train/trainer.py" not in done.stderr  # no traceback of ours on either rank


def test_a_table_of_positions_that_grows_on_one_rank(toy: Path, tmp_path: Path) -> None:
    done = torchrun(
        "--config",
        str(toy),
        "model.max_positions=3",
        "training.steps=3",
        "training.validate_every=1",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3]


def test_a_run_that_diverges_ends_with_a_line(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(toy), "optimizer.scale=1e15"]) == 1
    assert "optimizer.scale" in capsys.readouterr().err.splitlines()[-1]
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_trying_the_worst_first_changes_nothing(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does before the first update, done here: the longest sentences, and as many as there is room for."""
    assert main(["--config", str(toy), "training.steps=3", f"out={tmp_path}/plain"]) == 0
    longest = []

    def noted(replica: Replica, batch: Batch, *rest: Any) -> torch.Tensor:
        longest.append((batch.src.longest, batch.src.n_sentences))
        return run(replica, batch, *rest)

    def tried_first(trainer: Trainer) -> None:
        if not trainer.state.step:
            kept = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            with monkeypatch.context() as context:
                context.setattr(Replica, "run", noted)
                try_worst(trainer.replica, trainer.store, trainer.micro_tokens, trainer.world)
            assert all(
                p.grad is None and torch.equal(p, kept[name])
                for name, p in trainer.model.named_parameters()
            )
        validate(trainer)

    validate, run = Trainer.validate, Replica.run
    monkeypatch.setattr(Trainer, "validate", tried_first)
    assert main(["--config", str(toy), "training.steps=3"]) == 0
    assert differing(weights(tmp_path / "run", 3), weights(tmp_path / "plain", 3)) == []
    lengths = open_store(tmp_path / "store", "train").src.lengths
    assert longest[0][0] == lengths.max() and longest[-1][0] < lengths.max()
    assert longest[-1][1] > longest[0][1]


def test_too_little_memory_is_told_with_what_to_lower(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Replica, "run", full)
    assert main(["--config", str(toy)]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "training.micro_tokens 90" in told and "training.micro_tokens=45" in told
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 2
