"""The charts of a report: their places on the page, their figures as tables, and the data that charts.js
draws them from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nmt.extras.report.curves import Chart, thin_points
from nmt.extras.report.markup import render_details
from nmt.extras.report.vega import make_spec, round_figure
from nmt.system.escapes import escape_html
from nmt.system.strict_json import Fields
from nmt.system.tables import Table

TABLE_ROWS = 12  # of a chart as a table


@dataclass
class FigureList:
    """The charts of a page, in the order in which charts.js finds them."""

    names: Sequence[str]  # of the runs
    has_charts: bool  # whether charts can be drawn; if not, tables replace them
    charts: list[Chart] = field(default_factory=list)

    def add_group(self, charts: Sequence[Chart]) -> str:
        """Return the places of charts, which are side by side if the page is wide enough."""
        return "\n".join(['<div class="charts">', *map(self._add, charts), "</div>"])

    def _add(self, chart: Chart) -> str:
        """Return the place of a chart on the page, with its figures as a table."""
        title = escape_html(chart.title)
        table = _tabulate_chart(chart, self.names)
        number = len(self.charts)
        self.charts.append(chart)
        if not self.has_charts:
            return f"<figure><figcaption>{title}</figcaption>\n{table}\n</figure>"
        label = f"{title}, {escape_html(chart.y)} against updates"
        return (
            f'<figure data-chart="{number}"><figcaption>{title}</figcaption>\n'
            f'<div class="plot" role="group" tabindex="0" aria-label="{label}"></div>\n'
            f"{render_details('As a table', table)}\n</figure>"
        )

    def to_json(self) -> Fields:
        """Return what charts.js draws."""
        charts = []
        for chart in self.charts:
            series = []
            for curve in chart.series:
                xs = [x for x, _ in curve.points]
                ys = [round_figure(y) for _, y in curve.points]
                series.append({"r": curve.run, "s": curve.name, "x": xs, "y": ys})
            charts.append({"spec": make_spec(chart, len(self.names)), "series": series})
        return {"runs": self.names, "charts": charts}


def _tabulate_chart(chart: Chart, names: Sequence[str]) -> str:
    """Return some of the chart's points as a table, with a column for each series."""
    head = ["updates"]
    columns = []
    for series in chart.series:
        head.append(f"{names[series.run]}, {series.name}" if len(names) > 1 else series.name)
        columns.append(dict(series.points))
    updates = sorted({x for column in columns for x in column})
    rows = []
    for x, _ in thin_points([(x, 0.0) for x in updates], TABLE_ROWS):
        cells = [f"{column[x]:,.6g}" if x in column else "" for column in columns]
        rows.append([f"{x:,}", *cells])
    return Table(head, rows).to_html()
