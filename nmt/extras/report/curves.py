"""Collects the curves of one or several runs, as charts, independent of how they are drawn.

A curve of many points is thinned to what a screen can show: for each range of updates, the lowest
and the highest point are kept, so a spike that lasted one update is still there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from nmt.extras.report.facts import RunFacts
from nmt.paper import find_dev_reference
from nmt.train.events import Event

MOST_POINTS = 500  # of a curve
POINTS_OF_CHART = 3_000  # of all its curves together
LOSS = "Loss in nats per target piece, without smoothing"
BLEU = "Dev BLEU"

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    run: int  # the place of its run in the report
    name: str
    points: Points


@dataclass(frozen=True)
class ReferenceLine:
    """A value that curves are compared with."""

    name: str
    value: float


@dataclass(frozen=True)
class Chart:
    title: str
    y: str  # what its axis counts; the other one counts updates
    series: tuple[Series, ...] = ()
    references: tuple[ReferenceLine, ...] = ()
    from_zero: bool = False


@dataclass(frozen=True)
class CurveChart:
    """Which figures of metrics.jsonl a chart shows."""

    chart: Chart
    curves: tuple[tuple[str, str, str], ...]  # the kind of a line, its key, the name of the curve
    unit: float = 1


def list_curve_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """Return the charts that have a point."""
    charts = []
    references_of_runs = [list_references(run) for run in runs]
    for wanted in CHARTS:
        series = []
        references: dict[ReferenceLine, None] = {}  # each once
        for i, run in enumerate(runs):
            references |= dict.fromkeys(references_of_runs[i].get(wanted.chart.title, ()))
            for kind, key, name in wanted.curves:
                points = collect_points(run.events, kind, key)
                scaled = [(step, value / wanted.unit) for step, value in points]
                series.append(Series(i, name, scaled))
        chart = replace(wanted.chart, references=tuple(references), series=tuple(series))
        charts.append(_thin_chart(chart))
    return [chart for chart in charts if chart.series]


def collect_points(events: Iterable[Event], kind: str, key: str) -> list[tuple[int, float]]:
    """Return (update, value) of each event of this kind that has a number under `key`."""
    return [
        (event.step, event.figures[key])
        for event in events
        if event.kind == kind and key in event.figures
    ]


# ---- what curves are compared with -----------------------------------------------------------------


def list_references(run: RunFacts) -> dict[str, list[ReferenceLine]]:
    """Return what the curves of a run are compared with, by the titles of their charts."""
    loss = []
    bleu = []
    paper = find_dev_reference(run.config) if run.config is not None else None
    if paper is not None:
        where = f"the paper's {paper.model}, dev, update {paper.step:,}"
        perplexity = f"{where}: perplexity {paper.perplexity} of its own pieces"
        loss.append(ReferenceLine(perplexity, math.log(paper.perplexity)))
        bleu.append(ReferenceLine(f"{where}: tokenised BLEU {paper.bleu}", paper.bleu))
    # if a warning has the unigram entropy of the target text
    for _, nll in collect_points(run.events, "warning", "unigram_nll")[-1:]:
        loss.append(ReferenceLine("frequencies of the pieces alone", nll))
    return {LOSS: loss, BLEU: bleu}


CHARTS = (
    CurveChart(
        Chart(LOSS, "nats"),
        (("train", "nll", "training"), ("valid", "nll", "dev")),
    ),
    CurveChart(
        Chart(BLEU, "BLEU", from_zero=True),
        (("valid", "bleu", "BLEU"),),
    ),
    CurveChart(Chart("Learning rate", "rate", from_zero=True), (("train", "lr", "rate"),)),
    CurveChart(Chart("Norm of the gradient", "norm"), (("train", "grad_norm", "norm"),)),
    CurveChart(
        Chart("Target tokens per second", "tokens/s", from_zero=True),
        (("train", "tgt_tokens_per_s", "tokens/s"),),
    ),
    CurveChart(
        Chart("Memory", "GiB", from_zero=True),
        (("train", "memory_bytes", "memory"),),
        unit=2**30,
    ),
)


# ---- fewer points ----------------------------------------------------------------------------------


def _thin_chart(chart: Chart) -> Chart:
    """Return the chart without empty series and with as many points as a screen can show."""
    series = [curve for curve in chart.series if curve.points]
    most = max(20, min(MOST_POINTS, POINTS_OF_CHART // max(1, len(series))))
    thinned = [replace(curve, points=thin_points(curve.points, most)) for curve in series]
    return replace(chart, series=tuple(thinned))


def thin_points(points: Points, most: int) -> Points:
    """Keep at most `most` points: the first, the last, and of each stretch the lowest and the highest."""
    if len(points) <= most:
        return points
    n_stretches = (most - 2) // 2
    inner = points[1:-1]
    kept = [points[0]]
    for i in range(n_stretches):
        first = i * len(inner) // n_stretches
        end = (i + 1) * len(inner) // n_stretches
        lowest = min(inner[first:end], key=itemgetter(1))
        highest = max(inner[first:end], key=itemgetter(1))
        kept += sorted({lowest, highest})
    return [*kept, points[-1]]
