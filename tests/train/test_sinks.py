"""What TensorBoard and W&B have of a run, read back with their own readers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.needs import needs_package

from nmt.commands.track import main as nmt_track
from nmt.config import format_config, load_config
from nmt.train.tracking import MetricsTail
from nmt.translate.attention_maps import AttentionMap

SOURCE = ["▁Der", "▁$Hund$", "</s>"]
TARGET = ["▁The", "▁dog", "<b>", "</s>"]


def make_lines(step: int) -> list[dict[str, Any]]:
    """What training writes at an update that is validated."""
    weights = np.full((1, 1, len(TARGET), len(SOURCE)), 1 / 3, np.float32)
    attention = AttentionMap(SOURCE, TARGET, [0, 1, 1], weights).to_json()
    texts = {"source": "# Der *Hund*", "reference": "<b>", "translation": "The dog"}
    return [
        {"kind": "train", "step": step, "nll": 4.0 - step, "lr": 0.5, "elapsed_s": 10.0 * step},
        {"kind": "sample", "step": step, "line": 7, **texts, "attention": attention},
        {"kind": "sample", "step": step, "line": 9, **texts, "attention": {"memory": "?"}},
        {"kind": "valid", "step": step, "nll": 2.0, "nll/1-10": 3.5, "bleu": None},
        {"kind": "warning", "step": step, "problem": "stalled", "message": "?"},
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(format_config(load_config("demo.yaml")))
    write(folder, 1, 2, 3)
    return folder


def write(run: Path, *steps: int) -> None:
    lines = [json.dumps(line) + "\n" for step in steps for line in make_lines(step)]
    (run / "metrics.jsonl").write_text("".join(lines))


def test_only_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert not list(tail.read())
    long = json.dumps({"kind": "warning", "step": 1, "message": "x" * 100_000})
    path.write_text('{"kind": "train", "step": 1}\n?\n' + long + '\n{"kind": "train", "st')
    assert [event.kind for event in tail.read()] == ["train"]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert [(event.kind, event.step) for event in tail.read()] == [("train", 2)]


@needs_package("tensorboard", "tensorboard")
def test_tensorboard_has_the_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    foreign = run / "tensorboard" / "events.out.tfevents.of.mine"
    foreign.parent.mkdir()
    foreign.write_bytes(b"")
    assert nmt_track([str(run), "--to", "tensorboard"]) == 0
    (first,) = set(foreign.parent.iterdir()) - {foreign}
    ahead = foreign.with_name("events.out.tfevents.9000000000000000000.nmt")
    first.rename(ahead)  # by a clock that was ahead
    write(run, 1, 2)  # it went back to update 2
    assert nmt_track([str(run), "--to", "tensorboard"]) == 0
    assert f"tensorboard has 10 lines of {run}/metrics.jsonl" in capsys.readouterr().err

    newest, foreign_too = sorted((run / "tensorboard").iterdir())
    assert foreign_too == foreign and newest.name > ahead.name
    board = EventAccumulator(str(newest))
    board.Reload()
    tags = board.Tags()
    assert tags["scalars"] == [
        *("train/nll", "train/lr", "train/elapsed_s", "valid/nll", "nll/1-10"),
    ]
    assert [(point.step, point.value) for point in board.Scalars("train/nll")] == [(1, 3), (2, 2)]
    first, second = board.Scalars("train/nll")
    assert second.wall_time - first.wall_time == pytest.approx(10)
    (text,) = board.Tensors("config")[0].tensor_proto.string_val
    assert b"    model:\n      d_model: 128\n" in text
    (text,) = board.Tensors("sample/line 7")[-1].tensor_proto.string_val
    assert text.startswith(b"**source** &#35; Der &#42;Hund&#42;\n\n**reference** &#60;b&#62;\n\n")


@needs_package("wandb", "wandb")
def test_wandb_has_the_figures(run: Path, tmp_path: Path) -> None:
    from wandb.util import get_core_path

    # in a process of its own, because wandb installs hooks and starts threads
    command = [sys.executable, "-m", "nmt.commands.track", str(run), "--to", "wandb"]
    environment = os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    environment.pop("WANDB_PROJECT", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "wandb has 15 lines" in done.stderr, done.stderr

    reader = [get_core_path(), "leet", "inspect", "-no-observability", "-json", str(run / "wandb")]
    records = subprocess.run(reader, env=environment, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in records.stdout.splitlines()]
    (started,) = [record["run"] for record in found if record["type"] == "run"]
    assert (started["project"], started["display_name"]) == ("nmt", "demo")
    assert started["config"]["update"]["model"]["d_model"] == 128
    history = [record["history"]["item"] for record in found if record["type"] == "history"]
    assert [row["_step"] for row in history] == [1, 2, 3]
    for step, row in enumerate(history, 1):
        assert row["train/nll"] == 4 - step
        assert row["valid/nll"] == 2 and row["nll/1-10"] == 3.5
        assert row["samples.nrows"] == 2
    (table,) = (run / "wandb").glob("latest-run/files/media/table/samples_3_*.json")
    assert json.loads(table.read_text())["data"][0] == [7, "# Der *Hund*", "<b>", "The dog"]


def test_nmt_track_names_what_is_wrong(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nmt_track([str(run), "--to", "tensorbord"]) == 2
    assert "choose from tensorboard, wandb" in capsys.readouterr().err
    assert nmt_track([str(run / "nothing"), "--to", "tensorboard"]) == 2
    assert "metrics.jsonl: not found" in capsys.readouterr().err
    (run / "tensorboard").symlink_to(run.parent)
    assert nmt_track([str(run), "--to", "tensorboard"]) == 2
    assert "tensorboard: is a link to" in capsys.readouterr().err
    assert not list(run.parent.glob("events*"))
