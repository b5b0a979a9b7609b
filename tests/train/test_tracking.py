"""Sinks beside training: whatever they raise, and however long they take, the run is that of one without."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.finished_run import list_differing, read_lines, read_tensors, train_toy
from support.made_sinks import install_sinks
from support.saved_run import skip_fsync  # noqa: F401

from nmt.commands.train import main as nmt_train
from nmt.config import RunConfig, load_recorded_config
from nmt.system.errors import UserError
from nmt.system.run_folder import RunFolder
from nmt.train import tracking
from nmt.train.events import SkippedEvent
from nmt.train.tracking import Trackers

SETTINGS = ["training.steps=6", "training.validate_every=3", "evaluation.sentences=5"]
SETTINGS += ["decoding.min_length=2"]


@pytest.fixture(autouse=True)
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(tracking, "FINISH_S", 2.0)
    install_sinks(site)


def train(toy: Path, name: str, *settings: str) -> RunConfig:
    return train_toy(toy, *SETTINGS, f"out={toy.parent}/{name}", *settings)


def read_untimed(config: RunConfig) -> list[dict[str, Any]]:
    """The lines without what differs between any two runs."""
    return [
        {key: x for key, x in line.items() if not key.endswith(("_s", "_bytes"))}
        for line in read_lines(config.folder)
    ]


def test_no_sink_changes_a_run(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "raises,stumbles,hangs,ends,cannot-be-made,keeps"
    plain = train(toy, "plain")
    capsys.readouterr()
    tracked = train(toy, "tracked", f"training.track=[{names}]")
    error = capsys.readouterr().err
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
    assert f"the run is not affected, and nmt-track {run.path} --to ends" in error

    # the one that behaves has it all
    *kept, closed = map(json.loads, (run.path / "kept.jsonl").read_text().splitlines())
    assert kept == read_lines(run.path)
    assert closed == {"closed": True}


def test_a_continued_run_is_sent_anew(toy: Path) -> None:
    train(toy, "run", "training.steps=3")
    config = train(toy, "run", "training.track=[keeps]")
    steps = [json.loads(line).get("step") for line in (config.folder / "kept.jsonl").open()]
    assert steps[:-1] == [line["step"] for line in read_lines(config.folder)]
    with pytest.raises(UserError, match=r"track names a sink twice"):
        train(toy, "run", "training.track=[keeps,keeps]")


def test_a_sink_that_is_too_far_behind_gets_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "MAX_WAITING", 5)
    trackers = Trackers(tmp_path, ["hangs"], [])
    for step in range(20):
        trackers.send(SkippedEvent(step=step, loss="nan", grad_norm="nan"))
    trackers.finish()  # at once
    assert capsys.readouterr().err.count("hangs: is 5 lines behind; the run is not affected") == 1


def test_what_cannot_be_tracked_is_refused(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nmt_train(["--config", str(toy), "training.track=[tensorbord]"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    known = "cannot-be-made, ends, hangs, keeps, raises, stumbles, tensorboard, wandb"
    assert f"'tensorbord' is not a known sink; choose from {known}," in line

    monkeypatch.setattr("nmt.train.sinks.is_installed", lambda name: False)
    assert nmt_train(["--config", str(toy), "training.track=[tensorboard]"]) == 2
    assert "pip install 'nmtkit[tensorboard]'" in capsys.readouterr().err.splitlines()[-1]
    assert not (toy.parent / "store").exists() and not (toy.parent / "run").exists()
    monkeypatch.undo()

    # a model translates where the user's packages are not installed
    config = train(toy, "run")
    text = (config.folder / "config.yaml").read_text()
    elsewhere = toy.parent / "elsewhere.yaml"
    elsewhere.write_text(text.replace("track: []", "track:\n  - strange"))
    assert load_recorded_config(elsewhere).training.track == ("strange",)
