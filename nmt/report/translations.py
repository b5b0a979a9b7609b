"""Looks at translations line by line: which are best and worst, which two systems translate most
differently, which words differ, and which lines are wrong in a way that can be counted.

Lines are compared by chrF, because a sentence's BLEU is 0 as soon as no four words in a row are
right. Sentences have no other score here; what counts is the score of the whole test set.
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Literal

from nmt.evaluate.scored_texts import ScoredTexts
from nmt.score.score import score_bleu

SOURCE_LENGTHS = ("1-10", "11-20", "21-30", "31-40", "41-50", "51+")  # in words
FEWEST_LINES = 10  # a BLEU of fewer lines says nothing
LONGEST_DIFF = 400  # words; comparing takes the square of that
LONG_RATIO = 2.0  # a translation of more than this many times the reference's characters
SHORT_TEXT = 10  # characters, of which ratios say nothing

Change = Literal["same", "removed", "added"]


def score_lines(texts: ScoredTexts) -> list[float]:
    """Return the chrF of each line."""
    from sacrebleu.metrics.chrf import CHRF

    counter = CHRF()
    pairs = zip(texts.translations, texts.references, strict=True)
    return [float(counter.sentence_score(text, [reference]).score) for text, reference in pairs]


def rank_lines(scores: Sequence[float]) -> list[int]:
    """Return the places of the lines from the worst to the best; of equals the first ones first."""
    return sorted(range(len(scores)), key=scores.__getitem__)


def score_by_length(texts: ScoredTexts) -> dict[str, float]:
    """Return BLEU by the length of the source in words, where there are enough lines."""
    lines: dict[str, list[int]] = {name: [] for name in SOURCE_LENGTHS}
    for i, source in enumerate(texts.sources):
        n_words = len(source.split())
        if n_words > 0:
            span = min((n_words - 1) // 10, len(SOURCE_LENGTHS) - 1)
            lines[SOURCE_LENGTHS[span]].append(i)
    scores = {}
    for name, chosen in lines.items():
        if len(chosen) >= FEWEST_LINES:
            translations = [texts.translations[i] for i in chosen]
            references = [texts.references[i] for i in chosen]
            scores[name] = score_bleu(translations, references).value
    return scores


def find_faults(texts: ScoredTexts) -> dict[str, list[int]]:
    """Return the numbers, from 1, of the lines that are copied, empty, or of a wrong length; a kind
    without lines is listed too.
    """
    empty: list[int] = []
    copied: list[int] = []
    short: list[int] = []
    long: list[int] = []
    lines = zip(texts.references, texts.translations, strict=True)
    for number, (reference, text) in enumerate(lines, 1):
        source = texts.sources[number - 1] if texts.sources else None
        n, expected = len(text.strip()), len(reference.strip())
        if n == 0 and expected > 0:
            empty.append(number)
        elif text == source and text != reference:
            copied.append(number)
        elif expected >= SHORT_TEXT and n * LONG_RATIO < expected:
            short.append(number)
        elif n >= SHORT_TEXT and n > expected * LONG_RATIO:
            long.append(number)
    return {
        "empty": empty,
        **({"copied from the source": copied} if texts.sources else {}),
        "shorter than half of the reference": short,
        "longer than twice the reference": long,
    }


def compare_words(old: str, new: str) -> Iterator[tuple[Change, str]]:
    """Yield both texts as one sequence of runs of words: in both, only in `old`, only in `new`."""
    before, after = old.split(), new.split()
    if max(len(before), len(after)) > LONGEST_DIFF:
        yield "removed", old
        yield "added", new
        return
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        removed, added = " ".join(before[i:i_end]), " ".join(after[j:j_end])
        if tag == "equal":
            yield "same", added
            continue
        if removed:
            yield "removed", removed
        if added:
            yield "added", added
