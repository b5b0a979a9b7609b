"""The charts of a report: their places on the page, their figures as tables, and the data that page.js
draws them from.
"""

from collections.abc import Sequence
from typing import Any

from nmt.report.curves import Chart, thin_points
from nmt.report.markup import Content, render_details, render_table
from nmt.report.vega import make_spec, round_figure
from nmt.system.escapes import escape_html

TABLE_ROWS = 12  # of a chart as a table


class FigureList:
    """The charts of a page, in the order in which page.js finds them."""

    def __init__(self, names: Sequence[str], has_charts: bool) -> None:
        """`names` are those of the runs; without charts there are tables in their place."""
        self.names, self.has_charts = names, has_charts
        self.charts: list[Chart] = []

    def add_group(self, charts: Sequence[Chart]) -> str:
        """Return the places of charts that stand side by side where there is room."""
        places = [self.add(chart) for chart in charts]
        return "\n".join(['<div class="charts">', *places, "</div>"])

    def add(self, chart: Chart) -> str:
        """Return the place of a chart on the page, with its figures as a table."""
        title = escape_html(chart.title)
        table = _tabulate_chart(chart, self.names)
        number = len(self.charts)
        self.charts.append(chart)
        if not self.has_charts:
            return f"<figure><figcaption>{title}</figcaption>\n{table}\n</figure>"
        label = f"{title}, {escape_html(chart.y)} against {escape_html(chart.x)}"
        return (
            f'<figure data-chart="{number}"><figcaption>{title}</figcaption>\n'
            f'<div class="plot" role="group" tabindex="0" aria-label="{label}"></div>\n'
            f"{render_details('As a table', table)}\n</figure>"
        )

    def to_json(self) -> dict[str, Any]:
        """Return what page.js draws."""
        charts = [self._chart_to_json(chart) for chart in self.charts]
        return {"runs": list(self.names), "charts": charts}

    def _chart_to_json(self, chart: Chart) -> dict[str, Any]:
        series = []
        for one in chart.series:
            xs = []
            ys = []
            for x, y in one.points:
                xs.append(x)
                ys.append(round_figure(y))
            series.append({"r": one.run, "s": one.name, "x": xs, "y": ys})
        values: dict[str, Any] = {"spec": make_spec(chart, len(self.names)), "series": series}
        if chart.buckets:
            values["buckets"] = list(chart.buckets)
        return values


def _tabulate_chart(chart: Chart, names: Sequence[str]) -> str:
    """Return some of the chart's points as a table, with a column for each series."""
    head: list[Content] = [chart.x]
    columns = []
    places: set[float] = set()
    for series in chart.series:
        name = series.name
        if len(names) > 1:
            name = f"{names[series.run]}, {name}"
        head.append(name)
        column = dict(series.points)
        columns.append(column)
        places |= column.keys()

    rows: list[list[Content]] = []
    for x in _choose_places(chart, sorted(places)):
        row: list[Content] = [_name_place(chart, x)]
        for column in columns:
            row.append(f"{column[x]:,.6g}" if x in column else "")
        rows.append(row)
    return render_table(head, rows)


def _choose_places(chart: Chart, places: list[float]) -> list[float]:
    """Choose the places that have a row: all buckets, or some of many updates."""
    if chart.buckets:
        return places
    thinned = thin_points([(x, 0.0) for x in places], TABLE_ROWS)
    return [x for x, _ in thinned]


def _name_place(chart: Chart, x: float) -> str:
    if chart.buckets:
        return chart.buckets[int(x)]
    return f"{x:,}"
