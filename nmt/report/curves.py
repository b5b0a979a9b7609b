"""Collects the curves of one or several runs, as charts that know nothing of how they are drawn.

A curve of many points is thinned to what a screen can show: of each stretch of updates the lowest
and the highest point stay, so a spike that lasted one update is still there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nmt.paper import find_dev_reference
from nmt.report.facts import RunFacts
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.train.events import Event
from nmt.train.on_track import smoothed_loss_floor

MOST_POINTS = 500  # of a curve
POINTS_OF_CHART = 3_000  # of all its curves together
MOST_RUNS_BY_LAYER = 4  # more runs would be more charts than anybody reads

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line of a chart, or one colour of its bars."""

    run: int  # the place of its run in the report
    name: str
    points: Points


@dataclass(frozen=True)
class ReferenceLine:
    """A value that curves are compared with."""

    name: str
    value: float


@dataclass(frozen=True)
class ReferenceBand:
    """Where runs of the same recipe with other seeds are."""

    points: tuple[tuple[float, float, float], ...]  # x, from, to


@dataclass(frozen=True)
class Chart:
    title: str
    x: str  # what the axes count
    y: str
    series: tuple[Series, ...]
    references: tuple[ReferenceLine, ...] = ()
    from_zero: bool = False
    is_main: bool = False  # goes into the image of --png
    buckets: tuple[str, ...] = ()  # names of x = 0, 1, ...: bars, not curves
    bands: tuple[ReferenceBand, ...] = ()


@dataclass(frozen=True)
class Curve:
    """A figure of metrics.jsonl: lines of this kind have it under this key."""

    kind: str
    key: str
    name: str


@dataclass(frozen=True)
class CurveChart:
    title: str
    y: str
    curves: tuple[Curve, ...]
    from_zero: bool = False
    is_main: bool = False
    factor: float = 1.0


LOSS_TITLE = "Loss in nats per target piece, without smoothing"
SMOOTHED_LOSS_TITLE = "Training loss in nats per target piece, as smoothed"
BLEU_TITLE = "Dev BLEU"
CHARTS = (
    CurveChart(
        LOSS_TITLE,
        "nats",
        (Curve("train", "nll", "training"), Curve("valid", "nll", "dev")),
        is_main=True,
    ),
    CurveChart(BLEU_TITLE, "BLEU", (Curve("valid", "bleu", "BLEU"),), from_zero=True, is_main=True),
    CurveChart(SMOOTHED_LOSS_TITLE, "nats", (Curve("train", "loss", "training"),)),
    CurveChart(
        "Learning rate", "rate", (Curve("train", "lr", "rate"),), from_zero=True, is_main=True
    ),
    CurveChart(
        "Norm of the gradient", "norm", (Curve("train", "grad_norm", "norm"),), is_main=True
    ),
    CurveChart(
        "Target tokens per second",
        "tokens/s",
        (Curve("train", "tgt_tokens_per_s", "tokens/s"),),
        from_zero=True,
    ),
    CurveChart(
        "Memory",
        "GiB",
        (Curve("train", "memory_bytes", "memory"),),
        from_zero=True,
        factor=1 / 2**30,
    ),
)
# Figures whose keys end with the name of a layer or of a bucket, each with one line in its chart.
FAMILIES = (
    ("layers", "grad_norm/", "Norm of the gradient by layer", "norm"),
    ("layers", "update_norm/", "Norm of the update by layer", "norm"),
    ("valid", "nll/", "Dev loss by length of the target, in pieces", "nats"),
    ("valid", "entropy/", "Entropy of attention by layer", "nats"),
)


def list_curve_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """Return the charts that have a point."""
    charts = []
    for wanted in CHARTS:
        series = []
        for i, run in enumerate(runs):
            for curve in wanted.curves:
                points = collect_points(run.events, curve.kind, curve.key)
                points = [(step, value * wanted.factor) for step, value in points]
                series.append(Series(i, curve.name, points))
        references = tuple(_list_references(wanted.title, runs))
        if wanted.title == SMOOTHED_LOSS_TITLE and not references:
            continue  # without its floor it says no more than the NLL
        charts.append(
            Chart(
                wanted.title,
                "updates",
                wanted.y,
                tuple(series),
                references,
                wanted.from_zero,
                wanted.is_main,
                bands=tuple(_list_bands(wanted.title, runs)),
            )
        )
    if len(runs) <= MOST_RUNS_BY_LAYER:
        for i, run in enumerate(runs):
            charts += _list_families(i, run, is_alone=len(runs) == 1)
    return [chart for chart in map(_thin_chart, charts) if chart.series]


def _list_families(i: int, run: RunFacts, is_alone: bool) -> list[Chart]:
    charts = []
    for kind, prefix, title, y in FAMILIES:
        keys: dict[str, None] = {}
        for event in run.events:
            if event.kind == kind:
                keys |= dict.fromkeys(key for key in event.figures if key.startswith(prefix))
        series = []
        for key in keys:
            points = collect_points(run.events, kind, key)
            series.append(Series(i, escape_line(key.removeprefix(prefix)), points))
        title = title if is_alone else f"{title}: {run.name}"
        charts.append(Chart(title, "updates", y, tuple(series)))
    return charts


def collect_points(events: Iterable[Event], kind: str, key: str) -> list[tuple[int, float]]:
    """Return (update, value) of each event of this kind that has a number under `key`."""
    points = []
    for event in events:
        if event.kind == kind and key in event.figures:
            points.append((event.step, event.figures[key]))
    return points


# ---- what curves are compared with -----------------------------------------------------------------


def _list_references(title: str, runs: Sequence[RunFacts]) -> dict[ReferenceLine, None]:
    """Return the reference lines of a chart, each once."""
    found: list[ReferenceLine] = []
    for run in runs:
        if title == LOSS_TITLE:
            found += find_paper_references(run)[:1]
            found += _find_unigram_line(run.events)
        elif title == BLEU_TITLE:
            found += find_paper_references(run)[1:]
        elif title == SMOOTHED_LOSS_TITLE:
            found += _find_floor(run)
    return dict.fromkeys(found)


def _list_bands(title: str, runs: Sequence[RunFacts]) -> dict[ReferenceBand, None]:
    """Return the bands of the references that training compared its dev scores with, each once."""
    key = {LOSS_TITLE: "nll", BLEU_TITLE: "bleu"}.get(title)
    found: dict[ReferenceBand, None] = {}
    for run in runs:
        points = []
        for event in run.events:
            figures = event.figures
            if event.kind == "valid" and {f"{key}_low", f"{key}_high"} <= figures.keys():
                points.append((event.step, figures[f"{key}_low"], figures[f"{key}_high"]))
        if len(points) > 1:
            found[ReferenceBand(tuple(points))] = None
    return found


def find_paper_references(run: RunFacts) -> list[ReferenceLine]:
    """Return the paper's dev loss and dev BLEU where this is the paper's model."""
    paper = find_dev_reference(run.config) if run.config is not None else None
    if paper is None:
        return []
    where = f"the paper's {paper.model}, dev, update {paper.step:,}"
    perplexity = f"{where}: perplexity {paper.perplexity} of its own pieces"
    return [
        ReferenceLine(perplexity, math.log(paper.perplexity)),
        ReferenceLine(f"{where}: tokenised BLEU {paper.bleu}", paper.bleu),
    ]


def _find_floor(run: RunFacts) -> list[ReferenceLine]:
    """Return the lowest smoothed loss that is possible, if the loss is smoothed."""
    if run.config is None or run.vocab is None:
        return []
    try:
        n_vocab = run.config.model.count_rows(run.vocab.tgt.size)
    except UserError:  # the vocabulary is not this model's
        return []
    floor = smoothed_loss_floor(run.config.training.label_smoothing, n_vocab)
    return [ReferenceLine(f"no smoothed loss is below {floor:.3f}", floor)] if floor else []


def _find_unigram_line(events: Iterable[Event]) -> list[ReferenceLine]:
    """Return the unigram entropy of the target text, if the run was ever warned that it is there."""
    points = collect_points(events, "warning", "unigram_nll")
    return [ReferenceLine("frequencies of the pieces alone", nll) for _, nll in points[-1:]]


# ---- fewer points ----------------------------------------------------------------------------------


def _thin_chart(chart: Chart) -> Chart:
    """Return the chart without empty series and with as many points as a screen can show."""
    series = [one for one in chart.series if one.points]
    most = max(20, min(MOST_POINTS, POINTS_OF_CHART // max(1, len(series))))
    thinned = [Series(one.run, one.name, thin_points(one.points, most)) for one in series]
    return Chart(
        chart.title,
        chart.x,
        chart.y,
        tuple(thinned),
        chart.references,
        chart.from_zero,
        chart.is_main,
        bands=chart.bands,
    )


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
        stretch = range(first, end)
        lowest = min(stretch, key=lambda j: inner[j][1])
        highest = max(stretch, key=lambda j: inner[j][1])
        kept += [inner[j] for j in sorted({lowest, highest})]
    return [*kept, points[-1]]
