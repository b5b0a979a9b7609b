"""A budget of time becomes numbers of the config before a run begins, and the run takes that time."""

import random
from pathlib import Path

import pytest
from support.toy_corpus import write_toy_config, write_toy_corpus

from nmt.commands.init import main as nmt_init
from nmt.commands.train import main as nmt_train
from nmt.config import OptimizerConfig, RunConfig, load_config, load_recorded_config
from nmt.profile import budget
from nmt.profile.budget import LEAST_UPDATES, make_plan, parse_duration
from nmt.system.errors import UserError


def test_a_plan_takes_its_time_and_a_tenth_of_it_for_validations() -> None:
    rng = random.Random(1)
    for _ in range(500):
        seconds = 60 * 10 ** rng.uniform(0, 4)
        update_s = seconds / 10 ** rng.uniform(2.2, 5)
        validation_s = seconds * 10 ** rng.uniform(-5, -1.1)
        plan = make_plan(RunConfig(), seconds, update_s, validation_s)
        n_validations = -(-plan.steps // plan.validate_every)
        taken = plan.steps * update_s + n_validations * validation_s
        assert 0.85 * seconds <= taken <= 0.98 * seconds
        assert 1 <= n_validations <= 20
        assert plan.validate_every % plan.checkpoint_every == 0
        assert plan.warmup_steps <= max(1, plan.steps // 4) and plan.steps >= LEAST_UPDATES


def test_a_shorter_warm_up_reaches_the_same_rate() -> None:
    config = RunConfig(optimizer=OptimizerConfig(warmup_steps=4_000, scale=2.0))
    plan = make_plan(config, 1_000, 1.0, 1.0)
    rate = plan.scale * plan.warmup_steps**-0.5
    assert plan.warmup_steps < 200 and rate == pytest.approx(2.0 * 4_000**-0.5, rel=1e-3)
    constant = OptimizerConfig(schedule="constant", peak_lr=1e-4, warmup_steps=4_000)
    assert make_plan(RunConfig(optimizer=constant), 1_000, 1.0, 1.0).scale == 1.0


def test_what_is_too_short_or_not_a_time_is_refused() -> None:
    with pytest.raises(UserError, match="enough for 52 updates of 1.00 s, too few"):
        make_plan(RunConfig(), 60, 1.0, 0.5)
    assert parse_duration("1h30m") == 5_400 and parse_duration("0.5h") == 1_800
    for text in ("", "2", "2d", "h", "1m30h", "0.5m", "-1h"):
        with pytest.raises(UserError, match="give a time of at least a minute"):
            parse_duration(text)


def test_a_run_keeps_the_numbers_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budget, "_measure", lambda *_: (0.5, 1.0))
    config = write_toy_config(write_toy_corpus(tmp_path), tmp_path)
    command = ["--config", str(config), "budget=1m", "evaluation.bleu=false"]
    assert nmt_train(command) == 0
    recorded = load_recorded_config(tmp_path / "run" / "config.yaml")
    planned = make_plan(load_config(str(config)), 60, 0.5, 1.0)
    assert recorded.training.steps == planned.steps
    assert recorded.optimizer.warmup_steps == planned.warmup_steps
    monkeypatch.setattr(budget, "_measure", lambda *_: pytest.fail("measured again"))
    capsys.readouterr()
    assert nmt_train(command) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_nmt_init_writes_the_plan_into_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_toy_corpus(tmp_path)
    for language in ("en", "de"):  # enough different pairs
        lines = [f"{i} word" if language == "en" else f"{i} wort" for i in range(2_000)]
        (corpus / f"train.{language}").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(budget, "SAMPLE_S", 0.2)
    out = tmp_path / "my.yaml"
    files = [f"--{side}={corpus}/train.{name}" for side, name in (("src", "en"), ("tgt", "de"))]
    monkeypatch.chdir(tmp_path)
    assert nmt_init([*files, "--hours", "2", "-o", str(out)]) == 0
    config = load_config(str(out))
    every = config.training.checkpoint_every
    assert every is not None and config.training.steps // every in range(40, 50)
    assert config.optimizer.warmup_steps <= config.training.steps // 4
    assert "what fits into 120 minutes, by a measured speed" in out.read_text()
