"""The picture of a sweep: for each score a panel with a line for each row of the table.

Each seed is a dot, their mean a bar. From three seeds on, a line is the 95 % interval of the mean, as in
the table; that of two seeds would be so wide that nothing else could be seen.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from nmt.report.vega import COLOURS, HOW_TO_INSTALL, Spec, round_figure
from nmt.sweep.grid import Sweep
from nmt.sweep.result import RunResult
from nmt.sweep.table import Mean, Row, get_bleu, get_nll
from nmt.system.files import write_text
from nmt.system.progress import say

MIN_SEEDS = 3  # of an interval
PLOT_FILE = "plot.svg"


def write_plot(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Draw the table into FOLDER/plot.svg; without vl-convert, say how to install it."""
    try:
        import vl_convert
    except ImportError:
        say(f"no {PLOT_FILE}: it needs vl-convert; {HOW_TO_INSTALL}")
        return
    spec = make_plot(sweep, rows)
    if spec["hconcat"]:
        write_text(sweep.folder / PLOT_FILE, vl_convert.vegalite_to_svg(spec))


def make_plot(sweep: Sweep, rows: Sequence[Row]) -> Spec:
    """Return the specification, with a panel for each score that some run has."""
    names = [row.name for row in rows]
    panels: list[Spec] = []
    for title, panel_rows in list_panels(sweep, rows):
        if any(row.values for row in panel_rows):
            is_first = not panels
            panels.append(make_panel(title, names, panel_rows, has_names=is_first))
    style = {"background": "white", "view": {"stroke": None}, "font": "sans-serif"}
    return {"hconcat": panels, "spacing": 24, "padding": 12, "config": style}


class PanelRow(NamedTuple):
    mean: Mean | None
    values: list[float]  # of each seed


def list_panels(sweep: Sweep, rows: Sequence[Row]) -> list[tuple[str, list[PanelRow]]]:
    panels = [("dev NLL", make_panel_rows(rows, get_nll))]
    for name in sweep.score:
        panels.append((f"{name} BLEU", make_panel_rows(rows, partial(get_bleu, name=name))))
    return panels


def make_panel_rows(
    rows: Sequence[Row], read: Callable[[RunResult], float | None]
) -> list[PanelRow]:
    panel_rows = []
    for row in rows:
        values = [read(result) for result in row.results.values()]
        known = [value for value in values if value is not None]
        panel_rows.append(PanelRow(row.average(read), known))
    return panel_rows


Marks = list[dict[str, Any]]  # what Vega-Lite draws: an object for each


def list_marks(names: list[str], rows: list[PanelRow]) -> tuple[Marks, Marks, Marks]:
    """Return the seeds, the means and their intervals."""
    seeds: Marks = []
    means: Marks = []
    intervals: Marks = []
    for name, (mean, values) in zip(names, rows, strict=True):
        for value in values:
            seeds.append({"run": name, "value": round_figure(value)})
        if mean is None:
            continue
        row = {"run": name, "value": round_figure(mean.value)}
        means.append(row)
        if mean.plus_minus is not None and len(values) >= MIN_SEEDS:
            low, high = mean.value - mean.plus_minus, mean.value + mean.plus_minus
            intervals.append({"run": name, "low": round_figure(low), "high": round_figure(high)})
    return seeds, means, intervals


def make_panel(title: str, names: list[str], rows: list[PanelRow], has_names: bool) -> Spec:
    seeds, means, intervals = list_marks(names, rows)
    y: Spec = {
        "field": "run",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": names},
        "title": None,
        "axis": {"labelLimit": 400, "ticks": False, "domain": False, "grid": True},
    }
    if not has_names:
        y["axis"]["labels"] = False
    x: Spec = {
        "field": "value",
        "type": "quantitative",
        "title": title,
        "scale": {"zero": False},
        "axis": {"tickCount": 5},
    }
    interval = {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y}
    layers: list[Spec] = [
        {
            "data": {"values": intervals},
            "mark": {"type": "rule", "strokeWidth": 2, "color": COLOURS[0]},
            "encoding": interval,
        },
        {
            "data": {"values": seeds},
            "mark": {"type": "circle", "size": 40, "color": COLOURS[0], "opacity": 0.6},
            "encoding": {"x": x, "y": y},
        },
        {
            "data": {"values": means},
            "mark": {"type": "tick", "thickness": 3, "color": COLOURS[1]},
            "encoding": {"x": x, "y": y},
        },
    ]
    return {"layer": [layer for layer in layers if layer["data"]["values"]], "width": 260}
