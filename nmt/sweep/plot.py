"""The picture of a sweep: for each score a panel with a line for each row of the table.

Each seed is a dot, their mean a bar. From three seeds on, a line is the 95 % interval of the mean, as in
the table; that of two seeds would be so wide that nothing else could be seen.
"""

from collections.abc import Sequence
from typing import Any

from nmt.report.vega import Spec, fill_template, round_figure
from nmt.sweep.grid import PLOT_MARK, Sweep
from nmt.sweep.table import Row
from nmt.system.extras import is_installed, name_remedy
from nmt.system.files import write_text
from nmt.system.progress import say

MIN_SEEDS = 3  # of an interval
PLOT_FILE = "plot.svg"


def write_plot(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Draw the table into FOLDER/plot.svg; without vl-convert, say how to install it."""
    if not is_installed("vl_convert"):
        say(f"no {PLOT_FILE}: it needs vl-convert; {name_remedy('vl_convert')}")
        return
    import vl_convert

    spec = make_plot(sweep, rows)
    if spec["hconcat"]:
        image = vl_convert.vegalite_to_svg(spec)
        write_text(sweep.folder / PLOT_FILE, f"{PLOT_MARK}\n{image}")


def make_plot(sweep: Sweep, rows: Sequence[Row]) -> Spec:
    """Return the specification, with a panel for each score that some run has."""
    figures = {"dev_nll": "dev NLL"} | {f"{name}_bleu": f"{name} BLEU" for name in sweep.score}
    panels: list[Spec] = []
    for figure, title in figures.items():
        marks = list_marks(rows, figure)
        if marks["seeds"]:
            names = [row.name for row in rows]
            values = marks | {"title": title, "names": names, "has_names": not panels}
            panels.append(fill_template("sweep_panel", values))
    return fill_template("sweep", {"panels": panels})


def list_marks(rows: Sequence[Row], figure: str) -> dict[str, list[dict[str, Any]]]:
    """Return what a panel draws: the seeds, the means and their intervals."""
    marks: dict[str, list[dict[str, Any]]] = {"seeds": [], "means": [], "intervals": []}

    for row in rows:
        mean = row.average(figure)
        if mean is None:
            continue
        values = row.list_values(figure).values()
        for value in values:
            marks["seeds"].append({"run": row.name, "value": round_figure(value)})
        marks["means"].append({"run": row.name, "value": round_figure(mean.value)})
        if mean.plus_minus is not None and len(values) >= MIN_SEEDS:
            low, high = mean.value - mean.plus_minus, mean.value + mean.plus_minus
            ends = {"value": round_figure(low), "high": round_figure(high)}
            marks["intervals"].append({"run": row.name} | ends)
    return marks
