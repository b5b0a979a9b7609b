"""Chooses which checkpoints of a run to average: the last ones, the ones in a row that
score best on the dev set, or those that are some minutes apart.

Minutes are minutes of training, which state.json counts over all starts of the run, as the paper does
(section 6.1). Scores are those that validation wrote to metrics.jsonl. If there are too few
checkpoints, that is an error: the mean of fewer would not be the recipe that was asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nmt.checkpoint.checkpoint import TrainState, read_origin
from nmt.checkpoint.run_checkpoints import list_steps
from nmt.config_files import load_recorded_config
from nmt.system.errors import UserError
from nmt.system.files import explain_unreadable, has_plain_file, open_plain_file, read_status
from nmt.system.run_folder import RunFolder
from nmt.train.events import ValidEvent, read_events

DEFAULT_LAST = 5  # as the paper averages its base model
# Members that differ by more, in the figures of metrics.jsonl, are of different quality.
MAX_SPREAD = {"bleu": 2.0, "nll": 0.1}


@dataclass(frozen=True)
class Candidate:
    """A checkpoint of a run that may be averaged."""

    step: int
    elapsed_s: float
    # the figures of the newest validation up to `step`, and its own update
    scores: Mapping[str, float]
    scored_step: int

    @property
    def is_validated(self) -> bool:
        return self.scored_step == self.step

    def __str__(self) -> str:
        text = f"update {self.step:,}, minute {self.elapsed_s / 60:.1f}"
        if not self.scores:
            return f"{text}, no dev score"
        score = f"dev NLL {self.scores['nll']:.4f}"
        if "bleu" in self.scores:
            score += f", BLEU {self.scores['bleu']:.2f}"
        if not self.is_validated:
            score += f" at {self.scored_step:,}"
        return f"{text}, {score}"


def choose_checkpoints(
    run: RunFolder, n_last: int | None, n_best: int | None, minutes: float | None
) -> list[Candidate]:
    """Choose what to average, oldest first."""
    if n_best is not None:
        return take_best(run, n_best)
    n_last = DEFAULT_LAST if n_last is None else n_last
    return take_last(list_candidates(run, minutes), n_last, run, minutes)


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
    # Patience, hours or epochs end a run at an update that no checkpoint was planned for.
    has_ended = read_status(run).get("state") == "done"  # not stopped or killed
    last_step = candidates[-1].step if candidates and has_ended else None
    return [each for each in candidates if training.is_counted(each.step) or each.step == last_step]


def list_all(run: RunFolder) -> list[Candidate]:
    """List the checkpoints of a run, oldest first; without scores if its metrics cannot be read."""
    try:
        validations = read_validations(run)
    except UserError:
        validations = {}
    candidates = []
    for step in list_steps(run):
        origin = read_origin(run.checkpoint(step))
        elapsed_s = float(origin.elapsed_s) if isinstance(origin, TrainState) else 0.0
        scored_step = max((other for other in validations if other <= step), default=0)
        scores = validations.get(scored_step, {})
        candidates.append(Candidate(step, elapsed_s, scores, scored_step))
    return candidates


def list_doubts(run: RunFolder, chosen: Sequence[Candidate]) -> list[str]:
    """Return the reasons to doubt the mean of these checkpoints, which are given oldest first."""
    doubts = []
    if has_plain_file(run.config):
        warmup_steps = load_recorded_config(run.config).optimizer.warmup_steps
        if chosen[0].step < warmup_steps:
            doubts.append(
                f"it spans the warm-up: update {chosen[0].step:,} is one of the first {warmup_steps:,}"
            )
    for key, name in (("bleu", "BLEU"), ("nll", "NLL")):
        scored = [(each.scores[key], each.step) for each in chosen if key in each.scores]
        if not scored:
            continue
        (low, low_step), (high, high_step) = min(scored), max(scored)
        if high - low > MAX_SPREAD[key]:
            doubts.append(
                f"dev {name} goes from {low:.2f} (update {low_step:,}) to {high:.2f} "
                f"(update {high_step:,})"
            )
    return doubts


def thin_out(candidates: Sequence[Candidate], minutes: float) -> list[Candidate]:
    """Take the newest, and then each that is at least that many minutes older than the last taken."""
    taken: list[Candidate] = []
    for candidate in reversed(candidates):
        if not taken or taken[-1].elapsed_s - candidate.elapsed_s >= 60 * minutes:
            taken.append(candidate)
    return taken[::-1]


def take_last(
    candidates: Sequence[Candidate], n: int, run: RunFolder, minutes: float | None
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


def take_best(run: RunFolder, n: int) -> list[Candidate]:
    """Return the `n` validated checkpoints in a row with the best mean score on the dev set, oldest
    first. It is the score of evaluation.best_by, or the NLL if some have no other.

    Of two series with the same score, the newer counts as better.
    """
    candidates = list_all(run)
    validated = [candidate for candidate in candidates if candidate.is_validated]
    if len(validated) < n:
        read_validations(run)  # an error if they cannot be read
        raise UserError(
            f"--best {n}: {run.path} has {len(candidates)} checkpoints, of which {len(validated)} "
            "were validated; lower --best, or make training.checkpoint_every a multiple of training.validate_every"
        )
    key = "bleu"
    if has_plain_file(run.config):
        key = load_recorded_config(run.config).evaluation.best_by
    if not all(key in candidate.scores for candidate in validated):
        key = "nll"

    def rate(row: Sequence[Candidate]) -> tuple[float, int]:
        mean = fmean(candidate.scores[key] for candidate in row)
        return -mean if key == "nll" else mean, row[-1].step

    rows = [validated[i : i + n] for i in range(len(validated) - n + 1)]
    return max(rows, key=rate)


def read_validations(run: RunFolder) -> dict[int, dict[str, float]]:
    """Read the figures of the `valid` lines of metrics.jsonl, by update; lines that are damaged, or
    are still being written, are left out.
    """
    with explain_unreadable(run.metrics, "; --best needs its dev scores"):
        open_plain_file(run.metrics).close()  # a missing file has no events for read_events
        events, _ = read_events(run.metrics)
    validations = [event for event in events if isinstance(event, ValidEvent)]
    return {event.step: event.figures for event in validations if "nll" in event.figures}
