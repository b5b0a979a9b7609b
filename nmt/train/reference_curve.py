"""Whether a run learns as well as published runs of the same recipe: its dev scores beside the spread
of theirs over seeds.

A damaged training may look healthy: a wrong learning rate or lost gradients cost some BLEU, and
nothing says how much there should be. configs/references/ has the dev scores of several runs of
a shipped config at each validation; scripts/make_reference_curve.py writes them. They apply to a run
whose store holds the same ids, which its digest tells, and whose settings are the same but for those
that concern the seed, the machine, and how often something is saved or scored.

The band at an update is where a run with another seed falls with a probability of 99 %: Student's
prediction interval. Two or three seeds say little about a deviation, so it is pooled over neighbouring
validations, and t has the few degrees of freedom that are left. NLL spreads in proportion, so its band
is computed of logarithms.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmt.config import RunConfig, VocabConfig, find_shipped_configs, list_differences
from nmt.corpus.ledger import read_ledger
from nmt.score.significance import student_t
from nmt.system.records import read_record

BAND_PROBABILITY = 0.99
NEIGHBOURS = 1  # validations on each side whose deviations are pooled
# Other machines and precisions round differently; no band is narrower than for these deviations.
MIN_NLL_DEVIATION = 0.005  # of the logarithm
MIN_BLEU_DEVIATION = 0.3

# The digest of the store stands for data and vocabulary, but BPE-dropout cuts words anew.
IN_STORE = ("data", *(f"vocab.{f.name}" for f in dataclasses.fields(VocabConfig)))
OF_DECODING = ("decoding", "evaluation.sentences")  # without influence on the NLL
IGNORED = (
    *(key for key in IN_STORE if key != "vocab.bpe_dropout"),
    "name",
    "seed",
    "out",
    "device",
    "decoding.batch_tokens",
    "evaluation.bleu",
    "evaluation.best_by",
    "training.steps",
    "training.patience",
    "training.max_epochs",
    "training.max_hours",
    "training.micro_tokens",
    "training.precision",
    "training.compile",
    "training.shard",
    "training.on_nonfinite",
    "training.log_every",
    "training.validate_every",
    "training.checkpoint_every",
    "training.checkpoint_minutes",
    "training.keep_checkpoints",
    "training.mirror",
    "training.track",
)

Standing = Literal["within", "below", "above"]


@dataclass(frozen=True)
class ReferencePoint:
    """The dev scores of all reference runs after one update."""

    step: int
    nll: list[float]
    bleu: list[float]  # empty if none was computed


@dataclass(frozen=True)
class ReferenceCurve:
    store: str  # digest of the store's files
    seeds: list[int]
    settings: RunConfig
    points: list[ReferencePoint]

    def check(self) -> str | None:
        if len(self.seeds) < 2:
            return "a spread needs at least two runs"
        for point in self.points:
            if {len(point.nll), len(point.bleu) or len(point.nll)} != {len(self.seeds)}:
                return f"has not one score for each run at update {point.step}"
            if min(point.nll) <= 0:
                return f"an NLL at update {point.step} is not positive"
        return None


@dataclass(frozen=True)
class Band:
    low: float
    high: float

    def place(self, value: float) -> Literal["low", "inside", "high"]:
        if value < self.low:
            return "low"
        return "inside" if value <= self.high else "high"  # NaN is high, as a bad NLL is


@dataclass(frozen=True)
class Judgement:
    """A validation beside the reference."""

    verdict: Standing
    outside: tuple[str, ...]  # the figures that are not in their bands
    bands: dict[str, Band]  # nll, and bleu where it is compared

    def describe(self) -> str:
        if self.verdict == "within":
            return "within the reference"
        return f"{self.verdict} the reference: {', '.join(self.outside)}"

    @property
    def event(self) -> dict[str, str | float]:
        """What the line of the validation in metrics.jsonl says of it."""
        values: dict[str, str | float] = {"reference": self.verdict}
        for name, band in self.bands.items():
            values[f"{name}_low"] = round(band.low, 5)
            values[f"{name}_high"] = round(band.high, 5)
        return values


class ShippedReference:
    """The reference curve that applies to a run."""

    def __init__(self, name: str, curve: ReferenceCurve, has_same_search: bool) -> None:
        self.name, self.curve, self.has_same_search = name, curve, has_same_search
        self.places = {point.step: i for i, point in enumerate(curve.points)}

    def describe(self) -> str:
        steps = [point.step for point in self.curve.points]
        return (
            f"reference: {len(self.curve.seeds)} runs of {self.name} with other seeds, to update "
            f"{max(steps):,}; validations say whether this run learns as well"
        )

    def judge(self, step: int, nll: float, bleu: float | None) -> Judgement | None:
        """Compare a validation; None if the reference has none after this update."""
        i = self.places.get(step)
        if i is None:
            return None
        points = self.curve.points
        near = points[max(0, i - NEIGHBOURS) : i + NEIGHBOURS + 1]
        bands = {"nll": find_nll_band(points[i].nll, [point.nll for point in near])}
        if bleu is not None and self.has_same_search and points[i].bleu:
            bands["bleu"] = find_bleu_band(points[i].bleu, [point.bleu for point in near])

        outside, verdicts = [], set()
        for name, value, bad in (("nll", nll, "high"), ("bleu", bleu, "low")):
            if name not in bands or value is None:
                continue
            band = bands[name]
            if (place := band.place(value)) != "inside":
                verdicts.add("below" if place == bad else "above")
                outside.append(
                    f"dev {name.upper()} {value:.4g}, reference {band.low:.4g} to {band.high:.4g}"
                )
        verdict: Standing = "within"
        if verdicts:
            verdict = "below" if "below" in verdicts else "above"
        return Judgement(verdict, tuple(outside), bands)


def find_nll_band(values: Sequence[float], near: Sequence[Sequence[float]]) -> Band:
    """The band of a further run's NLL, with the deviations of the validations near it."""
    band = _predict(
        [math.log(nll) for nll in values],
        [[math.log(nll) for nll in some] for some in near],
        MIN_NLL_DEVIATION,
    )
    return Band(math.exp(band.low), math.exp(band.high))


def find_bleu_band(values: Sequence[float], near: Sequence[Sequence[float]]) -> Band:
    band = _predict(values, [some for some in near if some], MIN_BLEU_DEVIATION)
    return Band(max(0.0, band.low), min(100.0, band.high))


def _predict(values: Sequence[float], near: Sequence[Sequence[float]], at_least: float) -> Band:
    n = len(values)
    variance = statistics.fmean(statistics.variance(some) for some in near)
    deviation = max(math.sqrt(variance), at_least)
    t = student_t(len(near) * (n - 1), BAND_PROBABILITY)
    half_width = t * deviation * math.sqrt(1 + 1 / n)
    mean = statistics.fmean(values)
    return Band(mean - half_width, mean + half_width)


# ---- files -----------------------------------------------------------------------------------------


def find_reference(config: RunConfig, store: Path) -> ShippedReference | None:
    """Return the shipped reference that applies to a run on this store, if there is one."""
    for path in sorted((find_shipped_configs() / "references").glob("*.json")):
        reference = read_reference(path, config, store)
        if reference is not None:
            return reference
    return None


def read_reference(path: Path, config: RunConfig, store: Path) -> ShippedReference | None:
    """Return the reference in this file if it applies to a run on this store."""
    if config.data.is_mixed:  # weights are not in the store
        return None
    curve = read_record(path, ReferenceCurve, "damaged; install nmt again")
    if list_differences(curve.settings, config, (*IGNORED, *OF_DECODING)):
        return None
    if read_ledger(store).store != curve.store:
        return None
    differences = list_differences(curve.settings, config, IGNORED)
    return ShippedReference(f"{path.stem}.yaml", curve, has_same_search=not differences)
