"""The curve scores what nmt-eval scores, reads no test set and writes nothing but its one file."""

import hashlib
import shutil
from pathlib import Path

from pytest import MonkeyPatch
from support.capture import Capture, read_errors
from support.finished_run import read_lines, train_toy
from support.in_process import succeed

from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.extras import curve
from nmt.system.files import read_json
from nmt.system.run_folder import RunFolder
from nmt.system.strict_json import Fields


def draw(run: RunFolder, *options: str) -> Fields:
    succeed(nmt_average, run.path, "--curve", *options)
    return read_json(run.curve)


def test_the_curve_scores_what_nmt_eval_scores(
    toy: Path, tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    settings = ["training.checkpoint_every=20", "training.steps=60", "optimizer.warmup_steps=10"]
    settings += ["model.dropout=0", "model.d_model=32", "decoding.min_length=6"]
    run = RunFolder(train_toy(toy, *settings).folder)
    shutil.rmtree(tmp_path / "corpus")  # so that no test set can be read
    there = set(tmp_path.rglob("*"))
    capsys.readouterr()
    record = draw(run)
    assert set(tmp_path.rglob("*")) == {*there, run.curve}
    out = capsys.readouterr().out
    points = {point["n"]: point for point in record["points"]}
    assert list(points) == [1, 2, 3] and points[3]["steps"] == [20, 40, 60]
    assert f"best: N = {record['best_n']};" in out and out.count("\n") == 6 and out.count("*") == 1
    bleu = {n: point["bleu"] for n, point in points.items()}
    assert bleu[record["best_n"]] == max(bleu.values())
    assert len(set(bleu.values()) - {0.0}) == 3  # not equal for want of anything to count

    # N = 1 is what validation said of the newest checkpoint
    valid = read_lines(run.path)[-1]
    assert (valid["step"], valid["bleu"], valid["nll"]) == (60, bleu[1], round(points[1]["nll"], 5))
    assert valid["signature"] == record["signature"]

    # N = 3 is what nmt-eval says of the average as a folder
    texts = [tmp_path / "store" / f"valid.{side}.txt" for side in ("src", "tgt")]
    dev_set = record["dev_set"]
    assert dev_set["lines"] == 20
    for text, digest in zip(texts, (dev_set["src_sha256"], dev_set["ref_sha256"]), strict=True):
        assert hashlib.sha256(text.read_bytes()).hexdigest() == digest
    succeed(nmt_average, run.path, "--last", "3")
    files = ["--src", str(texts[0]), "--ref", str(texts[1]), "--json", str(tmp_path / "json")]
    succeed(nmt_eval, run.average, *files)
    assert read_json(tmp_path / "json")["scores"][0]["value"] == bleu[3]

    # which compares it with its members by the NLL of the dev set
    assert points[3]["nll"] > points[1]["nll"] + 0.005
    # of the newest, as the log has it
    warning = f"update 60, one of its members: NLL {points[3]['nll']:.4f}, not {valid['nll']:.4f}"
    assert warning in capsys.readouterr().out
    assert nmt_average([str(run.path), "--last", "1"]) == nmt_eval([str(run.average), *files]) == 0
    assert "one of its members" not in capsys.readouterr().out

    # interrupted, it leaves what was there
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = run.curve.read_bytes()
    with monkeypatch.context() as context:
        context.setattr(curve, "validate", interrupted)
        assert nmt_average([str(run.path), "--curve", "1,2"]) == 130
    assert run.curve.read_bytes() == before
    record = draw(run, "2", "--every", "0.00001")
    assert record["best_n"] == 2
    assert record["choice"] == "the last N, 1e-05 minutes apart"

    # a dev set that has changed, or is gone
    before = run.curve.read_bytes()
    for name in ("valid.tgt.txt", "valid.src.ids.npy", "valid.tgt.offsets.npy"):
        path = tmp_path / "store" / name
        original = path.read_bytes()
        path.write_bytes(original[:-9] + bytes(each ^ 1 for each in original[-9:]))
        check_refused(run, path, capsys)
        path.write_bytes(original)
    shutil.move(tmp_path / "store", tmp_path / "gone")
    check_refused(run, f"{tmp_path}/store: not found; a relative data.store starts where", capsys)
    assert run.curve.read_bytes() == before


def check_refused(run: RunFolder, why: Path | str, capsys: Capture) -> None:
    capsys.readouterr()
    assert nmt_average([str(run.path), "--curve", "1"]) == 2
    (line,) = read_errors(capsys)
    assert str(why) in line and "nmt-prepare" in line
