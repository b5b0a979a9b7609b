"""Looks at translations line by line: which are best and worst, which two systems translate most
differently, which words differ, and which lines are wrong in a way that can be counted.

Lines are compared by chrF, because a sentence's BLEU is 0 as soon as no four words in a row are
right. Sentences have no other score here; what counts is the score of the whole test set.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nmt.evaluate.scored_texts import ScoredTexts
from nmt.score.score import score_bleu

SOURCE_LENGTHS = ((1, 10), (11, 20), (21, 30), (31, 40), (41, 50), (51, None))  # in words
FEWEST_LINES = 10  # a BLEU of fewer lines says nothing
LONGEST_DIFF = 400  # words; comparing takes the square of that
LONG_RATIO = 2.0  # a translation of more than this many times the reference's characters
SHORT_TEXT = 10  # characters, of which ratios say nothing

Change = Literal["same", "removed", "added"]


@dataclass(frozen=True)
class Line:
    """A line of a test set with its score, or with the difference of two scores."""

    number: int  # from 1
    score: float


@dataclass(frozen=True)
class LengthBucket:
    name: str
    n_lines: int
    bleu: float


@dataclass(frozen=True)
class Fault:
    name: str
    numbers: list[int]  # of its lines, from 1


def score_lines(texts: ScoredTexts) -> list[float]:
    """Return the chrF of each line."""
    from sacrebleu.metrics.chrf import CHRF

    counter = CHRF()
    pairs = zip(texts.translations, texts.references, strict=True)
    return [float(counter.sentence_score(text, [reference]).score) for text, reference in pairs]


def rank_lines(scores: Sequence[float]) -> list[Line]:
    """Return the lines from the worst to the best; of equals the first ones first."""
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    return [Line(i + 1, scores[i]) for i in order]


def rank_changes(a: Sequence[float], b: Sequence[float]) -> list[Line]:
    """Return the lines from the one that lost most from `a` to `b` to the one that gained most."""
    return rank_lines([after - before for before, after in zip(a, b, strict=True)])


def score_by_length(texts: ScoredTexts) -> list[LengthBucket]:
    """Return BLEU by the length of the source in words, where there are enough lines."""
    lengths = [len(source.split()) for source in texts.sources]
    buckets = []
    for first, last in SOURCE_LENGTHS:
        chosen = [i for i, n in enumerate(lengths) if n >= first and (last is None or n <= last)]
        if len(chosen) < FEWEST_LINES:
            continue
        score = score_bleu(
            [texts.translations[i] for i in chosen], [texts.references[i] for i in chosen]
        )
        name = f"{first}+" if last is None else f"{first}-{last}"
        buckets.append(LengthBucket(name, len(chosen), score.value))
    return buckets


def find_faults(texts: ScoredTexts) -> list[Fault]:
    """Return the lines that are copied, empty, or of a wrong length; a kind without lines too."""
    copied, empty, short, long = [], [], [], []
    for i, text in enumerate(texts.translations):
        reference = texts.references[i]
        source = texts.sources[i] if texts.sources else None
        n, expected = len(text.strip()), len(reference.strip())
        if n == 0 and expected > 0:
            empty.append(i + 1)
        elif text == source and text != reference:
            copied.append(i + 1)
        elif expected >= SHORT_TEXT and n * LONG_RATIO < expected:
            short.append(i + 1)
        elif n >= SHORT_TEXT and n > expected * LONG_RATIO:
            long.append(i + 1)
    faults = [Fault("empty", empty)]
    if texts.sources:
        faults.append(Fault("copied from the source", copied))
    return [
        *faults,
        Fault("shorter than half of the reference", short),
        Fault("longer than twice the reference", long),
    ]


def compare_words(old: str, new: str) -> list[tuple[Change, str]]:
    """Return both texts as one sequence of runs of words: in both, only in `old`, only in `new`."""
    before, after = old.split(), new.split()
    if max(len(before), len(after)) > LONGEST_DIFF:
        return [("removed", old), ("added", new)]
    changes: list[tuple[Change, str]] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            changes.append(("same", " ".join(after[j:j_end])))
            continue
        if i < i_end:
            changes.append(("removed", " ".join(before[i:i_end])))
        if j < j_end:
            changes.append(("added", " ".join(after[j:j_end])))
    return changes
