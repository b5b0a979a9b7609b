"""Judges whether a run, or several that differ only in seed, reproduces the paper, by the score on
the likeliest reading of the paper's metric and by the steps of the recipe that were left out.

The yardstick is the spread of scores over seeds: the paper's figure is one run's, and so is ours.
The bootstrap's interval is about other test sentences, and both scores are on the same ones.
`reproduced`: every step was applied, and the score is at most one spread below the figure; `close`:
at most three; `not reproduced`: lower. `not comparable`: another language pair, test set or
training text, or more than one system; or the figure was reached, but by another recipe.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from nmt.checkpoint import Average, Checkpoint, Origin
from nmt.config import MACHINE_KEYS, list_differences, override_config
from nmt.evaluate.systems import System
from nmt.known_test_sets import PAPER_TEST_SET
from nmt.paper import CHECKPOINT_UPDATES, Conformance, check_conformance
from nmt.score.metrics import Metric
from nmt.score.score import Score
from nmt.score.significance import Spread, estimate_spread
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.run_folder import MODEL_FILE
from nmt.system.tables import format_interval

Conclusion = Literal["reproduced", "close", "not reproduced", "not comparable"]
# The standard deviation of BLEU over seeds on newstest2014 English-German, by model. It is about
# that of So, Liang and Le (The Evolved Transformer, 2019: 0.1 for base, 0.2 for big), and two pairs
# of base runs in gluon-nlp's issue 1038 give 0.08 and 0.18. Nobody published one of five or more
# seeds, and no GPU run of this project has measured it. Averaging checkpoints may lower it.
SEED_SPREAD = {"base": 0.15, "big": 0.2}
SPREAD_SOURCE = "from the literature, not measured here"
CLOSE_SPREADS = 3
EVERY_TOLERANCE = 0.25
TASK_KEYS = ("data.src", "data.tgt", "data.train")  # settings that make it another task
# What may differ between runs that are judged together: the seed, names, places and the machine.
SEED_RUN_KEYS = (
    *MACHINE_KEYS,
    "seed",
    "data.test",  # the test set that was really scored is the same
    "training.shard",
    "decoding.batch_tokens",
)


@dataclass(frozen=True)
class Verdict:
    outcome: Conclusion
    reasons: tuple[str, ...]
    missing: tuple[str, ...]  # steps of the recipe that were not applied
    names: tuple[str, ...]  # of the systems
    scores: tuple[Score, ...]  # of each system, on the likeliest reading of Table 2
    reading: str
    seeds: Spread | None  # None for one run
    paper: Conformance

    @property
    def value(self) -> float:
        """The one run's score, or the mean of several."""
        return self.seeds.mean if self.seeds is not None else self.scores[0].value

    def to_lines(self) -> list[str]:
        paper = self.paper
        assumed = SEED_SPREAD[paper.model]
        measured = ""
        if self.seeds is not None:
            measured = f"; of these {self.seeds.n} runs {self.seeds.std:.2f}"
        lines = [f"verdict: {self.outcome} because {'; '.join(self.reasons)}", *self._format_ours()]
        lines += [
            f"  the paper    {paper.bleu:6.2f}  Table 2, {paper.model}, {paper.pair}",
            f"  spread of seeds {assumed:.2f} ({SPREAD_SOURCE}){measured}",
            f"  reproduced from {paper.bleu - assumed:.2f}, "
            f"close from {paper.bleu - CLOSE_SPREADS * assumed:.2f}",
            f"  counted as {self.scores[0].name}: {self.reading}",
            f"    {self.scores[0].signature}",
            f"  steps of the recipe that were not applied: {len(self.missing) or 'none'}",
        ]
        lines += [f"    - {step}" for step in self.missing]
        return [escape_line(line) for line in lines]

    def _format_ours(self) -> Iterator[str]:
        if self.seeds is None:
            interval = self.scores[0].format_interval()
            yield (
                f"  this system  {self.value:6.2f}  95 % of resampled test sets: {interval}, "
                "for information"
            )
            return
        seeds = self.seeds
        for name, score in zip(self.names, self.scores, strict=True):
            yield f"  a run        {score.value:6.2f}  {name}"
        yield (
            f"  their mean   {seeds.mean:6.2f}  95 % interval of the mean: "
            f"{format_interval(seeds.low, seeds.high)} (Student's t)"
        )

    def to_json(self) -> dict[str, Any]:
        paper = self.paper
        runs = [
            {"system": name, "value": score.value, "signature": score.signature}
            for name, score in zip(self.names, self.scores, strict=True)
        ]
        return {
            "outcome": self.outcome,
            "because": self.reasons,
            "not_applied": self.missing,
            "paper": {"bleu": paper.bleu, "model": paper.model, "pair": paper.pair},
            "spread_of_seeds": {"assumed": SEED_SPREAD[paper.model], "source": SPREAD_SOURCE},
            "score": {
                "name": self.scores[0].name,
                "reading": self.reading,
                "value": self.value,
                "signature": self.scores[0].signature,
            },
            "runs": runs,
            "seeds": None if self.seeds is None else asdict(self.seeds),
        }


def judge(metric: Metric, scores: Sequence[Score], systems: Sequence[System]) -> Verdict:
    """Compare a run's score with the paper's, or the mean of several that `check_one_recipe` let
    pass. The scores are on `metric`, the likeliest reading of Table 2.
    """
    # The checkpoint knows how it was trained; of what the command line changed, only the search
    # took effect.
    trained = _find_checkpoint(systems[0]).config
    paper = check_conformance(replace(trained, decoding=systems[0].config.decoding))
    reasons = _collect(systems, [_find_obstacles(paper, system) for system in systems])
    missing = _collect(systems, [_find_missing_steps(paper, system) for system in systems])
    seeds = None
    value = scores[0].value
    if len(scores) > 1:
        seeds = estimate_spread([score.value for score in scores])
        value = seeds.mean
    outcome, comparison = _compare(value, paper)
    if reasons:
        outcome = "not comparable"
    elif missing and outcome != "not reproduced":
        reached = "reached" if outcome == "reproduced" else "nearly reached"
        outcome = "not comparable"
        reasons = (
            f"the paper's figure was {reached} by another recipe: "
            f"{len(missing)} of its steps were not applied",
        )
    else:
        reasons = (comparison,)
    names = tuple(system.name for system in systems)
    return Verdict(outcome, reasons, missing, names, tuple(scores), metric.reading, seeds, paper)


def check_one_recipe(
    names: Sequence[str], checkpoints: Sequence[Checkpoint], overrides: Sequence[str] = ()
) -> None:
    """Raise UserError unless the checkpoints are of different runs of one recipe. `overrides` are
    those of the evaluation, which change the search of all.
    """
    configs = [override_config(checkpoint.config, overrides) for checkpoint in checkpoints]
    name_by_weights: dict[str, str] = {}
    for name, checkpoint, config in zip(names, checkpoints, configs, strict=True):
        differences = list_differences(configs[0], config, SEED_RUN_KEYS)
        if differences:
            raise UserError(
                f"{name}: is not of the same recipe as {names[0]} ({', '.join(differences)}); "
                "runs that are judged together may differ only in seed, so judge this one alone"
            )
        sha256 = checkpoint.sha256[MODEL_FILE]
        if sha256 in name_by_weights:
            raise UserError(
                f"{name}: has the same weights as {name_by_weights[sha256]}; give different runs"
            )
        name_by_weights[sha256] = name


def _find_checkpoint(system: System) -> Checkpoint:
    if system.model is None or not system.model.checkpoints:
        raise UserError(
            f"{system.name}: a verdict judges the training too, so it needs a checkpoint; give RUN or RUN/average"
        )
    return system.model.checkpoints[0]


def _compare(value: float, paper: Conformance) -> tuple[Conclusion, str]:
    """Compare to two decimals, as multi-bleu.perl prints them, so that the verdict agrees with what
    is printed.
    """
    spread = SEED_SPREAD[paper.model]
    below = round(100 * paper.bleu) - round(100 * value)  # in hundredths
    if below <= 0:
        return "reproduced", f"{value:.2f} is not below the paper's {paper.bleu:.2f}"
    distance = f"{value:.2f} is {below / 100:.2f} below the paper's {paper.bleu:.2f}"
    spreads = f"the spread of seeds, {spread:.2f}"
    if below <= round(100 * spread):
        return "reproduced", f"{distance}, at most {spreads}"
    if below <= round(100 * CLOSE_SPREADS * spread):
        return "close", f"{distance}, at most {CLOSE_SPREADS} times {spreads}"
    return "not reproduced", f"{distance}, more than {CLOSE_SPREADS} times {spreads}"


def _collect(systems: Sequence[System], found: Sequence[Iterator[str]]) -> tuple[str, ...]:
    """List what is true of all systems as it is, and put names before what is true of only some."""
    names_by_fact: dict[str, list[str]] = {}
    for system, facts in zip(systems, found, strict=True):
        for fact in facts:
            names_by_fact.setdefault(fact, []).append(system.name)
    return tuple(
        fact if len(names) == len(systems) else f"{', '.join(names)}: {fact}"
        for fact, names in names_by_fact.items()
    )


def _find_obstacles(paper: Conformance, system: System) -> Iterator[str]:
    """Yield the reasons why the score cannot be compared with the paper's at all."""
    for row in paper.deviations:
        if row.key in TASK_KEYS:
            yield f"{row.name}: {row.ours}, in the paper {row.paper}"
    data = _find_checkpoint(system).config.data
    trained = f"{data.src}-{data.tgt}"
    if system.pair != trained:
        yield f"it was scored as {system.pair} and trained as {trained}"
    known = PAPER_TEST_SET
    if system.test.known_as != known.name:
        whole = f"{known.name} in full ({known.lines:,} lines)"
        yield f"the test set is {system.test.name}, in the paper {whole}"
    assert system.model is not None
    n_systems = len(system.model.checkpoints)
    if n_systems > 1:
        yield f"{n_systems} systems translated together, in the paper one"


def _find_missing_steps(paper: Conformance, system: System) -> Iterator[str]:
    """List what would have to be done differently."""
    for row in paper.deviations:
        if row.key == "data.test":  # the test set that was really scored counts
            continue
        source, value = row.measure
        yield f"{row.name}: {row.ours}, in {source} {value}"
    checkpoint = _find_checkpoint(system)
    steps = checkpoint.config.training.steps
    if checkpoint.step < steps:
        yield f"the end of training: {checkpoint.step:,} of {steps:,} updates"
    yield from _check_averaging(checkpoint.origin, paper)


def _check_averaging(origin: Origin, paper: Conformance) -> Iterator[str]:
    """Compare with section 6.1: the mean of the last n checkpoints, written every ten minutes.

    Minutes are those of the authors' machine, so what counts is the updates that it did in them.
    """
    n = paper.n_averaged
    if not isinstance(origin, Average):
        yield f"averaging: none, in the paper the mean of the last {n}"
    elif len(origin.averaged) != n:
        found = len(origin.averaged)
        yield f"averaging: {found} checkpoints, in the paper the mean of the last {n}"
    elif origin.weights is not None:
        yield f"averaging: a weighted mean, in the paper the plain one of the last {n}"
    else:
        yield from _check_distances(origin, CHECKPOINT_UPDATES[paper.model])


def _check_distances(average: Average, every: int) -> Iterator[str]:
    matches = [re.fullmatch(r"step-(\d+)", name) for name in average.averaged]
    steps = sorted(int(match[1]) for match in matches if match)
    if len(steps) < len(matches):
        yield "averaging: the updates of its checkpoints are not recorded; average again with nmt-average"
        return
    distances = [after - before for before, after in pairwise(steps)]
    shortest, longest = min(distances), max(distances)
    # The last one may be shorter, because training ends between two checkpoints.
    is_apart = shortest > 0 and min(distances[:-1]) >= every * (1 - EVERY_TOLERANCE)
    if not is_apart or longest > every * (1 + EVERY_TOLERANCE):
        apart = f"{shortest:,} to {longest:,}" if shortest < longest else f"{longest:,}"
        yield (
            f"averaging: its checkpoints are {apart} updates apart, "
            f"in the paper ten minutes, about {every:,} updates"
        )
