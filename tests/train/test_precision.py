"""training.precision: auto takes what is faster where a run begins, and the run keeps it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nmt.commands.train import main as nmt_train
from nmt.config import load_recorded_config
from nmt.system.ranks import World
from nmt.train import precision
from nmt.train.precision import resolve_precision

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(("fp32_s", "bf16_s", "chosen"), [(2.0, 1.0, "bf16"), (1.0, 5.0, "fp32")])
def test_a_run_begins_with_the_faster_one_and_keeps_it(
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fp32_s: float,
    bf16_s: float,
    chosen: str,
) -> None:
    monkeypatch.setattr(precision, "_time_products", lambda *_: (fp32_s, bf16_s))
    line = ["--config", str(toy), "training.precision=auto", "training.steps=2"]
    assert nmt_train(line) == 0
    told = capsys.readouterr().err
    assert f"training.precision: auto has chosen {chosen}, {max(fp32_s, bf16_s):.1f} times" in told
    assert load_recorded_config(tmp_path / "run" / "config.yaml").training.precision == chosen

    # on a machine where the other one is faster
    monkeypatch.setattr(precision, "_time_products", lambda *_: (bf16_s, fp32_s))
    assert nmt_train([*line, "training.steps=4"]) == 0
    assert "auto has chosen" not in capsys.readouterr().err
    assert load_recorded_config(tmp_path / "run" / "config.yaml").training.precision == chosen
    steps = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in steps if row["kind"] == "train"] == [1, 2, 3, 4]

    # what is written out is never replaced
    other = {"bf16": "fp32", "fp32": "bf16"}[chosen]
    assert nmt_train([*line, "training.steps=4", f"training.precision={other}"]) == 2
    assert f"training.precision: {chosen} -> {other}" in capsys.readouterr().err


def test_a_gpu_gets_bf16_without_a_trial(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_time_products", lambda *_: pytest.fail("timed on a CPU"))
    config = load_recorded_config(toy)
    config = replace(config, training=replace(config.training, precision="auto"))
    gpu = World(0, 1, torch.device("cuda"))
    assert resolve_precision(config, gpu).training.precision == "bf16"


def test_the_trial_measures_this_processor() -> None:
    shortest = precision._time_products(256, 1024)
    assert 0 < min(shortest) and max(shortest) < 1
