"""The sections of a report as HTML; each is empty if its data are missing.

A function takes one run if the page repeats it for each (`render_each`), or all of them if they
share a table. Charts, which need JavaScript, are the page's (page.py).
"""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from nmt.config import tabulate_differences
from nmt.corpus.ledger import CorpusAccount, flatten_settings
from nmt.evaluate.description import (
    describe_model,
    describe_search,
    describe_training,
    describe_training_text,
)
from nmt.evaluate.results import Result
from nmt.paper import check_conformance
from nmt.report.curves import Chart, Series, collect_points
from nmt.report.facts import RunFacts
from nmt.report.markup import render_details, render_rows, render_sentence, render_stacked
from nmt.score.score import Score, compute_perplexity
from nmt.system.escapes import escape_html
from nmt.system.progress import format_duration
from nmt.system.tables import Cell, Code, Html, Table, render_html
from nmt.train.events import ValidEvent, WarningEvent

MOST_RUNS_IN_FULL = 8  # of more, only the settings that differ are listed
SAMPLES_SHOWN = 3  # dropped pairs of each rule
RESULTS_SHOWN = 20
LENGTH_STEP = 10  # pieces
MOST_LENGTHS = 12  # bars
NAMES_AND_PLACES = ("name", "out", "device", "data.root", "data.store", "data.workers")
FLOP_PER_WEIGHT = 6  # of training, for each token: two forward, four backward


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
    rows: list[list[Cell]] = []
    for i, run in enumerate(runs):
        name = Html(f'<span class="run">{render_run_name(i, run)}</span>')
        headline = find_headline(run)
        if headline is None:
            rows.append([name, "not scored yet", "", "", "", ""])
            continue
        place, score = headline
        value = Html(f"<strong>{score.value:.2f}</strong>")
        signature = Code(score.signature)
        rows.append([name, place, score.name, value, score.format_interval(), signature])
    head = ("run", "scored on", "score", "value", "95 % interval", "signature")
    note = "<p>Scores of different signatures are different scales: compare only equal ones.</p>"
    return render_stacked(head, rows, "Scores of the runs") + note


def _render_one_headline(run: RunFacts) -> str:
    headline = find_headline(run)
    if headline is None:
        return ""
    place, score = headline
    interval = score.format_interval()
    parts = [
        '<div class="headline">',
        f'<p class="score"><span class="value">{score.value:.2f}</span> {escape_html(score.name)}</p>',
        f"<p>95 % interval {interval}</p>" if interval else "",
        f"<p>{escape_html(place)}</p>",
        f'<p class="signature">{render_html(Code(score.signature))}</p>',
        "</div>",
    ]
    return "\n".join(filter(None, parts))


def find_headline(run: RunFacts) -> tuple[str, Score] | None:
    """Return the first score of the last evaluation, or of the best validation, and what was
    scored.
    """
    if run.headline is not None and run.headline.scores:
        return describe_test_set(run.headline), run.headline.scores[0]
    best = find_best_validation(run)
    if best is None:
        return None
    score = Score("BLEU", best.figures["bleu"], best.signature or "")
    return f"the dev set, at update {best.step:,}", score


def describe_test_set(result: Result) -> str:
    return f"{result.scored_text}, by {result.checkpoint}"


def find_best_validation(run: RunFacts) -> ValidEvent | None:
    """Return the first of the validations with the best BLEU."""
    valid = (event for event in run.events if isinstance(event, ValidEvent))
    scored = [event for event in valid if "bleu" in event.figures]
    return max(scored, key=lambda event: event.figures["bleu"], default=None)


def render_results(run: RunFacts) -> str:
    """List everything that was scored, with every metric: the ladder."""
    rows: list[list[Cell]] = []
    for result in reversed(run.results[-RESULTS_SHOWN:]):
        for score in result.scores:
            value = Html(f'<span class="number">{score.value:.2f}</span>')
            row: list[Cell] = [describe_test_set(result), score.name, value]
            row += [score.format_interval(), result.search, Code(score.signature)]
            rows.append(row)
    head = ("scored", "score", "value", "95 % interval", "search", "signature")
    return render_stacked(head, rows, "All scores")


# ---- what it is ------------------------------------------------------------------------------------


def render_summary(run: RunFacts) -> str:
    """Say how far the run is, what went wrong, and how low its loss is."""
    notes = list(run.notes)
    if run.n_damaged:
        notes.append(f"{run.n_damaged} line(s) of metrics.jsonl cannot be read and are left out.")
    paragraphs = [f'<p class="note">{escape_html(note)}</p>' for note in notes]
    return render_rows(list_summary(run)) + "\n".join(paragraphs)


def list_summary(run: RunFacts) -> Iterator[tuple[str, Cell]]:
    # how far
    if not run.events:
        if run.settings:
            yield "updates", "none logged yet"
        return
    yield "updates", f"{run.events[-1].step:,}"
    times = run.list_figures("elapsed_s")
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
        yield "signature", Code(best.signature or "")
    losses = collect_points(run.events, "valid", "nll")
    if losses:
        step, lowest = min(losses, key=lambda point: point[1])
        loss = f"{lowest:.4f} at update {step:,}, perplexity {compute_perplexity(lowest):.2f}"
        yield "lowest dev loss", loss


def render_card(run: RunFacts) -> str:
    """Say what the model is, as in its model card."""
    config = run.config
    if config is None:
        return ""
    rows = {
        "languages": f"{config.data.src} to {config.data.tgt}",
        "training text": describe_training_text(config.data),
    }
    if run.vocab is not None:
        rows |= describe_model(config.model, run.vocab)
        rows["meant to decode with"] = describe_search(config.decoding)
        rows["weights"] = f"{run.n_weights:,}"
    rows |= describe_training(config.training, config.optimizer, config.model, config.seed)
    return render_rows(rows.items())


# ---- the recipe ------------------------------------------------------------------------------------


def render_recipe(runs: Sequence[RunFacts]) -> str:
    """List the deviations from the paper and all settings; of several runs first what differs."""

    def render_run(run: RunFacts) -> str:
        deviations = _render_deviations(run)
        if not run.settings or len(runs) > MOST_RUNS_IN_FULL:
            return deviations
        settings = flatten_settings(run.settings).items()
        rows = render_rows((key, _format_setting(value)) for key, value in settings)
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
    rows = [[key, *map(_format_setting, values)] for key, values in table.items()]
    head = ["setting", *(run.name for run in runs)]
    return Table(head, rows).to_html("Settings in which the runs differ")


def _render_deviations(run: RunFacts) -> str:
    if run.config is None:
        return ""
    found = check_conformance(run.config)
    n = len(found.deviations)
    caption = f"{n or 'no'} deviation{'s' if n > 1 else ''}"
    caption += f" from the paper's {found.model} model, {found.pair}"
    if n == 0:
        return f"<p>{escape_html(caption)}</p>"
    rows: list[list[Cell]] = []
    for row in found.deviations:
        source, value = row.measure
        rows.append([row.name, row.key or "", row.ours, f"{value} ({source})", row.why])
    head = ("rule", "setting", "this run", "reference", "why")
    return Table(head, rows).to_html(caption, is_stacked=True)


def _format_setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- the data --------------------------------------------------------------------------------------


def render_ledger(run: RunFacts) -> str:
    """Say what went in, what was kept, and what each rule dropped."""
    ledger = run.ledger
    if ledger is None:
        return ""
    src, tgt = ledger.languages
    rows = []
    samples: list[str] = []
    for corpus in ledger.corpora:
        figures = [f"{n:,}" for n in (corpus.lines, corpus.kept, *corpus.tokens)]
        rows.append([corpus.name, *figures, corpus.dropped_by_rule or "none"])
        samples += _render_samples(corpus, ledger.languages)
    head = ("corpus", "lines", "kept", f"{src} tokens", f"{tgt} tokens", "dropped")
    files = Table(
        ("file", "lines", "bytes", "sha256"),
        [[one.name, f"{one.lines:,}", f"{one.size:,}", Code(one.sha256)] for one in ledger.files],
    )
    parts = [
        Table(head, rows).to_html(label="What went in", is_stacked=True),
        *samples,
        render_details("Files and their digests", files.to_html(label="Files", is_stacked=True)),
    ]
    return "\n".join(parts)


def _render_samples(corpus: CorpusAccount, languages: tuple[str, str]) -> Iterator[str]:
    for rule, n in corpus.dropped.items():
        pairs = corpus.samples.get(rule, [])[:SAMPLES_SHOWN]
        sentences = [[render_sentence(text) for text in pair] for pair in pairs]
        title = f"{corpus.name}: {rule}, {n:,} lines, for example"
        if sentences:
            yield render_details(title, render_stacked(languages, sentences, "Dropped pairs"))


def list_length_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """Count the sentences of the training text of a single run by their length in pieces."""
    run = runs[0]
    if len(runs) > 1 or run.lengths is None or run.config is None:
        return []
    longest = max(1, *map(len, run.lengths)) - 1
    n_buckets = min(longest // LENGTH_STEP + 1, MOST_LENGTHS)
    firsts = range(0, n_buckets * LENGTH_STEP, LENGTH_STEP)
    names = [f"{first}-{first + LENGTH_STEP - 1}" for first in firsts]
    if longest >= n_buckets * LENGTH_STEP:
        names[-1] = f"{firsts[-1]}+"
    series = []
    for language, counts in zip(run.languages, run.lengths, strict=True):
        sums = [int(part.sum()) for part in np.split(counts, firsts[1:])]
        series.append(Series(0, language, list(enumerate(sums))))
    title = "Training sentences by length in pieces"
    return [Chart(title, "sentences", "pieces", tuple(series), buckets=tuple(names))]


# ---- time, memory, machine -------------------------------------------------------------------------


def render_cost(runs: Sequence[RunFacts]) -> str:
    """Say how fast each run was, and what it took."""
    rows = []
    for run in runs:
        speeds = run.list_figures("tgt_tokens_per_s")
        if speeds:
            rows.append([run.name, *_list_costs(run, median(speeds))])
    if not rows:
        return ""
    head = ["run", "updates", "time", "target tokens/s", "most memory", "operations"]
    head += ["machine", "versions"]
    note = (
        "<p>Target tokens per second is the median of the logged ones. Operations are "
        "6 for each weight and target token, as papers estimate them.</p>"
    )
    return render_stacked(head, rows, "Speed, memory and cost") + note


def _list_costs(run: RunFacts, speed: float) -> list[str]:
    n_updates = run.events[-1].step
    times = run.list_figures("elapsed_s")
    memory = run.list_figures("memory_bytes")
    operations = ""
    if run.config is not None and run.n_weights is not None:
        n_tokens = n_updates * run.config.training.tgt_tokens
        operations = f"about {FLOP_PER_WEIGHT * run.n_weights * n_tokens:.1e}"
    source = run.headline or run.ledger
    versions = source.versions if source is not None else {}
    return [
        f"{n_updates:,}",
        format_duration(times[-1]) if times else "",
        f"{speed:,.0f}",
        f"{max(memory) / 2**30:.2f} GiB" if memory else "not measured",
        operations,
        run.machine,
        ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]


def render_reproduction(run: RunFacts) -> str:
    """Give the commands that train, average and score the same again."""
    if run.config is None or not run.settings:
        return ""
    place = run.place.rstrip("/")
    checkpoint = again = f"{place}-again"
    commands = [["nmt-train", "--config", f"{place}/config.yaml", f"out={again}"]]
    if run.headline is not None and run.headline.averaged:
        commands.append(["nmt-average", again, "--last", str(len(run.headline.averaged))])
        checkpoint = f"{again}/average"
    if run.config.data.test is not None:
        commands.append(["nmt-eval", checkpoint])
    text = " && ".join(map(shlex.join, commands))
    return f'<pre tabindex="0"><code>{escape_html(text)}</code></pre>'
