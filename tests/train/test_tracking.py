"""Sinks beside training: whatever they do, the run is that of one without, and they end with it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.made_sinks import install_sinks
from support.saved_run import skip_fsync  # noqa: F401
from support.small_disk import mount_small_disk
from support.waiting import is_alive, until

import nmt.api
from nmt.commands.train import main as nmt_train
from nmt.config import RunConfig, load_recorded_config
from nmt.system.errors import UserError
from nmt.system.run_folder import RunFolder
from nmt.train import tracking
from nmt.train.tracking import track_run

SETTINGS = ["training.steps=6", "training.validate_every=3", "evaluation.sentences=5"]
SETTINGS += ["decoding.min_length=2"]


@pytest.fixture(autouse=True)
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    install_sinks(site)


def train(toy: Path, name: str, *settings: str) -> RunConfig:
    out = f"out={toy.parent}/{name}"
    config = nmt.api.load_config(str(toy), [*SETTINGS, out, *settings])
    assert nmt.api.train(config) == 0
    return config


def read_lines(config: RunConfig) -> list[dict[str, Any]]:
    """Without what differs between any two runs."""
    lines = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: x for key, x in line.items() if not key.endswith(("_s", "_bytes"))} for line in lines
    ]


def test_no_sink_changes_a_run(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "FINISH_S", 4.0)
    plain = train(toy, "plain")
    capsys.readouterr()
    run = toy.parent / "tracked"
    run.mkdir()
    with mount_small_disk(run / "disk"):
        tracked = train(toy, "tracked", "training.track=[raises,hangs,ends,fills-disk,keeps]")
    warnings = [line for line in capsys.readouterr().err.splitlines() if "training.track" in line]
    os.kill(int((run / "hangs.pid").read_text()), signal.SIGKILL)

    # the same bits, the same figures
    for name in ("model", "optimizer"):
        first, second = (
            load_file(RunFolder(config.folder).checkpoint(6) / f"{name}.safetensors")
            for config in (plain, tracked)
        )
        assert all(first[key].equal(second[key]) for key in first)
    assert read_lines(plain) == read_lines(tracked)

    # one warning each
    reasons = {line.split(": ")[2]: line for line in warnings}
    assert len(warnings) == len(reasons) == 4, warnings
    assert (
        "raises: RuntimeError: the dog ate line<U+000A>1; the run is not affected"
        in reasons["raises"]
    )
    assert "hangs: is not done yet" in reasons["hangs"]
    assert "ends: was ended by SIGKILL" in reasons["ends"]
    assert "fills-disk: OSError: [Errno 28] No space left" in reasons["fills-disk"]
    assert f"nmt-track {run} --to ends" in reasons["ends"]

    # the one that behaves has it all
    who, *kept, closed = map(json.loads, (run / "kept.jsonl").read_text().splitlines())
    text = (run / "metrics.jsonl").read_text()
    assert kept == list(map(json.loads, text.splitlines())) and closed["closed"]
    assert (who["nice"], closed["policy"]) == (19, os.SCHED_IDLE)
    assert who["group"] == who["pid"]  # so Ctrl-C does not reach it
    assert not is_alive(who["pid"])


def test_a_continued_run_is_sent_anew(toy: Path) -> None:
    train(toy, "run", "training.steps=3")
    config = train(toy, "run", "training.track=[keeps]")
    steps = [json.loads(line).get("step") for line in (config.folder / "kept.jsonl").open()]
    assert steps[1:-1] == [line["step"] for line in read_lines(config)]
    with pytest.raises(UserError, match=r"track names a sink twice"):
        train(toy, "run", "training.track=[keeps,keeps]")


KILLED = """
import os, sys, time
from pathlib import Path
from nmt.train.tracking import track_run

run = Path(sys.argv[1])
with track_run(run, ["keeps", "hangs"]):
    while not ((run / "kept.jsonl").exists() and (run / "hangs.pid").exists()):
        time.sleep(0.05)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 2}\\n{"kind": "tra')
    os.kill(os.getpid(), 9)
"""


def test_a_killed_run_leaves_nobody_behind(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"damaged\n')
    # what waits for sinks that hang is shorter here
    program = "import nmt.train.follower as follower; follower.FINAL_S = 10; "
    monkey = tracking.PROGRAM.replace("from nmt", f"{program}from nmt", 1)
    script = f"import nmt.train.tracking as t\nt.PROGRAM = {monkey!r}\n{KILLED}"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script, str(run)], env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == -signal.SIGKILL
    lines = list(map(json.loads, (run / "kept.jsonl").read_text().splitlines()))
    until(lambda: not is_alive(lines[0]["pid"]), 60)
    lines = list(map(json.loads, (run / "kept.jsonl").read_text().splitlines()))
    assert lines[1:-1] == [{"kind": "train", "step": n} for n in (1, 2)] and lines[-1]["closed"]
    hanging = int((run / "hangs.pid").read_text())
    until(lambda: not is_alive(hanging), 60)


def test_an_error_of_training_does_not_wait_for_sinks(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ZeroDivisionError), track_run(tmp_path, ["keeps"]) as trackers:
        process = trackers.processes["keeps"]
        raise ZeroDivisionError
    assert process.wait(20) == 0
    assert (tmp_path / "kept.jsonl").read_text().splitlines()[-1].startswith('{"closed": true')


def test_what_cannot_be_tracked_is_refused(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nmt_train(["--config", str(toy), "training.track=[tensorbord]"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    known = "ends, fills-disk, hangs, keeps, raises, tensorboard, wandb"
    assert f"'tensorbord' is not a known sink; choose from {known}," in line

    monkeypatch.setattr("nmt.train.sinks.find_spec", lambda name: None)
    assert nmt_train(["--config", str(toy), "training.track=[tensorboard]"]) == 2
    assert "pip install '.[tensorboard]'" in capsys.readouterr().err.splitlines()[-1]
    assert not (toy.parent / "store").exists() and not (toy.parent / "run").exists()
    monkeypatch.undo()

    # a model translates where the user's packages are not installed
    config = train(toy, "run")
    text = (config.folder / "config.yaml").read_text()
    elsewhere = toy.parent / "elsewhere.yaml"
    elsewhere.write_text(text.replace("track: []", "track:\n  - strange"))
    assert load_recorded_config(elsewhere).training.track == ("strange",)

    outside = toy.parent / "outside"
    outside.mkdir()
    (config.folder / "tensorboard").symlink_to(outside)
    again = ["--config", str(toy), *SETTINGS, f"out={config.folder}"]
    assert nmt_train([*again, "training.track=[tensorboard]", "training.steps=7"]) == 2
    assert "run/tensorboard: is a link to" in capsys.readouterr().err.splitlines()[-1]
    assert not list(outside.iterdir())
