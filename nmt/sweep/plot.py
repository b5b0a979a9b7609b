"""The picture of a sweep: for each score a panel with a line for each row of the table.

Each seed is a dot, their mean a bar. From three seeds on, a line is the 95 % interval of the mean, as in
the table; that of two seeds would be so wide that nothing else could be seen.
"""

from collections.abc import Sequence
from typing import Any

from nmt.report.vega import COLOURS, HOW_TO_INSTALL, Spec, round_figure
from nmt.sweep.grid import Sweep
from nmt.sweep.table import Mean, Row, get_bleu
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
    """Return the specification, with a panel for each figure that some run has."""
    names = [row.name for row in rows]
    panels: list[Spec] = []
    for title, figures in list_panels(sweep, rows):
        if any(values for _, values in figures):
            panels.append(make_panel(title, names, figures, not panels))
    style = {"background": "white", "view": {"stroke": None}, "font": "sans-serif"}
    return {"hconcat": panels, "spacing": 24, "padding": 12, "config": style}


Figures = list[tuple[Mean | None, list[float]]]  # of each row: the mean, and each seed


def list_panels(sweep: Sweep, rows: Sequence[Row]) -> list[tuple[str, Figures]]:
    def collect(means: list[Mean | None], values: list[list[float | None]]) -> Figures:
        known = [[value for value in row if value is not None] for row in values]
        return list(zip(means, known, strict=True))

    panels = []
    nlls = [[one.nll for one in row.figures.values()] for row in rows]
    panels.append(("dev NLL", collect([row.average(lambda one: one.nll) for row in rows], nlls)))
    for name in sweep.score:
        bleus = [[get_bleu(one, name) for one in row.figures.values()] for row in rows]
        panels.append((f"{name} BLEU", collect([row.score(name) for row in rows], bleus)))
    return panels


def make_panel(title: str, names: list[str], figures: Figures, has_names: bool) -> Spec:
    seeds: list[dict[str, Any]] = []
    means: list[dict[str, Any]] = []
    for name, (mean, values) in zip(names, figures, strict=True):
        seeds += [{"run": name, "value": round_figure(value)} for value in values]
        if mean is None:
            continue
        row = {"run": name, "value": round_figure(mean.value)}
        if mean.plus_minus is not None and len(values) >= MIN_SEEDS:
            row["low"] = round_figure(mean.value - mean.plus_minus)
            row["high"] = round_figure(mean.value + mean.plus_minus)
        means.append(row)
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
            "data": {"values": [row for row in means if "low" in row]},
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
