"""Trainings that end before training.steps: by patience, epochs or hours; and what makes a checkpoint
the best."""

import re
from pathlib import Path

import torch
from pytest import MonkeyPatch, approx, mark, raises
from support.capture import Capture, read_stderr
from support.finished_run import read_lines, read_losses, read_tensors, train_toy
from support.text_lines import read_text_lines

import nmt.api
from nmt.average.select import list_candidates
from nmt.config import RunConfig
from nmt.system import progress
from nmt.system.errors import UserError
from nmt.system.files import read_json
from nmt.system.progress import Progress
from nmt.system.run_folder import RunFolder
from nmt.system.strict_json import Fields
from nmt.train import loop
from nmt.train.validate import MIN_BLEU, Validation, rate_bleu

QUICK = ["training.steps=40", "training.validate_every=2", "evaluation.bleu=false"]


def read_state(config: RunConfig) -> Fields:
    path = RunFolder(config.folder).path / "checkpoints" / "last" / "state.json"
    return read_json(path)


def read_status(config: RunConfig) -> str:
    return str(read_json(config.folder / "status.json")["state"])


def test_patience_ends_training_after_validations_without_a_best(
    toy: Path, capsys: Capture
) -> None:
    # so high a rate that the loss soon rises
    hopeless = ["optimizer.scale=300", "optimizer.warmup_steps=4"]
    config = train_toy(toy, *QUICK, *hopeless, "training.patience=3")
    state = read_state(config)
    assert state["step"] == state["best_step"] + 6 < 40
    assert read_status(config) == "done"
    assert "ended by training.patience" in read_stderr(capsys)

    # the same command has nothing to do, and with more patience it goes on
    train_toy(toy, *QUICK, *hopeless, "training.patience=3")
    assert "nothing to do" in (said := read_stderr(capsys))
    assert "raise training.patience to continue" in said
    later = state["step"] + 4
    train_toy(toy, *QUICK, *hopeless, "training.patience=100", f"training.steps={later}")
    assert read_state(config)["step"] == later


def test_epochs_end_training_and_its_last_checkpoint_is_averaged(toy: Path) -> None:
    settings = ["training.max_epochs=1", "training.validate_every=1000"]
    config = train_toy(toy, *QUICK, *settings, "training.checkpoint_every=1000")
    state = read_state(config)
    (averaged,) = list_candidates(RunFolder(config.folder), None)
    assert averaged.step == state["step"]
    assert state["cursor"] == {"epoch": 1, "update": 0} and 1 < state["step"] < 40
    assert state["validated"] == state["step"]  # it ends with a validation


def test_a_log_has_the_loss_of_each_window_and_knows_the_end(
    toy: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_LINES", 0.0)
    settings = ["training.max_epochs=2", "training.log_every=4", "training.validate_every=1000"]
    config = train_toy(toy, *QUICK, *settings)
    said = read_stderr(capsys)
    lines = re.findall(r"training: (\d+)/(\d+) updates(?:, .* left)?  loss ([\d.]+),", said)
    losses = {int(step): float(loss) for step, _, loss in lines}
    assert losses == approx(read_losses(config.folder), abs=1e-3)
    # the first epoch tells how many updates an epoch has
    totals = [int(total) for _, total, _ in lines]
    assert totals[0] == 40 and totals[-1] == read_state(config)["step"] < 40


def test_a_bar_moves_between_log_lines(toy: Path, monkeypatch: MonkeyPatch) -> None:
    shown: list[tuple[str, bool]] = []

    def advance(self: Progress, n: int = 1, postfix: str = "", may_print: bool = True) -> None:
        if self.what == "training":
            shown.append((postfix, may_print))

    monkeypatch.setattr(Progress, "advance", advance)
    config = train_toy(toy, *QUICK, "training.steps=6", "training.log_every=4")
    losses = [float(text.split()[1].rstrip(",")) for text, _ in shown]
    assert len(set(losses)) == 6  # a mean that each update changes
    logged = {step: losses[step - 1] for step, (_, is_due) in enumerate(shown, 1) if is_due}
    assert logged == approx(read_losses(config.folder), abs=1e-3)


def test_time_left_counts_validations_as_what_they_take(
    toy: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    """Updates take no time at all on this clock, and each validation takes a minute."""
    to_come = [Validation(1.0, None, 1.0)] * 4
    for module in (loop, progress):
        monkeypatch.setattr(module, "clock", lambda: -60 * len(to_come))
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(loop, "validate", lambda *_: to_come.pop())
    train_toy(toy, *QUICK, "training.steps=7", "training.log_every=1")
    left = re.findall(r"training: (\d)/7 .*, ([\d:]+) left", read_stderr(capsys))
    assert left[-2:] == [("6", "2:00"), ("7", "1:00")]


def test_hours_end_training_and_count_over_all_starts(
    toy: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_LINES", 0.0)
    config = train_toy(toy, *QUICK, "training.max_hours=1e-6")
    assert read_state(config)["step"] == 1
    (line,) = re.findall(r"training: 1/40 updates, .*", read_stderr(capsys))
    assert " 0:00 left" in line
    train_toy(toy, *QUICK, "training.max_hours=1e-6")
    assert "raise training.max_hours to continue" in read_stderr(capsys)
    assert read_status(config) == "done"
    train_toy(toy, *QUICK, "training.steps=3")
    assert read_state(config)["step"] == 3


@mark.parametrize("score", ["nll", "bleu", "chrf"])
def test_the_best_is_by_the_score_asked_for(score: str, toy: Path) -> None:
    settings = ["training.steps=6", "evaluation.bleu=true", f"evaluation.best_by={score}"]
    config = train_toy(toy, *QUICK, *settings)
    best = read_json(config.folder / "checkpoints" / "best" / "state.json")
    events = read_lines(config.folder, "valid")
    nll = {event["step"]: event["nll"] for event in events}
    if score != "chrf":  # BLEU is noise here
        assert all(event["bleu"] < MIN_BLEU for event in events)
        assert best["best_step"] == min(nll, key=lambda step: nll[step])
        assert best["best"] == approx(-min(nll.values()), abs=1e-5)
    else:
        sources = read_text_lines(toy.parent / "corpus" / "valid.en")
        references = read_text_lines(toy.parent / "corpus" / "valid.de")
        translations = nmt.api.load(config.folder / "checkpoints" / "best").translate(sources)
        pairs = [
            (translation.text, reference)
            for translation, reference in zip(translations, references, strict=True)
        ]
        _, chrf = nmt.api.score(pairs)
        assert best["best"] == approx(chrf.value)
        logged = {event["step"]: event["chrf"] for event in events}
        assert logged[best["best_step"]] == max(logged.values()) == best["best"]


def test_any_bleu_that_is_no_noise_rates_above_any_nll_and_equal_ones_by_nll() -> None:
    worst_to_best = [
        (0.4, 9.0),
        (MIN_BLEU - 0.1, 2.0),
        (0.0, 1.0),
        (MIN_BLEU, 8.0),
        (30.0, 3.0),
        (30.0, 2.9),
    ]
    rates = [rate_bleu(bleu, nll) for bleu, nll in worst_to_best]
    assert rates == sorted(set(rates))


def test_the_best_is_forgotten_when_dev_scores_measure_something_else(
    toy: Path, capsys: Capture
) -> None:
    start = [*QUICK, "evaluation.bleu=true"]
    train_toy(toy, *start, "training.steps=4")
    assert "is forgotten" not in read_stderr(capsys)
    changes = ["decoding.beam=3", "decoding.compile=off", "evaluation.sentences=2"]
    config = train_toy(toy, *start, *changes, "training.steps=6")
    said = " ".join(read_stderr(capsys).split())
    assert "(decoding.beam: 4 -> 3; evaluation.sentences: None -> 2)" in said
    assert "of update 4, is forgotten" in said
    assert read_state(config)["best_step"] == 6


def test_clipping_scales_the_gradient(toy: Path) -> None:
    """Adam's first moment after one update is (1 - beta1) times the gradient."""
    settings = ["training.steps=1", "optimizer.beta1=0.5", f"data.store={toy.parent}/store"]
    moments = []
    for name, clip in (("free", "null"), ("clipped", "0.01"), ("loose", "1000")):
        config = train_toy(
            toy, *QUICK, *settings, f"training.clip_norm={clip}", f"out={toy.parent}/{name}"
        )
        tensors = read_tensors(config.folder, 1, "optimizer")
        first = [value for key, value in sorted(tensors.items()) if "exp_avg_sq" not in key]
        moments.append(torch.cat([value.flatten() for value in first if value.dim()]))
    free, clipped, loose = moments
    assert torch.equal(free, loose)
    assert float(clipped.norm()) == approx(0.005, rel=1e-4)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm())


@mark.parametrize(
    "settings, expected",
    [
        (["training.patience=2", "data.valid=null"], "give data.valid"),
        (["evaluation.best_by=chrf"], "nothing is translated"),
        (["training.max_hours=0"], "training.max_hours"),
        (["training.clip_norm=-1"], "training.clip_norm"),
    ],
)
def test_contradictions_are_refused(settings: list[str], expected: str, toy: Path) -> None:
    with raises(UserError, match=expected):
        nmt.api.load_config(str(toy), [*QUICK, *settings])
