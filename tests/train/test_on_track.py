"""A run that learns only how often each piece occurs draws a warning, a healthy one does not.

The trainings are toys, judged earlier than real runs are, which is stricter: `make soak` trains
more of them, longer, and judges them as real runs are.
"""

import math

import numpy as np
from pytest import MonkeyPatch, approx, fixture, mark
from support.capture import Capture, read_stderr
from support.ground import Ground
from support.rings import amount

from nmt.commands.train import main
from nmt.config import OptimizerConfig
from nmt.data.store import Side
from nmt.system.run_folder import RunFolder
from nmt.train import on_track
from nmt.train.events import Event, WarningEvent, parse_line, read_events
from nmt.train.on_track import LearningCheck, unigram_entropy

# Two sentences, five five six and seven: 6 tokens with their end marks.
SIDE = Side(np.array([5, 5, 6, 7], np.uint16), np.array([0, 3, 4], np.int64))
ENTROPY = 2 * (2 / 6) * math.log(6 / 2) + 2 * (1 / 6) * math.log(6)

MIN_UPDATES = amount(60, on_track.MIN_UPDATES)
STEPS = amount(100, 560)
SETTINGS = (
    f"training.steps={STEPS}",
    "training.micro_tokens=300",
    "training.log_every=20",
    "training.validate_every=100000",
    "training.checkpoint_every=null",
    "evaluation.bleu=false",
)
STALL = "optimizer.scale=20"
HEALTHY = {
    "post-norm": ["seed=4"],
    "pre-norm": ["model.norm=pre", "model.tied=false"],
    "window-bf16": ["model.window=2", "training.precision=bf16"],
    "plain": [],
    "bf16": ["training.precision=bf16"],
    "learned": ["model.positions=learned", "model.max_positions=256"],
    "wide": ["model.d_model=32", "model.d_ff=64", "seed=7"],
    "deep": ["model.n_layers=3", "optimizer.scale=0.5"],  # at the unigram entropy to update 200
    "plain-loss": ["training.label_smoothing=0", "model.dropout=0"],
    "warm-up": ["optimizer.warmup_steps=100"],
}


def test_unigram_entropy_counts_pieces_and_end_marks() -> None:
    assert unigram_entropy(SIDE) == approx(ENTROPY, abs=1e-12)


def test_a_large_store_is_sampled_from_end_to_end() -> None:
    # The corpora of the two halves share no piece.
    rng = np.random.default_rng(1)
    halves = [rng.integers(4, 20, 50_000), rng.integers(20, 24, 50_000)]
    ids = np.concatenate(halves).astype(np.uint16)
    side = Side(ids, np.arange(0, 100_001, 10))
    assert unigram_entropy(side, 5_000) == approx(unigram_entropy(side), abs=0.01)


# ---- when it warns -------------------------------------------------------------------------------


def logged(kind: str, step: int, nll: float, problem: str = "") -> Event:
    event = parse_line({"kind": kind, "step": step, "nll": nll, "problem": problem})
    assert event is not None
    return event


def make_check(earlier: list[Event] | None = None, warmup_steps: int = 20) -> LearningCheck:
    return LearningCheck(OptimizerConfig(warmup_steps=warmup_steps), "post", SIDE, earlier or [])


def list_warnings(check: LearningCheck, nlls: list[tuple[int, float]]) -> list[tuple[int, str]]:
    found = []
    for step, share in nlls:
        warning = check.check(step, share * ENTROPY)
        if warning:
            found.append((step, warning.problem))
    return found


@mark.parametrize(
    "warmup_steps, expected", [(20, [(600, "stalled")]), (640, [(800, "stalled")]), (900, [])]
)
def test_a_stalled_run_draws_a_warning_after_its_first_window_past_warm_up(
    warmup_steps: int, expected: list[tuple[int, str]]
) -> None:
    lines = [(step, 1.02) for step in range(100, 801, 100)]
    assert list_warnings(make_check(warmup_steps=warmup_steps), lines) == expected


def test_a_window_that_began_in_warm_up_is_not_judged() -> None:
    assert list_warnings(make_check(), [(1, 1.5), (1000, 1.1), (2000, 0.5)]) == []


def test_a_run_that_falls_back_draws_a_warning_but_a_spike_does_not() -> None:
    learned = [(step, 0.5) for step in range(100, 901, 100)]
    spike = [(step, 1.0) for step in range(901, 940)]
    check = make_check()
    assert list_warnings(check, [*learned, *spike, (941, 0.5)]) == []
    warning = check.check(1000, 1.0 * ENTROPY)
    assert warning and warning.problem == "fell back"
    assert f"was {0.5 * ENTROPY:.2f} nats per token at update 100" in warning.message
    assert check.check(1100, 1.0 * ENTROPY) is None


def test_a_continued_run_knows_what_was_logged() -> None:
    earlier = [logged("train", 700, 0.5 * ENTROPY)]
    assert list_warnings(make_check(earlier), [(800, 1.0)]) == [(800, "fell back")]
    assert list_warnings(make_check(), [(800, 1.0), (900, 1.0)]) == [(900, "stalled")]
    # Only a warning that was not recorded yet is new.
    check = make_check([logged("train", 700, ENTROPY), logged("warning", 700, 0.0, "stalled")])
    warning = check.check(800, ENTROPY)
    assert warning and not check.is_new(warning) and make_check().is_new(warning)


def test_the_remedies_are_those_that_the_run_does_not_have() -> None:
    check = LearningCheck(OptimizerConfig(), "pre", SIDE, [logged("train", 4000, ENTROPY)])
    warning = check.check(4100, ENTROPY)
    assert warning and "model.norm" not in warning.message
    assert "optimizer.scale (now 1) or more optimizer.warmup_steps (now 4,000)" in warning.message


# ---- trained -------------------------------------------------------------------------------------


@fixture
def early(monkeypatch: MonkeyPatch) -> None:
    """Judge a run from MIN_UPDATES of this file on."""
    monkeypatch.setattr(on_track, "MIN_UPDATES", MIN_UPDATES)


def read_warnings(run: RunFolder) -> list[WarningEvent]:
    events, _ = read_events(run.metrics)
    return [event for event in events if isinstance(event, WarningEvent)]


@mark.parametrize("name", amount(list(HEALTHY)[:3], list(HEALTHY)))
def test_a_healthy_run_is_not_warned(
    name: str, ground: Ground, early: None, capsys: Capture
) -> None:
    assert main(ground.argv(name, *SETTINGS, *HEALTHY[name])) == 0
    assert "warning" not in read_stderr(capsys)
    assert read_warnings(ground.run(name)) == []


def test_a_stalled_run_draws_a_warning_at_each_start_and_is_recorded_once(
    ground: Ground, early: None, capsys: Capture
) -> None:
    assert main(ground.argv("stalled", *SETTINGS, STALL)) == 0
    run = ground.run("stalled")
    [warning] = read_warnings(run)
    assert warning.problem == "stalled" and warning.step == MIN_UPDATES + 20
    written = read_stderr(capsys)
    assert written.count(f"warning: {warning.message}\n") == written.count("warning") == 1
    assert "optimizer.scale (now 20)" in warning.message
    assert main(ground.argv("stalled", *SETTINGS, STALL, f"training.steps={STEPS + 20}")) == 0
    assert "optimizer.scale (now 20)" in read_stderr(capsys)
    assert read_warnings(run) == [warning]
