"""Which checkpoints of a run are averaged: the last, the best on the dev set, those some minutes apart; and weights.

Minutes are those of training, as state.json counts them over all sittings: the paper's clock. Scores are those that
validation wrote to metrics.jsonl. Too few checkpoints are refused with numbers, for a mean of fewer is another recipe.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmt.checkpoint import TrainState, list_steps, read_origin
from nmt.system.errors import UserError
from nmt.system.run_folder import RunFolder

LAST, DECAY = 5, 0.9


@dataclass(frozen=True)
class Moment:
    """A checkpoint of a run."""

    step: int
    elapsed_s: float
    weight: float = 1.0

    def __str__(self) -> str:
        return f"update {self.step:,}, minute {self.elapsed_s / 60:.1f}"


def choose(
    run: RunFolder,
    n_last: int | None,
    n_best: int | None,
    minutes: float | None,
    decay: float | None,
) -> tuple[list[Moment], str]:
    """The checkpoints to average, oldest first, and what the best scored. With a decay all there are, unless told."""
    if n_best is not None:
        return best(run, n_best)
    moments, n = spaced(run, minutes), n_last
    if n is None:
        n = LAST if decay is None else max(1, len(moments))
    moments = last(moments, n, run, minutes)
    return (moments if decay is None else fading(moments, decay)), ""


def last(
    moments: Sequence[Moment], n: int, run: RunFolder, minutes: float | None = None
) -> list[Moment]:
    """The newest `n`, refused if there are fewer."""
    if len(moments) < n:
        apart = "" if minutes is None else f" that are {minutes:g} minutes of training apart"
        raise UserError(
            f"{run.path} has {len(moments)} checkpoints{apart}, {n} are asked for; lower the number, or "
            "keep more of them"
        )
    return list(moments[-n:])


def spaced(run: RunFolder, minutes: float | None) -> list[Moment]:
    """All checkpoints of a run, oldest first, or those at least so many minutes apart, counted back from the newest."""
    found: list[Moment] = []
    for step in reversed(list_steps(run)):
        origin = read_origin(run.checkpoint(step))
        elapsed_s = float(origin.elapsed_s) if isinstance(origin, TrainState) else 0.0
        moment = Moment(step, elapsed_s)
        if minutes is None or not found or found[-1].elapsed_s - moment.elapsed_s >= 60 * minutes:
            found.append(moment)
    return found[::-1]


def fading(moments: Sequence[Moment], decay: float) -> list[Moment]:
    """The newest weighs most, each older one `decay` times as much as the next."""
    return [
        Moment(moment.step, moment.elapsed_s, decay**age)
        for age, moment in zip(reversed(range(len(moments))), moments, strict=True)
    ]


def best(run: RunFolder, n: int) -> tuple[list[Moment], str]:
    """The `n` of the highest dev BLEU, or of the lowest dev NLL where BLEU is off, oldest first, and what they scored.
    Of equals the newer."""
    moments, scores = spaced(run, None), validations(run)
    there = [moment for moment in moments if moment.step in scores]
    if len(there) < n:
        raise UserError(
            f"--best {n}: {run.path} has {len(moments)} checkpoints, of which {len(there)} were validated; "
            "lower it, or let training.checkpoint_every and validate_every coincide"
        )
    is_bleu = all(isinstance(scores[moment.step].get("bleu"), int | float) for moment in there)

    def goodness(moment: Moment) -> tuple[float, int]:
        score = scores[moment.step]
        return (score["bleu"] if is_bleu else -score["nll"]), moment.step

    chosen = sorted(sorted(there, key=goodness)[-n:], key=lambda moment: moment.step)
    told = ", ".join(f"{abs(goodness(moment)[0]):.{2 if is_bleu else 4}f}" for moment in chosen)
    return chosen, f"dev {'BLEU' if is_bleu else 'NLL'} {told}"


def validations(run: RunFolder) -> dict[int, dict[str, Any]]:
    """The `valid` lines of metrics.jsonl by update; one that is being written, or is damaged, is none."""
    try:
        lines = run.metrics.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"{run.metrics}: cannot be read ({error.strerror}); without it there is no best"
        ) from None
    found = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(entry, dict)
            and entry.get("kind") == "valid"
            and isinstance(entry.get("step"), int)
            and isinstance(entry.get("nll"), int | float)
        ):
            found[entry["step"]] = entry
    return found
