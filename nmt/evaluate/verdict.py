"""Judges whether a run reproduces the paper, by its score on the paper's metric and by the steps of
the recipe that were left out.

`not comparable`: another language pair, test set or training text, or more than one system; or the
paper's figure was reached, but by another recipe. `not reproduced`: the figure is above the whole
95 % interval. `reproduced`: every step was applied, and the figure is within the interval or below
it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from nmt.checkpoint import Checkpoint, Origin, TrainState
from nmt.evaluate.systems import System
from nmt.known_test_sets import PAPER_TEST_SET
from nmt.paper import NOT_STATED, Conformance, check_conformance
from nmt.score.score import Score
from nmt.system.errors import UserError

Conclusion = Literal["reproduced", "not reproduced", "not comparable"]
# Intervals between checkpoints that count as ten minutes. They vary, because a checkpoint written
# after a validation restarts the clock and is left out of the average.
MIN_MINUTES, MAX_MINUTES = 9.0, 20.0
TASK_KEYS = ("data.src", "data.tgt", "data.train")  # settings that make it another task


@dataclass(frozen=True)
class Verdict:
    outcome: Conclusion
    reasons: tuple[str, ...]  # why it is not comparable
    missing: tuple[str, ...]  # steps of the recipe that were not applied
    score: Score  # on the metric of Table 2
    paper: Conformance

    def format_report(self) -> str:
        because = f" because {'; '.join(self.reasons)}" if self.reasons else ""
        interval = self.score.interval
        between = ""
        if interval is not None:
            between = f"95 % of resampled test sets: {interval.low:.2f} to {interval.high:.2f}"
        lines = [
            f"verdict: {self.outcome}{because}",
            f"  this system  {self.score.value:6.2f}  {between}",
            f"  the paper    {self.paper.bleu:6.2f}  Table 2, {self.paper.model}, {self.paper.pair}",
            f"  counted as   {self.score.signature}",
            f"  steps of the recipe that were not applied: {len(self.missing) or 'none'}",
        ]
        lines += [f"    - {step}" for step in self.missing]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "because": self.reasons,
            "not_applied": self.missing,
            "paper": {"bleu": self.paper.bleu, "model": self.paper.model, "pair": self.paper.pair},
            "score": {
                "name": self.score.name,
                "value": self.score.value,
                "signature": self.score.signature,
            },
        }


def judge(score: Score, system: System) -> Verdict:
    """Compare a score with the paper's; it must be on the metric of Table 2 and have an interval."""
    if system.model is None or not system.model.checkpoints or score.interval is None:
        raise UserError(
            f"{system.name}: a verdict judges the training too, so it needs a checkpoint; give RUN or RUN/average"
        )
    checkpoint, *others = system.model.checkpoints
    # The checkpoint knows how it was trained; of what the command line changed, only the search
    # took effect.
    paper = check_conformance(replace(checkpoint.config, decoding=system.config.decoding))
    reasons = tuple(_find_obstacles(paper, checkpoint, system, len(others)))
    missing = tuple(_find_missing_steps(paper, checkpoint))
    is_reached = score.interval.high >= paper.bleu
    if is_reached and missing and not reasons:
        reasons = (
            f"the paper's figure was reached by another recipe: {len(missing)} of its steps were not applied",
        )
    outcome: Conclusion
    if reasons:
        outcome = "not comparable"
    elif is_reached:
        outcome = "reproduced"
    else:
        outcome = "not reproduced"
    return Verdict(outcome, reasons, missing, score, paper)


def _find_obstacles(
    paper: Conformance, checkpoint: Checkpoint, system: System, n_others: int
) -> Iterator[str]:
    """Yield the reasons why the score cannot be compared with the paper's at all."""
    for row in paper.deviations:
        if row.key in TASK_KEYS:
            yield f"{row.name}: {row.ours}, in the paper {row.paper}"
    data = checkpoint.config.data
    if system.pair != f"{data.src}-{data.tgt}":
        yield f"it was scored as {system.pair} and trained as {data.src}-{data.tgt}"
    known = PAPER_TEST_SET
    if system.test.known_as != known.name:
        whole = f"{known.name} in full ({known.lines:,} lines)"
        yield f"the test set is {system.test.name}, in the paper {whole}"
    if n_others:
        yield f"{1 + n_others} systems translated together, in the paper one"


def _find_missing_steps(paper: Conformance, checkpoint: Checkpoint) -> Iterator[str]:
    """List what would have to be done differently."""
    for row in paper.deviations:
        if row.key == "data.test":  # the test set that was really scored counts
            continue
        if row.paper != NOT_STATED:
            yield f"{row.name}: {row.ours}, in the paper {row.paper}"
        else:
            yield f"{row.name}: {row.ours}, in the released code {row.released}"
    steps = checkpoint.config.training.steps
    if checkpoint.step < steps:
        yield f"the end of training: {checkpoint.step:,} of {steps:,} updates"
    yield from _check_averaging(checkpoint.origin, paper.n_averaged)


def _check_averaging(origin: Origin, n: int) -> Iterator[str]:
    """Compare with section 6.1: the mean of the last n checkpoints, written every ten minutes."""
    if isinstance(origin, TrainState):
        yield f"averaging: none, in the paper the mean of the last {n}"
    elif len(origin.averaged) != n:
        found = len(origin.averaged)
        yield f"averaging: {found} checkpoints, in the paper the mean of the last {n}"
    elif origin.weights is not None:
        yield f"averaging: a weighted mean, in the paper the plain one of the last {n}"
    elif origin.elapsed_s is None:
        yield "averaging: the times of its checkpoints are not recorded; average again with nmt-average"
    else:
        times = sorted(origin.elapsed_s)
        gaps = [(after - before) / 60 for before, after in pairwise(times)]
        if min(gaps) < MIN_MINUTES or max(gaps) > MAX_MINUTES:
            yield (
                f"averaging: its checkpoints are {min(gaps):.1f} to {max(gaps):.1f} minutes apart, "
                f"in the paper 10; try --last {n} --every 10"
            )
