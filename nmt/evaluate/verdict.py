"""Whether a run reproduces the paper: the figure on the same metric, the steps of the recipe left out, and a verdict.

`not comparable`: another language pair, test set or training text, or more than one system; or the paper's figure was
reached, but by another recipe. `not reproduced`: the figure lies above the whole 95 % interval. `reproduced`: every
step was applied, and the figure lies within the interval or below it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from nmt.checkpoint import Checkpoint, Origin, TrainState
from nmt.evaluate.systems import System
from nmt.known_test_sets import PAPER_TEST_SET
from nmt.paper import SILENT, Conformance, conformance
from nmt.score.score import Score
from nmt.system.errors import UserError

MINUTES = (
    9.0,
    20.0,
)  # what passes for ten: a checkpoint that a validation wrote starts the clock anew and is left out
ELSEWHERE = ("data.src", "data.tgt", "data.train")  # what makes it another task


@dataclass(frozen=True)
class Verdict:
    outcome: Literal["reproduced", "not reproduced", "not comparable"]
    because: tuple[str, ...]  # why not comparable
    missing: tuple[str, ...]  # steps of the recipe that were not applied
    score: Score  # on the metric of Table 2
    paper: Conformance

    def told(self) -> str:
        score, bounds = self.score, self.score.interval
        between = (
            f"95 % of resampled test sets: {bounds.low:.2f} to {bounds.high:.2f}" if bounds else ""
        )
        return "\n".join(
            [
                f"verdict: {self.outcome}"
                + (f" because {'; '.join(self.because)}" if self.because else ""),
                f"  this system  {score.value:6.2f}  {between}",
                f"  the paper    {self.paper.bleu:6.2f}  Table 2, {self.paper.model}, {self.paper.pair}",
                f"  counted as   {score.signature}",
                f"  steps of the recipe that were not applied: {len(self.missing) or 'none'}",
                *(f"    - {step}" for step in self.missing),
            ]
        )

    def figures(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "because": self.because,
            "not_applied": self.missing,
            "paper": {"bleu": self.paper.bleu, "model": self.paper.model, "pair": self.paper.pair},
            "score": {
                "name": self.score.name,
                "value": self.score.value,
                "signature": self.score.signature,
            },
        }


def judge(score: Score, system: System) -> Verdict:
    """`score` is on the metric of Table 2, with its interval."""
    if system.engine is None or not system.engine.checkpoints or score.interval is None:
        raise UserError(
            f"{system.name}: a verdict needs a checkpoint, for it judges the training too"
        )
    checkpoint, *others = system.engine.checkpoints
    # How it was trained stands in the checkpoint; of what the command line changed, only the search took effect.
    paper = conformance(replace(checkpoint.config, decoding=system.config.decoding))
    because, missing = (
        tuple(_reasons(paper, checkpoint, system, len(others))),
        tuple(_left_out(paper, checkpoint)),
    )
    is_reached = score.interval.high >= paper.bleu
    if not because and is_reached and missing:
        because = (
            f"the paper's figure was reached by another recipe: {len(missing)} of its steps were not applied",
        )
    outcome: Literal["reproduced", "not reproduced", "not comparable"] = (
        "not comparable" if because else "reproduced" if is_reached else "not reproduced"
    )
    return Verdict(outcome, because, missing, score, paper)


def _reasons(
    paper: Conformance, checkpoint: Checkpoint, system: System, n_others: int
) -> Iterator[str]:
    """Why the figure cannot be held against the paper's at all."""
    for row in paper.deviations:
        if row.key in ELSEWHERE:
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


def _left_out(paper: Conformance, checkpoint: Checkpoint) -> Iterator[str]:
    """What would have to be done otherwise."""
    for row in paper.deviations:
        if row.key != "data.test":  # what was really scored counts
            yield f"{row.name}: {row.ours}, " + (
                f"in the paper {row.paper}"
                if row.paper != SILENT
                else f"in the released code {row.released}"
            )
    steps = checkpoint.config.training.steps
    if checkpoint.step < steps:
        yield f"the end of training: {checkpoint.step:,} of {steps:,} updates"
    yield from _averaging(checkpoint.origin, paper.n_averaged)


def _averaging(origin: Origin, n: int) -> Iterator[str]:
    if isinstance(origin, TrainState):
        yield f"averaging: none, in the paper the mean of the last {n}"
    elif len(origin.checkpoints) != n:
        found = len(origin.checkpoints)
        yield f"averaging: {found} checkpoints, in the paper the mean of the last {n}"
    elif origin.weights is not None:
        yield f"averaging: a weighted mean, in the paper the plain one of the last {n}"
    elif origin.elapsed_s is None:
        yield "averaging: the times of its checkpoints are not recorded; average again with nmt-average"
    else:
        gaps = [(after - before) / 60 for before, after in pairwise(sorted(origin.elapsed_s))]
        if min(gaps) < MINUTES[0] or max(gaps) > MINUTES[1]:
            yield (
                f"averaging: its checkpoints lie {min(gaps):.1f} to {max(gaps):.1f} minutes apart, in the paper 10; "
                f"try --last {n} --every 10"
            )
