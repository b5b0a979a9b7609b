"""Writes a report: one HTML file about one or several runs, with everything in it, so that it opens
anywhere without a network, even from an e-mail.

All that a stranger wrote is text: it passes markup.py, or stands as data that page.js shows as text.
The page allows itself exactly its own scripts and style, by their digests, and nothing else: no
other script, no `eval`, no request. Without vl-convert it has tables where it would have charts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from nmt.report.curves import Chart, list_curve_charts, thin_points
from nmt.report.facts import RunFacts, read_run
from nmt.report.markup import (
    Content,
    escape_text,
    make_policy,
    render_data,
    render_details,
    render_table,
)
from nmt.report.sections import (
    describe_size,
    make_length_chart,
    render_card,
    render_cost,
    render_data_ledger,
    render_headline,
    render_recipe,
    render_reproduction,
    render_results,
    render_summary,
)
from nmt.report.sentences import (
    make_bleu_chart,
    render_attention,
    render_dev_samples,
    render_test_lines,
)
from nmt.report.vega import HOW_TO_INSTALL, make_spec, read_chart_script, render_png, round_figure
from nmt.system.errors import Failure, UserError
from nmt.system.files import (
    check_not_ours,
    check_writable,
    open_plain_file,
    write_bytes,
    write_text,
)
from nmt.system.progress import say
from nmt.system.run_folder import RunFolder

GENERATOR_TAG = (
    '<meta name="generator" content="nmt-report"/>'  # by this a file is known as a report
)
PNG_BEGIN = b"\x89PNG"
BEGIN_BYTES = 1_000
TABLE_ROWS = 12  # of a chart as a table
NO_CHARTS = f"Charts need vl-convert ({HOW_TO_INSTALL}); these are tables of the same figures."


def write_report(run: Path) -> Path:
    """Write run/report.html and return its path."""
    path = RunFolder(run).report
    write_page([read_run(run)], path)
    return path


def write_page(runs: Sequence[RunFacts], path: Path) -> None:
    """Write a report; charts that cannot be drawn here become tables, with a warning."""
    try:
        script = read_chart_script()
    except (Failure, UserError, OSError, SubprocessError) as error:
        say(f"warning: {path}: has tables instead of charts: {error}")
        script = None
    write_text(path, render_page(runs, script))


def write_png(runs: Sequence[RunFacts], path: Path) -> None:
    """Write the main curves as one image."""
    charts = [chart for chart in list_curve_charts(runs) if chart.is_main]
    if not charts:
        raise UserError(f"{path}: the runs have no curves yet; leave out --png")
    write_bytes(path, render_png(charts, [run.name for run in runs]))


def check_report_output(path: Path, own: Sequence[Path] = ()) -> None:
    """Refuse a path that cannot be written, or that holds something other than a report or an image of
    one. `own` are the reports of the runs themselves, which are written again.
    """
    check_writable(path)
    if path.resolve() in [report.resolve() for report in own]:
        return
    check_not_ours(path)
    if not path.exists():
        return
    with open_plain_file(path) as file:
        begin = file.read(BEGIN_BYTES)
    if GENERATOR_TAG.encode() not in begin and not begin.startswith(PNG_BEGIN):
        raise UserError(f"{path}: exists and is not a report; choose another file")


def render_page(runs: Sequence[RunFacts], chart_script: str | None) -> str:
    """Return the HTML; `chart_script` is the JavaScript that draws charts. Scripts apart, the page is also
    well-formed XML.
    """
    figures = FigureList(len(runs), chart_script is not None)
    sections = []
    for name, title, content in _list_sections(runs, figures):
        if content:
            sections.append((name, title, content))

    data, scripts = [], []
    style = _read_file("page.css")
    if any(run.attention for run in runs):
        scripts += [_read_file("attention_view.js"), _read_file("attention_lines.js")]
        style += _read_file("attention_view.css")
    if figures.charts and chart_script is not None:
        scripts += [chart_script, _read_file("page.js")]
        data.append(render_data(figures.to_json([run.name for run in runs]), "report-charts"))
    title = _name_runs([run.name for run in runs])
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8"/>',
        GENERATOR_TAG,
        '<meta name="color-scheme" content="light dark"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{make_policy(scripts, style)}"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape_text(title)}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        f"<header><h1>{escape_text(title)}</h1>{_render_lead(runs)}</header>",
        '<nav aria-label="Sections"><ul>',
        *(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections),
        "</ul></nav>",
        "<main>",
    ]
    for name, title, content in sections:
        parts.append(f'<section id="{name}" aria-labelledby="{name}-title">')
        parts.append(f'<h2 id="{name}-title">{title}</h2>\n{content}\n</section>')
    parts += ["</main>", "<footer><p>Written by nmt-report.</p></footer>"]
    parts += data
    parts += [f"<script>{script}</script>" for script in scripts]
    return "\n".join([*parts, "</body>", "</html>", ""])


def _list_sections(runs: Sequence[RunFacts], figures: "FigureList") -> list[tuple[str, str, str]]:
    """Return the id, the title and the content of each section; it is empty where data are missing."""
    renderers: list[tuple[str, str, Callable[[], str]]] = [
        ("score", "Score", lambda: render_headline(runs) + render_summary(runs)),
        ("curves", "Curves", lambda: _render_curves(runs, figures)),
        ("translations", "Translations", lambda: _render_translations(runs, figures)),
        ("samples", "Dev sentences over time", partial(render_dev_samples, runs)),
        ("attention", "Attention", partial(render_attention, runs)),
        ("scores", "All scores", partial(render_results, runs)),
        ("model", "The model", partial(render_card, runs)),
        ("recipe", "The recipe", partial(render_recipe, runs)),
        ("data", "The data", lambda: _render_data(runs, figures)),
        ("cost", "Speed and cost", partial(render_cost, runs)),
        ("again", "Train it again", partial(render_reproduction, runs)),
    ]
    return [(name, title, render()) for name, title, render in renderers]


def _name_runs(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{len(names)} runs"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _render_lead(runs: Sequence[RunFacts]) -> str:
    """Say in one line what this is about."""
    pairs = {f"{run.config.data.src} to {run.config.data.tgt}" for run in runs if run.config}
    words = [" and ".join(sorted(pairs))] if pairs else []
    if len(runs) == 1:
        words += describe_size(runs[0])
    return f'<p class="lead">{escape_text(" · ".join(words))}</p>' if words else ""


# ---- sections with charts --------------------------------------------------------------------------


def _render_curves(runs: Sequence[RunFacts], figures: "FigureList") -> str:
    charts = list_curve_charts(runs)
    if not charts:
        return ""
    parts = []
    if figures.has_charts:
        parts.append(_render_controls(runs))
    else:
        parts.append(f'<p class="note">{escape_text(NO_CHARTS)}</p>')
    parts.append('<div class="charts">')
    parts += [figures.add(chart, [run.name for run in runs]) for chart in charts]
    return "\n".join([*parts, "</div>"])


def _render_controls(runs: Sequence[RunFacts]) -> str:
    """The controls of page.js, hidden until it runs."""
    parts = [
        '<div class="controls" id="chart-controls" hidden="hidden">',
        '<label>updates <input type="number" id="updates-from"/></label>',
        '<label>to <input type="number" id="updates-to"/></label>',
        '<button type="button" id="updates-all">all</button>',
        "<span>Mark a stretch in a chart to zoom in, double-click to zoom out; arrow keys read points.</span>",
    ]
    if len(runs) > 1:
        parts.append("<fieldset><legend>Runs</legend>")
        for i, run in enumerate(runs):
            parts.append(
                f'<label><input type="checkbox" checked="checked" data-run="{i}"/> '
                f'<span class="key c{i % 8}"></span>{escape_text(run.name)}</label>'
            )
        parts.append("</fieldset>")
    return "\n".join([*parts, "</div>"])


def _render_translations(runs: Sequence[RunFacts], figures: "FigureList") -> str:
    chart = make_bleu_chart(runs)
    parts = (
        [f'<div class="charts">{figures.add(chart, [run.name for run in runs])}</div>']
        if chart
        else []
    )
    return "\n".join([*parts, render_test_lines(runs)])


def _render_data(runs: Sequence[RunFacts], figures: "FigureList") -> str:
    content = render_data_ledger(runs)
    chart = make_length_chart(runs[0]) if len(runs) == 1 else None
    if chart is None:
        return content
    return f'{content}\n<div class="charts">{figures.add(chart, [runs[0].name])}</div>'


class FigureList:
    """The charts of a page, in the order in which page.js finds them."""

    def __init__(self, n_runs: int, has_charts: bool) -> None:
        self.n_runs, self.has_charts = n_runs, has_charts
        self.charts: list[Chart] = []

    def add(self, chart: Chart, names: Sequence[str]) -> str:
        """Return the place of a chart on the page, with its figures as a table."""
        title = escape_text(chart.title)
        table = _tabulate_chart(chart, names)
        number = len(self.charts)
        self.charts.append(chart)
        if not self.has_charts:
            return f"<figure><figcaption>{title}</figcaption>\n{table}\n</figure>"
        label = f"{title}, {escape_text(chart.y)} against {escape_text(chart.x)}"
        return (
            f'<figure data-chart="{number}"><figcaption>{title}</figcaption>\n'
            f'<div class="plot" role="group" tabindex="0" aria-label="{label}"></div>\n'
            f"{render_details('As a table', table)}\n</figure>"
        )

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        return {
            "runs": list(names),
            "charts": [self._chart_to_json(chart) for chart in self.charts],
        }

    def _chart_to_json(self, chart: Chart) -> dict[str, Any]:
        series = []
        for one in chart.series:
            xs = [x for x, _ in one.points]
            ys = [round_figure(y) for _, y in one.points]
            series.append({"r": one.run, "s": one.name, "x": xs, "y": ys})
        values: dict[str, Any] = {"spec": make_spec(chart, self.n_runs), "series": series}
        if chart.buckets:
            values["buckets"] = list(chart.buckets)
        return values


def _tabulate_chart(chart: Chart, names: Sequence[str]) -> str:
    """Return some of the chart's points as a table, with a column for each series."""
    head: list[Content] = [chart.x]
    columns = []
    for series in chart.series:
        label = series.name if len(names) == 1 else f"{names[series.run]}, {series.name}"
        head.append(label)
        columns.append(dict(series.points))
    every = sorted({x for column in columns for x in column})
    chosen = [x for x, _ in thin_points([(x, 0.0) for x in every], TABLE_ROWS)]
    rows: list[list[Content]] = []
    for x in every if chart.buckets else chosen:
        name = chart.buckets[int(x)] if chart.buckets else f"{x:,}"
        rows.append([name, *(f"{column[x]:,.6g}" if x in column else "" for column in columns)])
    return render_table(head, rows)


# ---- files and digests -----------------------------------------------------------------------------


def _read_file(name: str) -> str:
    return files("nmt.report").joinpath(name).read_text(encoding="utf-8")
