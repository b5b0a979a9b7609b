"""The sections of a report as HTML; each is empty if its data are missing.

A function takes one run if the page repeats it for each (`render_each`), or all of them if they
share a table. Charts, which need JavaScript, are the page's (page.py).
"""

from collections.abc import Callable, Iterator, Sequence

from nmt.config_files import flatten_settings, format_setting, tabulate_differences
from nmt.corpus.ledger import tabulate_corpora
from nmt.evaluate.results import Result, describe_other_search
from nmt.extras.report.curves import collect_points
from nmt.extras.report.facts import RunFacts
from nmt.extras.report.markup import render_details, render_rows, render_stacked
from nmt.paper import check_conformance
from nmt.score.score import Score, compute_perplexity
from nmt.system.escapes import escape_html
from nmt.system.progress import format_duration
from nmt.system.tables import Cell, Code, Html, Rows, Table, render_html
from nmt.train.events import ValidEvent, WarningEvent

MOST_RUNS_IN_FULL = 8  # of more, only the settings that differ are listed
RESULTS_SHOWN = 20
NAMES_AND_PLACES = ("name", "out", "device", "data.root", "data.store", "data.workers")


def render_each(runs: Sequence[RunFacts], render_run: Callable[[RunFacts], str]) -> str:
    """Render a single run directly, several folded up under their names."""
    if len(runs) == 1:
        return render_run(runs[0])
    contents = [(run.name, render_run(run)) for run in runs]
    return "\n".join(render_details(name, content) for name, content in contents if content)


def render_run_name(i: int, run: RunFacts) -> str:
    """Name a run beside the colour of its curves."""
    return f'<span class="key c{i % 8}"></span>{escape_html(run.name)}'


# ---- scores ---------------------------------------------------------------------------------------


def render_headline(runs: Sequence[RunFacts]) -> str:
    """Say how good the models are, and by which measure."""
    if len(runs) == 1:
        return _render_one_headline(runs[0])
    rows: Rows = []
    for i, run in enumerate(runs):
        name = Html(f'<span class="run">{render_run_name(i, run)}</span>')
        headline = find_headline(run)
        if headline is None:
            rows.append([name, "not scored yet", "", "", "", ""])
            continue
        test_set, score = headline
        value = Html(f"<strong>{score.value:.2f}</strong>")
        signature = Code(score.signature)
        rows.append([name, test_set, score.name, value, score.format_interval(), signature])
    head = ("run", "scored on", "score", "value", "95 % interval", "signature")
    note = "<p>Scores of different signatures are different scales: compare only equal ones.</p>"
    return render_stacked(head, rows, "Scores of the runs") + note


def _render_one_headline(run: RunFacts) -> str:
    headline = find_headline(run)
    if headline is None:
        return ""
    test_set, score = headline
    interval = score.format_interval()
    paragraphs = [
        '<div class="headline">',
        f'<p class="score"><span class="value">{score.value:.2f}</span> {escape_html(score.name)}</p>',
        f"<p>95 % interval {interval}</p>" if interval else "",
        f"<p>{escape_html(test_set)}</p>",
        f'<p class="signature">{render_html(Code(score.signature))}</p>',
        "</div>",
    ]
    return "\n".join(filter(None, paragraphs))


def find_headline(run: RunFacts) -> tuple[str, Score] | None:
    """Return the first score of the run's headline, or of the best validation, and what was
    scored.
    """
    if run.headline is not None and run.headline.scores:
        return describe_scored(run, run.headline), run.headline.scores[0]
    best = find_best_validation(run)
    if best is None:
        return None
    score = Score("BLEU", best.figures["bleu"], best.signature or "")
    return f"the dev set, at update {best.step:,}", score


def describe_scored(run: RunFacts, result: Result) -> str:
    made = f", made at update {result.step:,} of {run.n_updates:,}" if result.step else ""
    search = describe_other_search(result.find_other_search(run.config)) if run.config else ""
    return f"{result.scored_text}, by {result.checkpoint}{made}{search}"


def find_best_validation(run: RunFacts) -> ValidEvent | None:
    """Return the first of the validations with the best BLEU."""
    valid = (event for event in run.events if isinstance(event, ValidEvent))
    scored = [event for event in valid if "bleu" in event.figures]
    return max(scored, key=lambda event: event.figures["bleu"], default=None)


def render_results(run: RunFacts) -> str:
    """List everything that was scored, with every metric: the ladder."""
    rows: Rows = []
    for result in reversed(run.results[-RESULTS_SHOWN:]):
        for score in result.scores:
            value = Html(f'<span class="number">{score.value:.2f}</span>')
            row: list[Cell] = [describe_scored(run, result), score.name, value]
            row += [score.format_interval(), result.search, Code(score.signature)]
            rows.append(row)
    head = ("scored", "score", "value", "95 % interval", "search", "signature")
    return render_stacked(head, rows, "All scores")


# ---- how far it is -----------------------------------------------------------------------------------


def render_summary(run: RunFacts) -> str:
    """Say how far the run is, what went wrong, and how low its loss is."""
    notes = list(run.notes)
    if run.n_damaged:
        notes.append(
            f"{run.n_damaged} line(s) of metrics.jsonl are left out: damaged, or of another version."
        )
    paragraphs = [f'<p class="note">{escape_html(note)}</p>' for note in notes]
    return render_rows(list_summary(run)) + "\n".join(paragraphs)


def list_summary(run: RunFacts) -> Iterator[tuple[str, Cell]]:
    # how far
    if not run.events:
        if run.settings:
            yield "updates", "none logged yet"
        return
    yield "updates", f"{run.n_updates:,}"
    times = [event.figures["elapsed_s"] for event in run.events if "elapsed_s" in event.figures]
    if times:
        yield "time", format_duration(times[-1])

    # what went wrong
    for event in run.events:
        if isinstance(event, WarningEvent):
            yield "warning", event.message

    # how good
    best = find_best_validation(run)
    if best is not None:
        yield "best dev BLEU", f"{best.bleu:.2f} at update {best.step:,}"
        yield "signature of dev BLEU", Code(best.signature or "")
    losses = collect_points(run.events, "valid", "nll")
    if losses:
        step, lowest = min(losses, key=lambda point: point[1])
        loss = f"{lowest:.4f} at update {step:,}, perplexity {compute_perplexity(lowest):.2f}"
        yield "lowest dev loss", loss


# ---- the recipe ------------------------------------------------------------------------------------


def render_recipe(runs: Sequence[RunFacts]) -> str:
    """List the deviations from the paper and all settings; of several runs first what differs."""

    def render_run(run: RunFacts) -> str:
        deviations = _render_deviations(run)
        if not run.settings or len(runs) > MOST_RUNS_IN_FULL:
            return deviations
        settings = flatten_settings(run.settings).items()
        rows = render_rows((key, format_setting(value)) for key, value in settings)
        return deviations + render_details("All settings", rows)

    return "\n".join([_render_differences(runs), render_each(runs, render_run)]).strip()


def _render_differences(runs: Sequence[RunFacts]) -> str:
    """List the settings in which the runs differ, if those of all are known."""
    configs = [run.config for run in runs if run.config is not None]
    if len(runs) == 1 or len(configs) < len(runs):
        return ""
    table = tabulate_differences(configs, NAMES_AND_PLACES)
    if not table:
        return "<p>All settings are equal.</p>"
    rows = [[key, *map(format_setting, values)] for key, values in table.items()]
    head = ["setting", *(run.name for run in runs)]
    return Table(head, rows).to_html("Settings in which the runs differ")


def _render_deviations(run: RunFacts) -> str:
    if run.config is None:
        return ""
    conformance = check_conformance(run.config)
    n = len(conformance.deviations)
    caption = f"{n or 'no'} deviation{'s' if n > 1 else ''}"
    caption += f" from the paper's {conformance.model} model, {conformance.pair}"
    if n == 0:
        return f"<p>{escape_html(caption)}</p>"
    rows: Rows = []
    for row in conformance.deviations:
        source, value = row.measure
        rows.append([row.name, row.key or "", row.ours, f"{value} ({source})", row.why])
    head = ("rule", "setting", "this run", "reference", "why")
    return Table(head, rows).to_html(caption, is_stacked=True)


# ---- the data --------------------------------------------------------------------------------------


def render_ledger(run: RunFacts) -> str:
    """Count what went in, what was kept, and what each rule dropped."""
    if run.ledger is None:
        return ""
    return tabulate_corpora(run.ledger).to_html(label="What went in", is_stacked=True)
