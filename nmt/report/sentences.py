"""The sections of a report that show sentences: the test set line by line, and the dev sentences that
training translates at each validation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nmt.evaluate.scored_texts import ScoredTexts
from nmt.report.curves import Chart, Series
from nmt.report.facts import RunFacts
from nmt.report.markup import (
    Content,
    Html,
    render_attention,
    render_details,
    render_sentence,
    render_table,
)
from nmt.report.translations import (
    SOURCE_LENGTHS,
    Line,
    compare_words,
    find_faults,
    rank_changes,
    rank_lines,
    score_by_length,
    score_lines,
)
from nmt.system.escapes import escape_html
from nmt.train.events import SampleEvent

MOST_RUNS_SCORED = 4  # line by line, which takes a second for each
LINES_SHOWN = 8
NUMBERS_SHOWN = 15
TRANSLATIONS_SHOWN = 8  # of a dev sentence
DIFF_NOTE = (
    "<p>Words that only the reference has are <del>struck out</del>, "
    "words that only the translation has are <ins>underlined</ins>.</p>"
)


# ---- the test set ----------------------------------------------------------------------------------


def make_bleu_chart(runs: Sequence[RunFacts]) -> Chart | None:
    """BLEU by the length of the source."""
    found = {}
    for i, run in enumerate(runs[:MOST_RUNS_SCORED]):
        if run.texts is not None and run.texts.sources:
            found[i] = {bucket.name: bucket for bucket in score_by_length(run.texts)}
    used = {name for buckets in found.values() for name in buckets}
    names = [name for name in _name_buckets() if name in used]
    if not names:
        return None
    series = []
    for i, buckets in found.items():
        points = [(names.index(name), bucket.bleu) for name, bucket in buckets.items()]
        series.append(Series(i, "BLEU", points))
    title = "BLEU by the length of the source in words"
    return Chart(title, "words", "BLEU", tuple(series), from_zero=True, buckets=tuple(names))


def _name_buckets() -> list[str]:
    return [f"{first}+" if last is None else f"{first}-{last}" for first, last in SOURCE_LENGTHS]


def render_test_lines(runs: Sequence[RunFacts]) -> str:
    """Show the worst and the best lines of one system, or where two systems differ most."""
    scored = [run for run in runs if run.texts is not None and run.texts.translations]
    if not scored:
        return ""
    if len(runs) == 1:
        assert runs[0].texts is not None
        return _render_extremes(runs[0].texts)
    return "\n".join([_render_fault_table(scored), *_render_changes(scored[:MOST_RUNS_SCORED])])


def _render_extremes(texts: ScoredTexts) -> str:
    ranked = rank_lines(score_lines(texts))
    table = LineTable(
        texts,
        ".0f",
        ("translation", texts.translations),
        ("reference to translation", texts.references, texts.translations),
    )
    parts = [
        DIFF_NOTE,
        f"<h3>Worst lines</h3>{table.render_lines(ranked[:LINES_SHOWN])}",
        f"<h3>Best lines</h3>{table.render_lines(ranked[::-1][:LINES_SHOWN])}",
        "<h3>Lines with errors that can be counted</h3>",
        _render_faults(texts),
    ]
    return "\n".join(parts)


@dataclass(frozen=True)
class LineTable:
    """A table of lines: number, score, source, a text, and the change between two texts."""

    texts: ScoredTexts
    score_format: str
    text: tuple[str, Sequence[str]]  # its name, and that of each line
    change: tuple[str, Sequence[str], Sequence[str]]  # its name, and each line before and after

    def render_lines(self, lines: Sequence[Line]) -> str:
        src, tgt = split_pair(self.texts.pair)
        text_name, texts = self.text
        change_name, before, after = self.change
        rows: list[list[Content]] = []
        for line in lines:
            i = line.number - 1
            source = self.texts.sources[i] if self.texts.sources else ""
            row: list[Content] = [
                f"{line.number}",
                format(line.score, self.score_format),
                render_sentence(source, src),
                render_sentence(texts[i], tgt),
                render_sentence(render_change(before[i], after[i]), tgt),
            ]
            rows.append(row)
        head = ("line", "chrF", "source", text_name, change_name)
        return render_table(head, rows, label="Lines", is_stacked=True)


def _render_faults(texts: ScoredTexts) -> str:
    rows: list[list[Content]] = []
    for fault in find_faults(texts):
        shown = ", ".join(f"{n}" for n in fault.numbers[:NUMBERS_SHOWN])
        if len(fault.numbers) > NUMBERS_SHOWN:
            shown += ", ..."
        rows.append([fault.name, f"{len(fault.numbers)}", shown])
    return render_table(("translations that are", "lines", "their numbers"), rows, label="Errors")


def _render_fault_table(runs: Sequence[RunFacts]) -> str:
    rows: list[list[Content]] = []
    head: list[Content] = ["run"]
    for run in runs:
        assert run.texts is not None
        faults = find_faults(run.texts)
        head = ["run", *(fault.name for fault in faults)]
        rows.append([run.name, *(f"{len(fault.numbers)}" for fault in faults)])
    return render_table(head, rows, "Lines with errors that can be counted")


def _render_changes(runs: Sequence[RunFacts]) -> list[str]:
    """Compare each run with the first one, if they translated the same lines."""
    first, *others = runs
    assert first.texts is not None
    before = score_lines(first.texts)
    parts = []
    for other in others:
        assert other.texts is not None
        if other.texts.references != first.texts.references:
            continue
        changes = rank_changes(before, score_lines(other.texts))
        table = LineTable(
            first.texts,
            "+.0f",
            ("reference", first.texts.references),
            ("from one to the other", first.texts.translations, other.texts.translations),
        )
        first_name, other_name = escape_html(first.name), escape_html(other.name)
        tables = [
            f"<p>Words that only {first_name} has are <del>struck out</del>, words that only "
            f"{other_name} has are <ins>underlined</ins>.</p>",
            f"<h3>Better with {other_name}</h3>",
            table.render_lines(changes[::-1][:LINES_SHOWN]),
            f"<h3>Better with {first_name}</h3>",
            table.render_lines(changes[:LINES_SHOWN]),
        ]
        title = f"Most changed lines from {first.name} to {other.name}"
        parts.append(render_details(title, "\n".join(tables), is_open=len(runs) == 2))
    return parts


def split_pair(pair: str) -> tuple[str, str]:
    src, _, tgt = pair.partition("-")
    return src, tgt


def render_change(old: str, new: str) -> Html:
    """Show both texts in one, the words of one alone struck out or underlined."""
    tags = {"removed": "del", "added": "ins"}
    parts = []
    for change, words in compare_words(old, new):
        text = escape_html(words)
        tag = tags.get(change)
        parts.append(f"<{tag}>{text}</{tag}>" if tag else text)
    return Html(" ".join(parts))


# ---- dev sentences over time -----------------------------------------------------------------------


def render_dev_samples(runs: Sequence[RunFacts]) -> str:
    """Show how the translations of a few dev sentences changed from validation to validation."""
    parts = []
    for run in runs:
        by_line: dict[int, list[SampleEvent]] = {}
        for event in run.events:
            if isinstance(event, SampleEvent) and event.line:
                by_line.setdefault(event.line, []).append(event)
        blocks = [_render_history(run, samples) for samples in by_line.values()]
        if blocks and len(runs) > 1:
            parts.append(render_details(run.name, "\n".join(blocks)))
        else:
            parts += blocks
    return "\n".join(parts)


def _render_history(run: RunFacts, samples: Sequence[SampleEvent]) -> str:
    src, tgt = ("", "") if run.config is None else (run.config.data.src, run.config.data.tgt)
    last = samples[-1]
    changed = [samples[0]]
    for sample in samples[1:]:
        if sample.translation != changed[-1].translation:
            changed.append(sample)
    shown = spread(changed, TRANSLATIONS_SHOWN)
    rows: list[list[Content]] = []
    previous = ""
    for sample in shown:
        text = sample.translation
        change = render_change(previous, text) if previous else text
        rows.append([f"{sample.step:,}", render_sentence(change, tgt)])
        previous = text
    source = render_sentence(last.source, src)
    reference = render_sentence(last.reference, tgt)
    head = f'<p class="pair"><b>Source</b> {source.text}<br/><b>Reference</b> {reference.text}</p>'
    table = render_table(("update", "translation"), rows, f"Translations of dev line {last.line}")
    return f'<div class="sample">{head}{table}</div>'


def render_attention_lines(runs: Sequence[RunFacts]) -> str:
    """List the sentences whose attention is known."""
    parts = []
    for run in runs:
        src, tgt = ("", "") if run.config is None else (run.config.data.src, run.config.data.tgt)
        for line in run.attention:
            name = line.name if len(runs) == 1 else f"{run.name}, {line.name}"
            source = render_sentence(line.source, src)
            translation = render_sentence(line.translation, tgt)
            summary = Html(f"{escape_html(name)}: {source.text} → {translation.text}")
            parts.append(render_attention(summary, line.values))
    return "\n".join(parts)


def spread(samples: Sequence[SampleEvent], most: int) -> list[SampleEvent]:
    """Choose at most `most` of them, evenly, with the first and the last."""
    if len(samples) <= most:
        return list(samples)
    return [samples[i * (len(samples) - 1) // (most - 1)] for i in range(most)]
