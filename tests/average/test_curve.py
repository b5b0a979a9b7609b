"""The curve scores what nmt-eval scores, reads no test set and writes nothing but its one file."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from support.saved_run import skip_fsync  # noqa: F401

from nmt.average import curve
from nmt.checkpoint import find_newest
from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.train import main as nmt_train
from nmt.system.run_folder import RunFolder


def test_the_curve_scores_what_nmt_eval_scores(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "training.checkpoint_every=20",
        "training.steps=60",
        "optimizer.warmup_steps=10",
        "model.dropout=0",
        "model.d_model=32",
        "decoding.min_length=6",
    ]
    assert nmt_train(["--config", str(toy), *options]) == 0
    run = RunFolder(tmp_path / "run")
    shutil.rmtree(tmp_path / "corpus")  # so that no test set can be read
    there = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert nmt_average([str(run.path), "--curve"]) == 0
    out = capsys.readouterr().out
    record = json.loads((run.path / "averaging.json").read_text())
    points = {point["n"]: point for point in record["points"]}
    assert list(points) == [1, 2, 3] and points[3]["steps"] == [20, 40, 60]
    assert f"best: N = {record['best_n']};" in out and out.count("\n") == 6 and out.count("*") == 1
    assert points[record["best_n"]]["bleu"] == max(point["bleu"] for point in points.values())
    texts = [(tmp_path / "store" / f"valid.{side}.txt").read_bytes() for side in ("src", "tgt")]
    assert record["dev_set"]["lines"] == 20 == texts[0].count(b"\n")
    assert [record["dev_set"][f"{side}_sha256"] for side in ("src", "ref")] == [
        hashlib.sha256(text).hexdigest() for text in texts
    ]
    # N = 1 is what validation said of the newest checkpoint; N = 3 what it says of the average as a
    # folder
    valid = [json.loads(line) for line in run.metrics.read_text().splitlines()][-1]
    assert (valid["step"], valid["bleu"], valid["nll"]) == (
        60,
        points[1]["bleu"],
        round(points[1]["nll"], 5),
    )
    # Not equal for want of anything to count
    assert len({point["bleu"] for point in points.values()} - {0.0}) == 3
    assert valid["signature"] == record["signature"]
    assert nmt_average([str(run.path), "--last", "3"]) == 0
    (dev := tmp_path / "dev").mkdir()
    for side, text in zip(("src", "ref"), texts, strict=True):
        (dev / side).write_bytes(text)
    assert (
        nmt_eval(
            [
                str(run.average),
                "--src",
                str(dev / "src"),
                "--ref",
                str(dev / "ref"),
                "--json",
                str(dev / "json"),
            ]
        )
        == 0
    )
    assert json.loads((dev / "json").read_text())["scores"][0]["value"] == points[3]["bleu"]
    shutil.rmtree(run.average)
    shutil.rmtree(dev)
    for name in ("results.json", "translations.json"):  # of nmt-eval
        (run.path / name).unlink()

    # interrupted, it leaves what was there
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = (run.path / "averaging.json").read_bytes()
    monkeypatch.setattr(curve, "validate", interrupted)
    assert nmt_average([str(run.path), "--curve", "1,2", "--ema"]) == 130
    monkeypatch.undo()
    assert (run.path / "averaging.json").read_bytes() == before
    assert {path for path in tmp_path.rglob("*")} == {*there, run.path / "averaging.json"}
    capsys.readouterr()
    assert nmt_average([str(run.path), "--curve", "2", "--ema", "0.5", "--every", "0.00001"]) == 0
    record = json.loads((run.path / "averaging.json").read_text())
    assert (record["decay"], record["choice"], record["best_n"]) == (
        0.5,
        "the last N, 1e-05 minutes apart",
        2,
    )
    before = (run.path / "averaging.json").read_bytes()
    for name in ("valid.tgt.txt", "valid.src.txt", "valid.src.ids.npy", "valid.tgt.offsets.npy"):
        original = (tmp_path / "store" / name).read_bytes()
        cut, flipped = original[:-9], original[:-9] + bytes(each ^ 1 for each in original[-9:])
        for data in (cut, flipped) if name.endswith(".txt") else (cut,):
            (tmp_path / "store" / name).write_bytes(data)
            capsys.readouterr()
            assert nmt_average([str(run.path), "--curve", "1"]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert (
                len(lines) == 1
                and str(tmp_path / "store" / name) in lines[0]
                and "nmt-prepare" in lines[0]
            )
        (tmp_path / "store" / name).write_bytes(original)
    assert (run.path / "averaging.json").read_bytes() == before
    shutil.move(tmp_path / "store", tmp_path / "gone")
    capsys.readouterr()
    assert nmt_average([str(run.path), "--curve", "1"]) == 2
    message = capsys.readouterr().err.splitlines()
    assert (
        len(message) == 1 and str(tmp_path / "store") in message[0] and "nmt-prepare" in message[0]
    )
    assert find_newest(run) is not None
