"""Writes a report: one HTML file about one or several runs, with everything in it, so that it opens
anywhere without a network, even from an e-mail.

Whatever a stranger wrote is shown as text: it passes markup.py, or is embedded as data that charts.js shows as text.
The page allows itself exactly its own scripts and style, by their digests, and nothing else: no
other script, no `eval`, no request. Without vl-convert it has tables where it would have charts.
"""

from collections.abc import Sequence
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING

from nmt.extras.report.curves import list_curve_charts
from nmt.extras.report.facts import RunFacts, read_run
from nmt.extras.report.figures import FigureList
from nmt.extras.report.markup import GENERATOR_TAG, read_page_file, render_data, render_document
from nmt.extras.report.sections import (
    render_each,
    render_headline,
    render_ledger,
    render_recipe,
    render_results,
    render_run_name,
    render_summary,
)
from nmt.extras.report.sentences import render_dev_samples, render_test_lines
from nmt.extras.report.vega import read_chart_script
from nmt.system.errors import ForeseenError, UserError, explain_missing
from nmt.system.escapes import escape_html, escape_line
from nmt.system.files import check_writable, refuse_run_file, write_text
from nmt.system.output_folder import check_replaceable_file
from nmt.system.progress import say
from nmt.system.run_folder import MANIFEST_FILE, RunFolder

if TYPE_CHECKING:
    from nmt.evaluate.outcome import Evaluation

MOST_NAMES = 4  # of runs in the title of a page
MOST_RUNS_SCORED = 4  # line by line, which takes a second for each
NO_CHARTS = "Charts need vl-convert, of the extra report; these are tables of the same figures."


def write_report(run: Path) -> Path:
    """Write run/report.html and return its path."""
    path = RunFolder(run).report
    write_page([read_run(run)], path)
    return path


def report_runs(names: Sequence[str], output: str | None) -> None:
    """Write the report of some run folders to `output`; without it, that of one into its folder."""
    for name in names:
        if not Path(name).is_dir():
            raise explain_missing(name, "give a run folder")
        if Path(name, MANIFEST_FILE).exists():
            raise UserError(f"{name}: is a checkpoint, a store or an export; give the run folder")
    own = [RunFolder(Path(name)).report for name in names]
    path = own[0] if output is None else Path(output)
    check_report_output(path, own)

    write_page([read_run(Path(name)) for name in names], path)
    say(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def write_page(runs: Sequence[RunFacts], path: Path) -> None:
    """Write a report; charts that cannot be drawn here become tables, with a warning."""
    try:
        script = read_chart_script()
    except (ForeseenError, OSError, SubprocessError) as error:
        say(f"warning: {path}: has tables instead of charts: {error}")
        script = None
    write_text(path, render_page(runs, script))


def write_evaluation_page(evaluation: "Evaluation", path: Path) -> None:
    """Write a page of what a report can show of each system, even without a run."""
    from nmt.evaluate.evaluation import (
        describe_system,  # and so torch, which other reports do without
    )

    facts = []
    for system in evaluation.systems:
        result, texts = describe_system(system)
        config = None if system.model is None else system.model.config
        name = escape_line(system.label)
        facts.append(RunFacts(name, {}, config, results=(result,), texts=texts))
    write_page(facts, path)


def check_report_output(path: Path, own: Sequence[Path] = ()) -> None:
    """Refuse a path that cannot be written, or that holds something other than a report. `own` are the
    reports of the runs themselves, which are written again.
    """
    if path.resolve() in [report.resolve() for report in own]:
        check_writable(path)
        return
    refuse_run_file(path)
    check_replaceable_file(path, "a report", [GENERATOR_TAG])


def render_page(runs: Sequence[RunFacts], chart_script: str | None) -> str:
    """Return the HTML; `chart_script` is the JavaScript that draws charts. Scripts apart, the page is also
    well-formed XML.
    """
    names = [run.name for run in runs]
    figures = FigureList(names, has_charts=chart_script is not None)
    sections = _list_sections(runs, figures)

    scripts = []
    data = ""
    if figures.charts and chart_script is not None:
        scripts = [chart_script, read_page_file("charts.js")]
        data = render_data(figures.to_json(), "report-charts")

    title = names[0]
    if len(names) > 1:
        title = f"{', '.join(names[:-1])} and {names[-1]}"
    if len(names) > MOST_NAMES:
        title = f"{len(names)} runs"
    links = []
    contents = []
    for name, heading, content in sections:
        links.append(f'<li><a href="#{name}">{heading}</a></li>')
        contents.append(
            f'<section id="{name}" aria-labelledby="{name}-title">\n'
            f'<h2 id="{name}-title">{heading}</h2>\n{content}\n</section>'
        )
    body = [
        f"<header><h1>{escape_html(title)}</h1>{_render_lead(runs)}</header>",
        '<nav aria-label="Sections"><ul>',
        *links,
        "</ul></nav>",
        "<main>",
        *contents,
        "</main>",
        "<footer><p>Written by nmt-report.</p></footer>",
        data,
    ]
    return render_document(title, body, scripts, read_page_file("page.css"))


def _list_sections(runs: Sequence[RunFacts], figures: FigureList) -> list[tuple[str, str, str]]:
    """Return the sections that have something to show: their id in the page, title and content."""
    sections = [
        ("score", "Score", render_headline(runs) + render_each(runs, render_summary)),
        ("curves", "Curves", _render_curves(runs, figures)),
        ("translations", "Translations", render_each(runs[:MOST_RUNS_SCORED], render_test_lines)),
        ("samples", "Dev sentences over time", render_each(runs, render_dev_samples)),
        ("scores", "All scores", render_each(runs, render_results)),
        ("recipe", "The recipe", render_recipe(runs)),
        ("data", "The data", render_each(runs, render_ledger)),
    ]
    return [section for section in sections if section[2]]


def _render_lead(runs: Sequence[RunFacts]) -> str:
    """Say in one line what this is about."""
    pairs = {" to ".join(run.languages) for run in runs if run.config is not None}
    words = [" and ".join(sorted(pairs))]
    if len(runs) == 1:
        (run,) = runs
        if run.n_weights is not None:
            words.append(f"{run.n_weights:,} weights")
        if run.events:
            words.append(f"{run.n_updates:,} updates")
    text = " · ".join(filter(None, words))
    return f'<p class="lead">{escape_html(text)}</p>' if text else ""


def _render_curves(runs: Sequence[RunFacts], figures: FigureList) -> str:
    charts = list_curve_charts(runs)
    if not charts:
        return ""
    note = f'<p class="note">{escape_html(NO_CHARTS)}</p>'
    controls = _render_controls(runs) if figures.has_charts else note
    return f"{controls}\n{figures.add_group(charts)}"


def _render_controls(runs: Sequence[RunFacts]) -> str:
    """The controls of charts.js, hidden until it runs."""
    controls = [
        '<div class="controls" id="chart-controls" hidden="hidden">',
        '<label>updates <input type="number" id="updates-from"/></label>',
        '<label>to <input type="number" id="updates-to"/></label>',
        '<button type="button" id="updates-all">all</button>',
        "<span>Select a range in a chart to zoom in, double-click to zoom out; arrow keys read points.</span>",
    ]
    if len(runs) > 1:
        controls.append("<fieldset><legend>Runs</legend>")
        for i, run in enumerate(runs):
            box = f'<input type="checkbox" checked="checked" data-run="{i}"/>'
            controls.append(f"<label>{box} {render_run_name(i, run)}</label>")
        controls.append("</fieldset>")
    return "\n".join([*controls, "</div>"])
