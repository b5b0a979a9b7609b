"""scripts/bench/averaging.py: which checkpoints a mean takes, and that it scores what nmt-eval scores."""

import json
import sys
from pathlib import Path

import pytest

from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.train import main as nmt_train

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import averaging  # noqa: E402


def test_which_checkpoints_a_mean_takes() -> None:
    kinds = averaging.list_kinds([10, 20, 30, 40], {10: 2.0, 20: 1.0, 30: 1.5, 40: 1.7})
    steps = {kind.name: kind.steps for kind in kinds}
    assert steps["last 1"] == [40]
    assert steps["last 3"] == [20, 30, 40]
    assert steps["best 3"] == [20, 30, 40]
    assert "last 5" not in steps  # there are four
    (decaying,) = (kind for kind in kinds if kind.name == "decay 0.5")
    assert decaying.steps == [10, 20, 30, 40] and decaying.weights == [0.125, 0.25, 0.5, 1.0]


def test_a_mean_scores_what_nmt_eval_scores(
    toy: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["training.steps=30", "training.checkpoint_every=10", "decoding.min_length=6"]
    assert nmt_train(["--config", str(toy), *settings, "model.d_model=32"]) == 0
    text = [str(corpus / "test.en"), str(corpus / "test.de")]
    line = [str(tmp_path / "run"), "--test", *text, "--ends", "20", "30", "--name", "toy"]
    line += ["--out", str(tmp_path / "out")]
    assert averaging.main(line) == 0
    (measured,) = map(json.loads, (tmp_path / "out" / "runs.jsonl").read_text().splitlines())
    bleu = {(point["end"], point["kind"]): point["bleu"] for point in measured["points"]}

    assert nmt_average([str(tmp_path / "run"), "--last", "3"]) == 0
    assert nmt_eval([str(tmp_path / "run" / "average"), "--src", text[0], "--ref", text[1]]) == 0
    (result,) = json.loads((tmp_path / "run" / "results.json").read_text())
    assert bleu[30, "last 3"] == pytest.approx(result["scores"][0]["value"], abs=0.005) != 0

    table = (tmp_path / "out" / "table.md").read_text()
    gain = bleu[30, "last 3"] - bleu[30, "last 1"]
    assert f"{gain:+.2f}" in table and "| 20 |" in table
    # the same command again measures nothing
    assert averaging.main(line) == 0
    assert (tmp_path / "out" / "runs.jsonl").read_text().count("\n") == 1
