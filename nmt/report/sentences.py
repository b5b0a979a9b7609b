"""The sections of a report that show sentences: the test set line by line, and the dev sentences that
training translates at each validation.
"""

from collections.abc import Iterable, Sequence

from nmt.evaluate.scored_texts import ScoredTexts
from nmt.report.curves import Chart, Series
from nmt.report.facts import RunFacts
from nmt.report.markup import (
    render_attention,
    render_details,
    render_sentence,
    render_stacked,
)
from nmt.report.translations import (
    SOURCE_LENGTHS,
    compare_words,
    find_faults,
    rank_lines,
    score_by_length,
    score_lines,
)
from nmt.system.escapes import escape_html
from nmt.system.tables import Cell, Html, Table
from nmt.train.events import SampleEvent

MOST_RUNS_SCORED = 4  # line by line, which takes a second for each
LINES_SHOWN = 8
NUMBERS_SHOWN = 15
TRANSLATIONS_SHOWN = 8  # of a dev sentence
FAULTS_TITLE = "Lines with errors that can be counted"
TAGS = {"removed": "del", "added": "ins"}


# ---- the test set ----------------------------------------------------------------------------------


def list_bleu_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """BLEU by the length of the source."""
    found = {
        i: score_by_length(run.texts)
        for i, run in enumerate(runs[:MOST_RUNS_SCORED])
        if run.texts is not None
    }
    names = [name for name in SOURCE_LENGTHS if any(name in scores for scores in found.values())]
    if not names:
        return []
    series = []
    for i, scores in found.items():
        points = [(names.index(name), bleu) for name, bleu in scores.items()]
        series.append(Series(i, "BLEU", points))
    title = "BLEU by the length of the source in words"
    return [Chart(title, "BLEU", "words", tuple(series), from_zero=True, buckets=tuple(names))]


def render_test_lines(runs: Sequence[RunFacts]) -> str:
    """Show the worst and the best lines of one system, or where two systems differ most."""
    scored = [(run.name, run.texts) for run in runs if run.texts and run.texts.translations]
    if not scored:
        return ""
    if len(runs) == 1:
        return _render_extremes(scored[0][1])
    changes = _render_changes(scored[:MOST_RUNS_SCORED])
    return "\n".join([_render_fault_table(scored), *changes])


def _render_extremes(texts: ScoredTexts) -> str:
    scores = score_lines(texts)
    ranked = rank_lines(scores)

    def render(title: str, lines: Sequence[int]) -> str:
        shown = {i: f"{scores[i]:.0f}" for i in lines[:LINES_SHOWN]}
        names = ("translation", "reference to translation")
        after = texts.translations
        table = _render_lines(texts, shown, names, after, texts.references, after)
        return f"<h3>{title}</h3>{table}"

    rows = []
    for fault, numbers in find_faults(texts).items():
        first = ", ".join(map(str, numbers[:NUMBERS_SHOWN]))
        more = ", ..." if len(numbers) > NUMBERS_SHOWN else ""
        rows.append([fault, f"{len(numbers)}", first + more])
    faults = Table(("translations that are", "lines", "their numbers"), rows)
    parts = [
        _explain_changes("the reference", "the translation"),
        render("Worst lines", ranked),
        render("Best lines", ranked[::-1]),
        f"<h3>{FAULTS_TITLE}</h3>",
        faults.to_html(label="Errors"),
    ]
    return "\n".join(parts)


def _render_lines(
    texts: ScoredTexts,
    shown: dict[int, str],
    names: tuple[str, str],
    plain: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
) -> str:
    """Write a table of these lines: number, score, source, a plain text, and the change of a text."""
    src, _, tgt = texts.pair.partition("-")
    rows: list[list[Cell]] = []
    for i, score in shown.items():
        source = texts.sources[i] if texts.sources else ""
        change = render_change(before[i], after[i])
        row: list[Cell] = [f"{i + 1}", score, render_sentence(source, src)]
        rows.append([*row, render_sentence(plain[i], tgt), render_sentence(change, tgt)])
    return render_stacked(("line", "chrF", "source", *names), rows, "Lines")


def _explain_changes(before: str, after: str) -> str:
    return (
        f"<p>Words that only {escape_html(before)} has are <del>struck out</del>, "
        f"words that only {escape_html(after)} has are <ins>underlined</ins>.</p>"
    )


def _render_fault_table(scored: Sequence[tuple[str, ScoredTexts]]) -> str:
    """Count the faults of each run; what cannot be known without sources stays empty."""
    found = [(name, find_faults(texts)) for name, texts in scored]
    kinds = max((faults for _, faults in found), key=len)
    rows = []
    for name, faults in found:
        counts = [f"{len(faults[kind])}" if kind in faults else "" for kind in kinds]
        rows.append([name, *counts])
    return Table(["run", *kinds], rows).to_html(FAULTS_TITLE)


def _render_changes(scored: Sequence[tuple[str, ScoredTexts]]) -> Iterable[str]:
    """Compare each run with the first one, if they translated the same lines."""
    (first, texts), *others = scored
    before = score_lines(texts)
    for other, other_texts in others:
        if other_texts.references != texts.references:
            continue
        after = score_lines(other_texts)
        gains = [b - a for a, b in zip(before, after, strict=True)]
        ranked = rank_lines(gains)
        parts = [_explain_changes(first, other)]
        for better, lines in ((other, ranked[::-1]), (first, ranked)):
            shown = {i: f"{gains[i]:+.0f}" for i in lines[:LINES_SHOWN]}
            names = ("reference", "from one to the other")
            old, new = texts.translations, other_texts.translations
            table = _render_lines(texts, shown, names, texts.references, old, new)
            parts += [f"<h3>Better with {escape_html(better)}</h3>", table]
        title = f"Most changed lines from {first} to {other}"
        yield render_details(title, "\n".join(parts), is_open=len(scored) == 2)


def render_change(old: str, new: str) -> Html:
    """Show both texts in one, the words of one alone struck out or underlined."""
    parts = []
    for change, words in compare_words(old, new):
        text = escape_html(words)
        tag = TAGS.get(change)
        parts.append(f"<{tag}>{text}</{tag}>" if tag else text)
    return Html(" ".join(parts))


# ---- dev sentences over time -----------------------------------------------------------------------


def render_dev_samples(run: RunFacts) -> str:
    """Show how the translations of a few dev sentences changed from validation to validation."""
    by_line: dict[int, list[SampleEvent]] = {}
    for event in run.events:
        if isinstance(event, SampleEvent) and event.line:
            by_line.setdefault(event.line, []).append(event)
    return "\n".join(_render_history(run, samples) for samples in by_line.values())


def _render_history(run: RunFacts, samples: Sequence[SampleEvent]) -> str:
    src, tgt = run.languages
    last = samples[-1]
    changed = [samples[0]]
    for sample in samples[1:]:
        if sample.translation != changed[-1].translation:
            changed.append(sample)
    rows: list[list[Cell]] = []
    previous = ""
    for sample in spread(changed, TRANSLATIONS_SHOWN):
        text = sample.translation
        change = render_change(previous, text) if previous else text
        rows.append([f"{sample.step:,}", render_sentence(change, tgt)])
        previous = text
    source = render_sentence(last.source, src)
    reference = render_sentence(last.reference, tgt)
    head = f'<p class="pair"><b>Source</b> {source.text}<br/><b>Reference</b> {reference.text}</p>'
    table = Table(("update", "translation"), rows)
    caption = f"Translations of dev line {last.line}"
    return f'<div class="sample">{head}{table.to_html(caption)}</div>'


def render_attention_lines(runs: Sequence[RunFacts]) -> str:
    """List the sentences whose attention is known."""
    parts = []
    for run in runs:
        src, tgt = run.languages
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
