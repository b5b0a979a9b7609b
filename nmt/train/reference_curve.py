"""Compares a run's dev scores with those of published runs of the same recipe.

A damaged training (a wrong learning rate, lost gradients) looks healthy: it only ends some BLEU lower,
and it is unknown how much to expect. configs/references/ has the dev scores of several runs of a shipped
config at each validation; scripts/make_reference_curve.py writes them. A reference applies if the store
has the same digest and all settings agree, except the seed, those of the machine, and how often the run
saves and validates.

The band of each figure is Student's 99 % prediction interval for a run with another seed. Two or three
runs say little about a deviation, so those of neighbouring validations are pooled, as if they were
independent; they are not quite, so the true probability is somewhat lower. The spread of NLL is
proportional to it, so its band is computed on logarithms.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nmt.config import (
    COURSE_KEYS,
    MACHINE_KEYS,
    DataConfig,
    RunConfig,
    VocabConfig,
    find_shipped_configs,
    list_differences,
)
from nmt.corpus.ledger import read_ledger
from nmt.score.significance import student_t
from nmt.system.records import read_record
from nmt.train.events import ValidEvent

BAND_PROBABILITY = 0.99
NEIGHBOURS = 1  # validations on each side whose deviations are pooled
# Other machines and precisions round differently; no band is narrower than for these deviations.
MIN_NLL_DEVIATION = 0.005  # of the logarithm
MIN_BLEU_DEVIATION = 0.3

SEARCH_KEYS = ("decoding", "evaluation.sentences")  # they do not change the NLL
# The store's digest covers data and vocabulary, but not what training draws anew for each epoch.
DATA_KEYS = [f.name for f in dataclasses.fields(DataConfig)]
VOCAB_KEYS = [f.name for f in dataclasses.fields(VocabConfig) if f.name != "bpe_dropout"]
STORE_KEYS = (*(f"data.{name}" for name in DATA_KEYS), *(f"vocab.{name}" for name in VOCAB_KEYS))
IGNORED_KEYS = (
    *STORE_KEYS,
    *MACHINE_KEYS,
    *COURSE_KEYS,
    "seed",
    "training.precision",  # the band has room for rounding
    "decoding.batch_tokens",
    "evaluation.bleu",
    "evaluation.best_by",
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
        n_runs = len(self.seeds)
        if n_runs < 2:
            return "a spread needs at least two runs"
        for point in self.points:
            if len(point.nll) != n_runs or len(point.bleu) not in (0, n_runs):
                return f"does not have exactly one score per run at update {point.step}"
            if min(point.nll) <= 0:
                return f"an NLL at update {point.step} is not positive"
        return None


@dataclass(frozen=True)
class Band:
    low: float
    high: float

    def judge(self, value: float, is_lower_better: bool) -> Standing:
        if self.low <= value <= self.high:
            return "within"
        is_better = value < self.low if is_lower_better else value > self.high
        return "above" if is_better else "below"  # NaN is below


@dataclass(frozen=True)
class ShippedReference:
    """The reference curve that applies to a run."""

    name: str
    curve: ReferenceCurve
    has_same_search: bool

    @cached_property
    def index_by_step(self) -> dict[int, int]:
        return {point.step: i for i, point in enumerate(self.curve.points)}

    def describe(self) -> str:
        seeds = ", ".join(map(str, self.curve.seeds))
        last = max(self.index_by_step)
        return (
            f"reference: {len(self.curve.seeds)} runs of {self.name} with seeds {seeds}, to update "
            f"{last:,}; each validation is compared with them"
        )

    def compare(self, event: ValidEvent) -> tuple[ValidEvent, str]:
        """Return the event of a validation with the bands and the verdict, and words for the log. If
        the reference has none after this update, the event is unchanged and there are no words.
        """
        i = self.index_by_step.get(event.step)
        if i is None:
            return event, ""
        points = self.curve.points
        near = points[max(0, i - NEIGHBOURS) : i + NEIGHBOURS + 1]
        compared = {"nll": (event.nll, find_nll_band(points[i].nll, [one.nll for one in near]))}
        if event.bleu is not None and self.has_same_search and points[i].bleu:
            band = find_bleu_band(points[i].bleu, [one.bleu for one in near])
            compared["bleu"] = (event.bleu, band)

        standings: set[Standing] = set()
        outside = []
        bounds: dict[str, Any] = {}
        for name, (value, band) in compared.items():
            bounds[f"{name}_low"], bounds[f"{name}_high"] = round(band.low, 5), round(band.high, 5)
            standing = band.judge(value, is_lower_better=name == "nll")
            if standing != "within":
                standings.add(standing)
                outside.append(
                    f"dev {name.upper()} {value:.4g}, reference {band.low:.4g} to {band.high:.4g}"
                )
        if not outside:
            return replace(event, reference="within", **bounds), "within the reference"
        verdict = "below" if "below" in standings else "above"
        words = f"{verdict} the reference: {', '.join(outside)}"
        return replace(event, reference=verdict, **bounds), words


def find_nll_band(values: Sequence[float], near: Sequence[Sequence[float]]) -> Band:
    """The band of a further run's NLL, with the deviations of the validations near it."""
    near_logs = [_take_logs(nlls) for nlls in near]
    band = _predict(_take_logs(values), near_logs, MIN_NLL_DEVIATION)
    return Band(math.exp(band.low), math.exp(band.high))


def find_bleu_band(values: Sequence[float], near: Sequence[Sequence[float]]) -> Band:
    band = _predict(values, [some for some in near if some], MIN_BLEU_DEVIATION)
    return Band(max(0.0, band.low), min(100.0, band.high))


def _take_logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


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
    if config.data.is_mixed:  # the store's digest does not cover the mixture
        return None
    curve = read_record(path, ReferenceCurve, "damaged; install nmt again")
    if list_differences(curve.settings, config, (*IGNORED_KEYS, *SEARCH_KEYS)):
        return None
    if read_ledger(store).store != curve.store:
        return None
    has_same_search = not list_differences(curve.settings, config, IGNORED_KEYS)
    return ShippedReference(f"{path.stem}.yaml", curve, has_same_search)
