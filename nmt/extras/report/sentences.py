"""The sections of a report that show sentences: the worst and the best lines of the test set, and the dev
sentences that training translates at each validation.

Lines are ranked by chrF, because a sentence's BLEU is 0 as soon as no four words in a row are right.
What counts is the score of the whole test set.
"""

from collections.abc import Sequence

from nmt.evaluate.scored_texts import ScoredTexts
from nmt.extras.report.facts import RunFacts
from nmt.extras.report.markup import render_sentence, render_stacked
from nmt.system.tables import Cell, Rows, Table
from nmt.train.events import SampleEvent

LINES_SHOWN = 8
TRANSLATIONS_SHOWN = 8  # of a dev sentence


# ---- the test set ----------------------------------------------------------------------------------


def render_test_lines(run: RunFacts) -> str:
    """Show the worst and the best lines of the headline."""
    if run.texts is None or not run.texts.translations:
        return ""
    scores = score_lines(run.texts)
    ranked = rank_lines(scores)
    worst = _render_lines(run.texts, scores, ranked[:LINES_SHOWN])
    best = _render_lines(run.texts, scores, ranked[::-1][:LINES_SHOWN])
    return f"<h3>Worst lines</h3>{worst}<h3>Best lines</h3>{best}"


def score_lines(texts: ScoredTexts) -> list[float]:
    """Return the chrF of each line."""
    from sacrebleu.metrics.chrf import CHRF

    counter = CHRF()
    pairs = zip(texts.translations, texts.references, strict=True)
    return [float(counter.sentence_score(text, [reference]).score) for text, reference in pairs]


def rank_lines(scores: Sequence[float]) -> list[int]:
    """Return the numbers of the lines, from 0, from the worst to the best; of equals the first ones
    first.
    """
    return sorted(range(len(scores)), key=scores.__getitem__)


def _render_lines(texts: ScoredTexts, scores: Sequence[float], lines: Sequence[int]) -> str:
    src, _, tgt = texts.pair.partition("-")
    rows: Rows = []
    for i in lines:
        source = texts.sources[i] if texts.sources else ""
        row: list[Cell] = [f"{i + 1}", f"{scores[i]:.0f}", render_sentence(source, src)]
        row += [render_sentence(texts.references[i], tgt)]
        row += [render_sentence(texts.translations[i], tgt)]
        rows.append(row)
    return render_stacked(("line", "chrF", "source", "reference", "translation"), rows, "Lines")


# ---- dev sentences over time -----------------------------------------------------------------------


def render_dev_samples(run: RunFacts) -> str:
    """Show the translations of a few dev sentences from validation to validation."""
    by_line: dict[int, list[SampleEvent]] = {}
    for event in run.events:
        if isinstance(event, SampleEvent) and event.line:
            by_line.setdefault(event.line, []).append(event)
    return "\n".join(_render_history(run, samples) for samples in by_line.values())


def _render_history(run: RunFacts, samples: Sequence[SampleEvent]) -> str:
    src, tgt = run.languages
    last = samples[-1]
    different = [samples[0]]
    for sample in samples[1:]:
        if sample.translation != different[-1].translation:
            different.append(sample)
    rows: Rows = [
        [f"{sample.step:,}", render_sentence(sample.translation, tgt)]
        for sample in spread(different, TRANSLATIONS_SHOWN)
    ]
    source = render_sentence(last.source, src)
    reference = render_sentence(last.reference, tgt)
    head = f'<p class="pair"><b>Source</b> {source.text}<br/><b>Reference</b> {reference.text}</p>'
    table = Table(("update", "translation"), rows)
    caption = f"Translations of dev line {last.line}"
    return f'<div class="sample">{head}{table.to_html(caption)}</div>'


def spread(samples: Sequence[SampleEvent], most: int) -> list[SampleEvent]:
    """Choose at most `most` of them, evenly, with the first and the last."""
    if len(samples) <= most:
        return list(samples)
    return [samples[i * (len(samples) - 1) // (most - 1)] for i in range(most)]
