"""Sinks beside training: whatever they raise, and however long they take, the run is that of one without.
What TensorBoard and W&B have of a run is read back with their own readers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from pytest import MonkeyPatch, approx, fixture, raises
from support.capture import Capture, read_stderr
from support.finished_run import list_differing, read_lines, read_tensors, train_toy
from support.in_process import refuse
from support.made_sinks import install_sinks
from support.needs import needs_package
from support.text_lines import read_json_lines
from support.waiting import HANG_S

from nmt.commands.train import main as nmt_train
from nmt.config import RunConfig
from nmt.config_files import format_config, load_config, load_recorded_config
from nmt.extras.tracking import sinks
from nmt.extras.tracking.sinks import Trackers
from nmt.system.errors import UserError
from nmt.system.files import read_json
from nmt.system.run_folder import RunFolder
from nmt.system.strict_json import Fields
from nmt.train.events import SkippedEvent, read_events

SETTINGS = ["training.steps=6", "training.validate_every=3", "evaluation.sentences=5"]
SETTINGS += ["decoding.min_length=2"]


@fixture(autouse=True)
def user_package(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(sinks, "FINISH_S", 2.0)
    install_sinks(site)


def train(toy: Path, name: str, *settings: str) -> RunConfig:
    return train_toy(toy, *SETTINGS, f"out={toy.parent}/{name}", *settings)


def read_untimed(config: RunConfig) -> list[Fields]:
    """The lines without what differs between any two runs."""
    return [
        {key: x for key, x in line.items() if not key.endswith(("_s", "_bytes"))}
        for line in read_lines(config.folder)
    ]


def test_no_sink_changes_a_run(toy: Path, capsys: Capture) -> None:
    names = "raises,stumbles,hangs,ends,cannot-be-made,keeps"
    plain = train(toy, "plain")
    capsys.readouterr()
    tracked = train(toy, "tracked", f"training.track=[{names}]")
    error = read_stderr(capsys)
    run = RunFolder(tracked.folder)

    # the same bits, the same figures
    assert list_differing(read_tensors(plain.folder, 6), read_tensors(run.path, 6)) == []
    assert read_untimed(plain) == read_untimed(tracked)

    # one warning each, and the one that fails only now and then has none
    warnings = [line.split(": ", 3) for line in error.splitlines() if "training.track" in line]
    assert {name: reason.partition(";")[0] for _, _, name, reason in warnings} == {
        "raises": "RuntimeError: the dog ate line<U+000A>3",
        "hangs": "was not done 2 s after the end",
        "ends": "SystemExit: enough",
        "cannot-be-made": "OSError: [Errno 28] No space left on device",
    }
    assert len(warnings) == 4
    assert "the run is not affected, and its next start sends all its figures" in error

    # the one that behaves has it all
    *kept, closed = read_json_lines(run.path / "kept.jsonl")
    assert kept == read_lines(run.path)
    assert closed == {"closed": True}


def test_a_continued_run_is_sent_anew(toy: Path) -> None:
    train(toy, "run", "training.steps=3")
    config = train(toy, "run", "training.track=[keeps]")
    steps = [json.loads(line).get("step") for line in (config.folder / "kept.jsonl").open()]
    assert steps[:-1] == [line["step"] for line in read_lines(config.folder)]
    with raises(UserError, match=r"track names a sink twice"):
        train(toy, "run", "training.track=[keeps,keeps]")


def test_a_sink_that_is_too_far_behind_gets_no_more(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sinks, "MAX_WAITING", 5)
    trackers = Trackers(["hangs"])
    trackers.start(tmp_path, [])
    for step in range(20):
        trackers.send(SkippedEvent(step=step, loss="nan", grad_norm="nan"))
    trackers.finish()  # at once
    assert read_stderr(capsys).count("hangs: is 5 lines behind; the run is not affected") == 1


def test_what_cannot_be_tracked_is_refused(
    toy: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    line = refuse(capsys, nmt_train, "--config", toy, "training.track=[tensorbord]")
    known = "cannot-be-made, ends, hangs, keeps, raises, stumbles, tensorboard, wandb"
    assert f"'tensorbord' is not a known sink; choose from {known}," in line

    monkeypatch.setattr("nmt.extras.tracking.sinks.is_installed", lambda name: False)
    line = refuse(capsys, nmt_train, "--config", toy, "training.track=[tensorboard]")
    assert "pip install -e '.[tensorboard]'" in line
    assert not (toy.parent / "store").exists() and not (toy.parent / "run").exists()
    monkeypatch.undo()

    # a model translates where the user's packages are not installed
    config = train(toy, "run")
    text = (config.folder / "config.yaml").read_text()
    elsewhere = toy.parent / "elsewhere.yaml"
    elsewhere.write_text(text.replace("track: []", "track:\n  - strange"))
    assert load_recorded_config(elsewhere).training.track == ("strange",)


# ---- TensorBoard and W&B ---------------------------------------------------------------------------


def make_lines(step: int) -> list[Fields]:
    """What training writes at an update that is validated."""
    texts = {"source": "# Der *Hund*", "reference": "<b>", "translation": "The dog"}
    return [
        {"kind": "train", "step": step, "nll": 4.0 - step, "lr": 0.5, "elapsed_s": 10.0 * step},
        {"kind": "sample", "step": step, "line": 7, **texts},
        {"kind": "sample", "step": step, "line": 9, **texts},
        {"kind": "valid", "step": step, "nll": 2.0, "bleu": None},
        {"kind": "warning", "step": step, "problem": "stalled", "message": "?"},
    ]


@fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(format_config(load_config("demo.yaml")))
    write(folder, 1, 2, 3)
    return folder


def write(run: Path, *steps: int) -> None:
    lines = [json.dumps(line) + "\n" for step in steps for line in make_lines(step)]
    (run / "metrics.jsonl").write_text("".join(lines))


def send_from_here(run: Path) -> None:
    events, _ = read_events(run / "metrics.jsonl")
    trackers = Trackers(["tensorboard"])
    trackers.start(run, events)
    trackers.finish()


SEND = """
import sys
from pathlib import Path
from nmt.extras.tracking import sinks
from nmt.train.events import read_events
name, run = sys.argv[1:]
sinks.FINISH_S = 100.0
events, _ = read_events(Path(run) / "metrics.jsonl")
trackers = sinks.Trackers([name])
trackers.start(Path(run), events)
trackers.finish()
"""


def send(run: Path, name: str, **environment: str) -> None:
    """Send all lines in a process of its own, because wandb installs hooks and starts threads."""
    done = subprocess.run(
        [sys.executable, "-c", SEND, name, str(run)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr


@needs_package("tensorboard", "tensorboard")
def test_tensorboard_has_the_figures(run: Path, monkeypatch: MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    foreign = run / "tensorboard" / "events.out.tfevents.of.mine"
    foreign.parent.mkdir()
    foreign.write_bytes(b"")
    monkeypatch.setattr(sinks, "FINISH_S", HANG_S)
    send_from_here(run)
    (first,) = set(foreign.parent.iterdir()) - {foreign}
    write(run, 1, 2)  # it went back to update 2
    send_from_here(run)
    (newest,) = set(foreign.parent.iterdir()) - {foreign}
    assert newest.name > first.name  # else an open TensorBoard would not take it up

    board = EventAccumulator(str(newest))
    board.Reload()
    assert board.Tags()["scalars"] == ["train/nll", "train/lr", "train/elapsed_s", "valid/nll"]
    assert [(point.step, point.value) for point in board.Scalars("train/nll")] == [(1, 3), (2, 2)]
    first_point, second_point = board.Scalars("train/nll")
    assert second_point.wall_time - first_point.wall_time == approx(10)
    (text,) = board.Tensors("config/text_summary")[0].tensor_proto.string_val
    assert b"    model:\n      d_model: 128\n" in text
    (text,) = board.Tensors("sample/line 7/text_summary")[-1].tensor_proto.string_val
    assert text.startswith(b"**source** &#35; Der &#42;Hund&#42;\n\n**reference** &#60;b&#62;\n\n")


@needs_package("wandb", "wandb")
def test_wandb_has_the_figures(run: Path, tmp_path: Path) -> None:
    from wandb.util import get_core_path

    environment = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "WANDB_PROJECT": "nmt"}
    send(run, "wandb", **environment)

    reader = [get_core_path(), "leet", "inspect", "-no-observability", "-json", str(run / "wandb")]
    records = subprocess.run(
        reader, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in records.stdout.splitlines()]
    (started,) = [record["run"] for record in found if record["type"] == "run"]
    assert (started["project"], started["display_name"]) == ("nmt", "demo")
    assert started["config"]["update"]["model"]["d_model"] == 128
    history = [record["history"]["item"] for record in found if record["type"] == "history"]
    assert [row["_step"] for row in history] == [1, 2, 3]
    for step, row in enumerate(history, 1):
        assert row["train/nll"] == 4 - step
        assert row["valid/nll"] == 2
        assert row["samples.nrows"] == 2
    (table,) = (run / "wandb").glob("latest-run/files/media/table/samples_3_*.json")
    assert read_json(table)["data"][0] == [7, "# Der *Hund*", "<b>", "The dog"]
