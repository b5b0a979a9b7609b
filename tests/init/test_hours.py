"""Hours become numbers of the config before a run begins, and the run takes that time."""

import random
from pathlib import Path

import pytest
from support.toy_corpus import write_toy_corpus

from nmt.commands.init import main as nmt_init
from nmt.config_files import load_config
from nmt.extras.init import hours
from nmt.extras.init.hours import LEAST_UPDATES, Schedule, plan_schedule
from nmt.extras.init.recipe import SIZES
from nmt.system.errors import UserError

BY_TEXT = Schedule(
    tokens=4_096,
    steps=20_000,
    validate_every=1_000,
    checkpoint_every=500,
    warmup_steps=4_000,
    passes=40,
    reason="about 40 passes",
)


def test_a_plan_takes_its_time_and_a_tenth_of_it_for_validations() -> None:
    rng = random.Random(1)
    for _ in range(500):
        seconds = 60 * 10 ** rng.uniform(0, 4)
        update_s = seconds / 10 ** rng.uniform(2.2, 5)
        validation_s = seconds * 10 ** rng.uniform(-5, -1.1)
        plan = plan_schedule(BY_TEXT, seconds, update_s, validation_s)
        steps, every = plan.steps, plan.validate_every
        n_validations = -(-steps // every)
        taken = steps * update_s + n_validations * validation_s
        assert 0.85 * seconds <= taken <= 0.98 * seconds
        assert 1 <= n_validations <= 20
        assert every % plan.checkpoint_every == 0
        assert plan.warmup_steps <= max(1, steps // 4) and steps >= LEAST_UPDATES


def test_a_shorter_warm_up_reaches_the_same_rate() -> None:
    plan = plan_schedule(BY_TEXT, 1_000, 1.0, 1.0)
    assert plan.warmup_steps < 200
    size = SIZES[3]  # as hour.yaml
    for schedule in (BY_TEXT, plan):
        (line,) = [line for line in size.format(schedule, 100).split("\n") if "scale:" in line]
        scale = float(line.removeprefix("  scale: "))
        rate = scale * (size.d_model * schedule.warmup_steps) ** -0.5
        assert rate == pytest.approx(size.peak_rate, rel=0.01)


def test_text_that_is_seen_a_few_times_gets_less_dropout() -> None:
    """Whatever the amount of text would get in as many passes as it deserves."""
    for size in SIZES:
        n_words = min(size.max_words, 1e9)
        whole = size.plan(n_words)
        assert whole.passes == pytest.approx(whole.steps * size.tokens / (1.4 * n_words))
        for passes, most in ((0.3, 0.0), (2, 0.1), (20, 0.2), (200, 1.0)):
            steps = whole.steps * passes / whole.passes
            if steps < LEAST_UPDATES:
                continue
            plan = plan_schedule(whole, steps / 0.97, 1.0, 0.0)
            assert plan.passes == pytest.approx(passes, rel=0.02)
            (line,) = [line for line in size.format(plan, 100).split("\n") if "  dropout:" in line]
            assert line == f"  dropout: {min(size.dropout, most)}"


def test_what_is_too_short_is_refused() -> None:
    with pytest.raises(UserError, match="enough for 52 updates of 1.00 s, too few"):
        plan_schedule(BY_TEXT, 60, 1.0, 0.5)


def test_nmt_init_writes_the_plan_into_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_toy_corpus(tmp_path)
    for language in ("en", "de"):  # enough different pairs
        lines = [f"{i} word" if language == "en" else f"{i} wort" for i in range(2_000)]
        (corpus / f"train.{language}").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(hours, "SAMPLE_S", 0.2)
    monkeypatch.setattr("nmt.extras.profile.cost.MEASURED_S", 0.01)
    out = tmp_path / "my.yaml"
    files = [f"--{side}={corpus}/train.{name}" for side, name in (("src", "en"), ("tgt", "de"))]
    monkeypatch.chdir(tmp_path)
    assert nmt_init([*files, "--hours", "2", "-o", str(out)]) == 0
    config = load_config(str(out))
    every = config.training.checkpoint_every
    assert every is not None and config.training.steps // every in range(40, 50)
    assert config.optimizer.warmup_steps <= config.training.steps // 4
    assert "what fits into 120 minutes, by a measured speed" in out.read_text()

    # too little fits: no config, which would train for longer
    monkeypatch.setattr(hours, "_measure", lambda *_: (10.0, 1.0))
    short = tmp_path / "short.yaml"
    assert nmt_init([*files, "--hours", "0.1", "-o", str(short)]) == 2
    assert not short.exists() and not list(tmp_path.glob(".*.yaml"))
