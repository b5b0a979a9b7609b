"""Chooses which checkpoints of a run to average, and their weights: the last ones, those that score best
on the dev set, or those that are some minutes apart.

Minutes are minutes of training, which state.json counts over all starts of the run, as the paper does
(section 6.1). Scores are those that validation wrote to metrics.jsonl. If there are too few
checkpoints, that is an error: the mean of fewer would be another recipe than the one asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nmt.checkpoint import TrainState, list_steps, read_origin
from nmt.config import load_recorded_config
from nmt.system.errors import UserError
from nmt.system.files import has_plain_file, open_plain_file
from nmt.system.run_folder import RunFolder
from nmt.train.events import ValidEvent
from nmt.train.metrics_log import read_events

DEFAULT_LAST = 5  # as the paper averages its base model
SCORE_NAMES = {"bleu": "BLEU", "chrf": "chrF2", "nll": "NLL"}  # by their keys in metrics.jsonl


@dataclass(frozen=True)
class Candidate:
    """A checkpoint of a run that may be averaged."""

    step: int
    elapsed_s: float
    weight: float = 1.0

    def __str__(self) -> str:
        return f"update {self.step:,}, minute {self.elapsed_s / 60:.1f}"


def choose_checkpoints(
    run: RunFolder,
    n_last: int | None,
    n_best: int | None,
    minutes: float | None,
    decay: float | None,
) -> tuple[list[Candidate], str]:
    """Choose what to average, oldest first; for `n_best` also return a text with their scores."""
    if n_best is not None:
        return take_best(run, n_best)
    candidates = list_candidates(run, minutes)
    if n_last is None:
        # With a decay the oldest weigh almost nothing, so all can be included.
        n_last = DEFAULT_LAST if decay is None else max(1, len(candidates))
    candidates = take_last(candidates, n_last, run, minutes)
    if decay is not None:
        candidates = apply_decay(candidates, decay)
    return candidates, ""


def list_candidates(run: RunFolder, minutes: float | None) -> list[Candidate]:
    """List the checkpoints of a run that averaging counts, oldest first; with `minutes`, those that
    are at least that far apart in training, counted back from the newest.
    """
    candidates = list_all(run)
    if minutes is not None:
        return thin_out(candidates, minutes)
    if not has_plain_file(run.config):
        return candidates
    training = load_recorded_config(run.config).training
    return [candidate for candidate in candidates if training.is_counted(candidate.step)]


def list_all(run: RunFolder) -> list[Candidate]:
    candidates = []
    for step in list_steps(run):
        origin = read_origin(run.checkpoint(step))
        elapsed_s = float(origin.elapsed_s) if isinstance(origin, TrainState) else 0.0
        candidates.append(Candidate(step, elapsed_s))
    return candidates


def thin_out(candidates: Sequence[Candidate], minutes: float) -> list[Candidate]:
    """Take the newest, and then each that is at least that many minutes older than the last taken."""
    taken: list[Candidate] = []
    for candidate in reversed(candidates):
        if not taken or taken[-1].elapsed_s - candidate.elapsed_s >= 60 * minutes:
            taken.append(candidate)
    return taken[::-1]


def take_last(
    candidates: Sequence[Candidate], n: int, run: RunFolder, minutes: float | None = None
) -> list[Candidate]:
    """Return the newest `n`; it is an error if there are fewer."""
    if len(candidates) < n:
        counted = "that averaging counts"
        if minutes is not None:
            counted = f"that are {minutes:g} minutes of training apart"
        raise UserError(
            f"{run.path}: has {len(candidates)} checkpoints {counted}, but {n} were requested; "
            "request fewer, or raise training.keep_checkpoints"
        )
    return list(candidates[-n:])


def apply_decay(candidates: Sequence[Candidate], decay: float) -> list[Candidate]:
    """Weight the newest checkpoint 1, and each older one `decay` times as much as the next newer
    one.
    """
    newest = len(candidates) - 1
    return [
        replace(candidate, weight=decay ** (newest - i)) for i, candidate in enumerate(candidates)
    ]


def take_best(run: RunFolder, n: int) -> tuple[list[Candidate], str]:
    """Return the `n` of the best dev score, oldest first, and a text with their scores. It is the
    score of evaluation.best_by, or the NLL if some have no other.

    Of two that score the same, the newer counts as better.
    """
    candidates = list_all(run)
    scores = read_validations(run)
    validated = [candidate for candidate in candidates if candidate.step in scores]
    if len(validated) < n:
        raise UserError(
            f"--best {n}: {run.path} has {len(candidates)} checkpoints, of which {len(validated)} "
            "were validated; lower --best, or make training.checkpoint_every a multiple of training.validate_every"
        )
    key = "bleu"
    if has_plain_file(run.config):
        key = load_recorded_config(run.config).evaluation.best_by
    if not all(key in scores[candidate.step] for candidate in validated):
        key = "nll"
    sign, n_digits = (-1, 4) if key == "nll" else (1, 2)
    validated.sort(key=lambda candidate: (sign * scores[candidate.step][key], candidate.step))
    chosen = sorted(validated[-n:], key=lambda candidate: candidate.step)
    values = [f"{scores[candidate.step][key]:.{n_digits}f}" for candidate in chosen]
    return chosen, f"dev {SCORE_NAMES[key]} {', '.join(values)}"


def read_validations(run: RunFolder) -> dict[int, dict[str, float]]:
    """Read the figures of the `valid` lines of metrics.jsonl, by update; lines that are damaged, or
    are still being written, are left out.
    """
    try:
        open_plain_file(run.metrics).close()  # a missing file has no events for read_events
        events, _ = read_events(run.metrics)
    except OSError as error:
        raise UserError(
            f"{run.metrics}: cannot be read ({error.strerror}); --best needs its dev scores"
        ) from None
    validations = [event for event in events if isinstance(event, ValidEvent)]
    return {event.step: event.figures for event in validations if "nll" in event.figures}
