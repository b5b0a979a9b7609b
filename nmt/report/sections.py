"""What a report says, section by section, as HTML: each is left out where its data are not there.

A section of one run is open; of several, what cannot be one table is folded up run by run.
Charts, which need JavaScript, are the page's (page.py).
"""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from nmt.config import tabulate_differences
from nmt.corpus.ledger import CorpusAccount, Ledger
from nmt.evaluate.description import describe_model, describe_training, describe_training_text
from nmt.evaluate.results import Result
from nmt.model.size import count_weights
from nmt.paper import check_conformance
from nmt.report.curves import Chart, Series, collect_points
from nmt.report.facts import RunFacts
from nmt.report.markup import (
    Content,
    Html,
    render_code,
    render_details,
    render_rows,
    render_sentence,
    render_table,
)
from nmt.system.escapes import escape_html
from nmt.system.progress import format_duration
from nmt.train.events import ValidEvent, WarningEvent

MOST_RUNS_IN_FULL = 8  # of more, only the settings that differ are listed
SAMPLES_SHOWN = 3  # dropped pairs of each rule
RESULTS_SHOWN = 20
NAMES_AND_PLACES = ("name", "out", "device", "data.root", "data.store", "data.workers")
FLOP_PER_WEIGHT = 6  # of training, for each token: two forward, four backward


# ---- scores ---------------------------------------------------------------------------------------


def render_headline(runs: Sequence[RunFacts]) -> str:
    """Say how good the model is, and by which measure."""
    if len(runs) == 1:
        return _render_one_headline(runs[0])
    rows: list[list[Content]] = []
    for i, run in enumerate(runs):
        name = Html(
            f'<span class="run"><span class="key c{i % 8}"></span>{escape_html(run.name)}</span>'
        )
        if run.headline is None or not run.headline.scores:
            rows.append([name, *_describe_dev_score(run)])
            continue
        score = run.headline.scores[0]
        value = Html(f"<strong>{score.value:.2f}</strong>")
        place = describe_test_set(run.headline)
        rows.append(
            [name, place, score.name, value, score.format_interval(), render_code(score.signature)]
        )
    head = ("run", "scored on", "score", "value", "95 % interval", "signature")
    note = "<p>Scores of different signatures are different scales: compare only equal ones.</p>"
    return render_table(head, rows, label="Scores of the runs", is_stacked=True) + note


def _describe_dev_score(run: RunFacts) -> list[Content]:
    best = find_best_validation(run)
    if best is None:
        return ["not scored yet", "", "", "", ""]
    step, bleu, signature = best
    value = Html(f"<strong>{bleu:.2f}</strong>")
    return [f"the dev set, at update {step:,}", "BLEU", value, "", render_code(signature)]


def _render_one_headline(run: RunFacts) -> str:
    result, best = run.headline, find_best_validation(run)
    if result is not None and result.scores:
        score = result.scores[0]
        name, value, signature = score.name, score.value, score.signature
        interval, place = score.format_interval(), describe_test_set(result)
    elif best is not None:
        step, value, signature = best
        name, interval, place = "BLEU", "", f"the dev set, at update {step:,}"
    else:
        return ""
    parts = [
        '<div class="headline">',
        f'<p class="score"><span class="value">{value:.2f}</span> {escape_html(name)}</p>',
    ]
    if interval:
        parts.append(f"<p>95 % interval {escape_html(interval)}</p>")
    parts.append(f"<p>{escape_html(place)}</p>")
    parts.append(f'<p class="signature">{render_code(signature).text}</p>')
    return "\n".join([*parts, "</div>"])


def describe_test_set(result: Result) -> str:
    test_set = result.test_set
    return f"{test_set.name}, {result.pair}, {test_set.lines:,} lines, by {result.checkpoint}"


def find_best_validation(run: RunFacts) -> tuple[int, float, str] | None:
    """Return the update, the BLEU and the signature of the best validation."""
    best = None
    for event in run.events:
        if not isinstance(event, ValidEvent) or event.bleu is None:
            continue
        if best is None or event.bleu > best[1]:
            best = (event.step, event.bleu, event.signature or "")
    return best


def list_times(run: RunFacts) -> list[float]:
    """Return the seconds of training at each event that counts them."""
    key = "elapsed_s"
    return [event.figures[key] for event in run.events if key in event.figures]


def render_results(runs: Sequence[RunFacts]) -> str:
    """List all that was scored, in every way in which it was counted: the ladder."""

    def render_run(run: RunFacts) -> str:
        rows: list[list[Content]] = []
        for result in reversed(run.results[-RESULTS_SHOWN:]):
            search = [result.engine]
            for key in ("beam", "penalty", "length_penalty", "sample"):
                if key in result.decoding:
                    search.append(f"{key} {result.decoding[key]}")
            for score in result.scores:
                rows.append(
                    [
                        describe_test_set(result),
                        score.name,
                        Html(f'<span class="number">{score.value:.2f}</span>'),
                        score.format_interval(),
                        ", ".join(search),
                        render_code(score.signature),
                    ]
                )
        head = ("scored", "score", "value", "95 % interval", "search", "signature")
        return render_table(head, rows, label="All scores", is_stacked=True) if rows else ""

    return _render_each(runs, render_run)


# ---- what it is ------------------------------------------------------------------------------------


def render_summary(runs: Sequence[RunFacts]) -> str:
    """Say how far each run is, what went wrong, and how low its loss is."""
    return _render_each(runs, _render_run_summary)


def _render_run_summary(run: RunFacts) -> str:
    rows = summarize(run)
    return (render_rows(rows) if rows else "") + _render_notes(run)


def summarize(run: RunFacts) -> list[tuple[Content, Content]]:
    rows: list[tuple[Content, Content]] = []
    if not run.events:
        return [("updates", "none logged yet")] if run.settings else []

    # how far
    rows.append(("updates", f"{run.events[-1].step:,}"))
    times = list_times(run)
    if times:
        rows.append(("time", format_duration(times[-1])))

    # what went wrong
    for event in run.events:
        if isinstance(event, WarningEvent):
            rows.append(("warning", event.message))

    # how good
    best = find_best_validation(run)
    if best is not None:
        step, bleu, signature = best
        rows.append(("best dev BLEU", f"{bleu:.2f} at update {step:,}"))
        rows.append(("signature", render_code(signature)))
    losses = collect_points(run.events, "valid", "nll")
    if losses:
        step, lowest = min(losses, key=lambda point: point[1])
        perplexity = math.exp(min(lowest, 50))  # a diverged loss would overflow
        loss = f"{lowest:.4f} at update {step:,}, perplexity {perplexity:.2f}"
        rows.append(("lowest dev loss", loss))
    return rows


def _render_notes(run: RunFacts) -> str:
    notes = list(run.notes)
    if run.n_damaged:
        notes.append(f"{run.n_damaged} line(s) of metrics.jsonl cannot be read and are left out.")
    return "\n".join(f'<p class="note">{escape_html(note)}</p>' for note in notes)


def render_card(runs: Sequence[RunFacts]) -> str:
    """Say what the model is, with the words of its card."""

    def render_run(run: RunFacts) -> str:
        config, vocab = run.config, run.vocab
        if config is None:
            return ""
        rows: list[tuple[Content, Content]] = [
            ("languages", f"{config.data.src} to {config.data.tgt}"),
            ("training text", describe_training_text(config)),
        ]
        if vocab is not None:
            n_weights = count_weights(config.model, vocab.sizes)
            rows += list(describe_model(config, vocab).items())
            rows.append(("weights", f"{n_weights:,}"))
        rows += list(describe_training(config).items())
        return render_rows(rows)

    return _render_each(runs, render_run)


def describe_size(run: RunFacts) -> list[str]:
    """Say how large the model is, and how far its training."""
    words = []
    if run.config is not None and run.vocab is not None:
        words.append(f"{count_weights(run.config.model, run.vocab.sizes):,} weights")
    if run.events:
        words.append(f"{run.events[-1].step:,} updates")
    return words


# ---- the recipe ------------------------------------------------------------------------------------


def render_recipe(runs: Sequence[RunFacts]) -> str:
    """List the deviations from the paper and all settings; of several runs first what differs."""
    parts = []
    configs = [run.config for run in runs if run.config is not None]
    if len(configs) > 1 and len(configs) == len(runs):
        table = tabulate_differences(configs, NAMES_AND_PLACES)
        rows = [[key, *map(_format_setting, values)] for key, values in table.items()]
        if rows:
            names = [run.name for run in runs]
            parts.append(
                render_table(["setting", *names], rows, "Settings in which the runs differ")
            )
        else:
            parts.append("<p>All settings are equal.</p>")

    def render_run(run: RunFacts) -> str:
        deviations = _render_deviations(run)
        if not run.settings or len(runs) > MOST_RUNS_IN_FULL:
            return deviations
        rows = [(name, value) for name, value in flatten_settings(run.settings)]
        return deviations + render_details("All settings", render_rows(rows))

    return "\n".join([*parts, _render_each(runs, render_run)])


def _render_deviations(run: RunFacts) -> str:
    if run.config is None:
        return ""
    found = check_conformance(run.config)
    n = len(found.deviations)
    head = "no deviation" if n == 0 else "1 deviation" if n == 1 else f"{n} deviations"
    head += f" from the paper's {found.model} model, {found.pair}"
    rows: list[list[Content]] = []
    for row in found.deviations:
        source, value = row.measure
        rows.append([row.name, row.key or "", row.ours, f"{value} ({source})", row.why])
    if not rows:
        return f"<p>{escape_html(head)}</p>"
    names = ("rule", "setting", "this run", "reference", "why")
    return render_table(names, rows, head, is_stacked=True)


def _format_setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def flatten_settings(value: Any, key: str = "") -> list[tuple[str, str]]:
    """List the settings as rows (section.key, value)."""
    rows: list[tuple[str, str]] = []
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            rows += flatten_settings(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            rows += flatten_settings(inner, f"{key}[{i}]")
    else:
        rows.append((key, _format_setting(value)))
    return rows


# ---- the data --------------------------------------------------------------------------------------


def render_data_ledger(runs: Sequence[RunFacts]) -> str:
    """Say what went in, what was kept, and what each rule dropped."""
    return _render_each(runs, lambda run: _render_ledger(run.ledger) if run.ledger else "")


def _render_ledger(ledger: Ledger) -> str:
    src, tgt = ledger.languages
    rows: list[list[Content]] = []
    for corpus in ledger.corpora:
        dropped = ", ".join(f"{n:,} {rule}" for rule, n in corpus.dropped.items())
        times = f" x {corpus.repeat}" if corpus.repeat > 1 else ""
        tokens = [f"{n:,}" for n in corpus.tokens]
        kept = f"{corpus.kept:,}{times}"
        rows.append([corpus.name, f"{corpus.lines:,}", kept, *tokens, dropped or "none"])
    head = ("corpus", "lines", "kept", f"{src} tokens", f"{tgt} tokens", "dropped")
    parts = [render_table(head, rows, label="What went in", is_stacked=True)]
    for corpus in ledger.corpora:
        parts += _render_dropped(corpus, (src, tgt))
    files: list[list[Content]] = [
        [file.name, f"{file.lines:,}", f"{file.size:,}", render_code(file.sha256)]
        for file in ledger.files
    ]
    names = ("file", "lines", "bytes", "sha256")
    table = render_table(names, files, label="Files", is_stacked=True)
    parts.append(render_details("Files and their digests", table))
    return "\n".join(parts)


def _render_dropped(corpus: CorpusAccount, languages: tuple[str, str]) -> list[str]:
    parts = []
    for rule, n in corpus.dropped.items():
        samples: list[list[Content]] = []
        for pair in corpus.samples.get(rule, [])[:SAMPLES_SHOWN]:
            samples.append([render_sentence(text) for text in pair])
        if samples:
            table = render_table(languages, samples, label="Dropped pairs", is_stacked=True)
            parts.append(render_details(f"{corpus.name}: {rule}, {n:,} lines, for example", table))
    return parts


def make_length_chart(run: RunFacts) -> Chart | None:
    """Count the sentences of the training text by their length in pieces."""
    if run.lengths is None or run.config is None:
        return None
    width = 10
    longest = max((histogram[-1][0] for histogram in run.lengths if histogram), default=0)
    n_buckets = min(longest // width + 1, 12)
    names = [f"{i * width}-{i * width + width - 1}" for i in range(n_buckets)]
    if longest >= n_buckets * width:
        names[-1] = f"{(n_buckets - 1) * width}+"
    series = []
    for language, histogram in zip(
        (run.config.data.src, run.config.data.tgt), run.lengths, strict=True
    ):
        counts = [0] * n_buckets
        for length, n in histogram:
            counts[min(length // width, n_buckets - 1)] += n
        series.append(Series(0, language, list(enumerate(counts))))
    title = "Training sentences by length in pieces"
    return Chart(title, "pieces", "sentences", tuple(series), buckets=tuple(names))


# ---- time, memory, machine -------------------------------------------------------------------------


def render_cost(runs: Sequence[RunFacts]) -> str:
    """Say how fast each run was, and what it took."""
    rows: list[list[Content]] = []
    for run in runs:
        speeds = [n for _, n in collect_points(run.events, "train", "tgt_tokens_per_s")]
        if not speeds:
            continue
        times = list_times(run)
        memory = [n for _, n in collect_points(run.events, "train", "memory_bytes")]
        rows.append(
            [
                run.name,
                f"{run.events[-1].step:,}",
                format_duration(times[-1]) if times else "",
                f"{median(speeds):,.0f}",
                f"{max(memory) / 2**30:.2f} GiB" if memory else "not measured",
                _estimate_operations(run),
                run.machine,
                _describe_versions(run),
            ]
        )
    head = (
        "run",
        "updates",
        "time",
        "target tokens/s",
        "most memory",
        "operations",
        "machine",
        "versions",
    )
    if not rows:
        return ""
    note = (
        "<p>Target tokens per second is the median of the logged ones. Operations are "
        "6 for each weight and target token, as papers estimate them.</p>"
    )
    return render_table(head, rows, label="Speed, memory and cost", is_stacked=True) + note


def _estimate_operations(run: RunFacts) -> str:
    if run.config is None or run.vocab is None:
        return ""
    n_tokens = run.events[-1].step * run.config.training.tgt_tokens
    n_weights = count_weights(run.config.model, run.vocab.sizes)
    return f"about {FLOP_PER_WEIGHT * n_weights * n_tokens:.1e}"


def _describe_versions(run: RunFacts) -> str:
    if run.headline is not None:
        versions = run.headline.versions
    elif run.ledger is not None:
        versions = run.ledger.versions
    else:
        return ""
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def render_reproduction(runs: Sequence[RunFacts]) -> str:
    """Give the commands that train, average and score the same again."""

    def render_run(run: RunFacts) -> str:
        if run.config is None or not run.settings:
            return ""
        again = f"{run.place.rstrip('/')}-again"
        config = f"{run.place.rstrip('/')}/config.yaml"
        lines = [shlex.join(["nmt-train", "--config", config, f"out={again}"])]
        checkpoint = again
        if run.headline is not None and run.headline.averaged:
            n = len(run.headline.averaged)
            lines.append(shlex.join(["nmt-average", again, "--last", str(n)]))
            checkpoint = f"{again}/average"
        if run.config.data.test is not None:
            lines.append(shlex.join(["nmt-eval", checkpoint]))
        text = " && ".join(lines)
        return f'<pre tabindex="0"><code>{escape_html(text)}</code></pre>'

    return _render_each(runs, render_run)


# ---- several runs ----------------------------------------------------------------------------------


def _render_each(runs: Sequence[RunFacts], render_run: Callable[[RunFacts], str]) -> str:
    """Render one run as it is, several folded up under their names."""
    if len(runs) == 1:
        return render_run(runs[0])
    parts = []
    for run in runs:
        content = render_run(run)
        if content:
            parts.append(render_details(run.name, content))
    return "\n".join(parts)
