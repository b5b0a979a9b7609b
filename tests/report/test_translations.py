"""Best, worst and changed lines, and errors that can be counted."""

import random

import pytest
from sacrebleu import corpus_bleu, sentence_chrf

from nmt.evaluate.scored_texts import ScoredTexts
from nmt.report.translations import (
    compare_words,
    find_faults,
    rank_lines,
    score_by_length,
    score_lines,
)


def make_texts(rows: list[tuple[str, str, str]]) -> ScoredTexts:
    sources, references, translations = map(list, zip(*rows, strict=True))
    return ScoredTexts("average", "test", "en-de", "0" * 64, sources, references, translations)


def test_words_of_both_texts_come_back_in_order() -> None:
    rng = random.Random(2)
    for _ in range(200):
        old = " ".join(rng.choices("abcde", k=rng.randint(0, 8)))
        new = " ".join(rng.choices("abcde", k=rng.randint(0, 8)))
        changes = list(compare_words(old, new))
        assert " ".join(words for change, words in changes if change != "added") == old
        assert " ".join(words for change, words in changes if change != "removed") == new


def test_a_changed_word_is_told_apart_from_its_neighbours() -> None:
    assert list(compare_words("der rote Hund", "der blaue Hund")) == [
        ("same", "der"),
        ("removed", "rote"),
        ("added", "blaue"),
        ("same", "Hund"),
    ]


def test_lines_are_ranked_by_sacrebleus_chrf() -> None:
    texts = make_texts(
        [("a", "ein Hund", "ein Hund"), ("b", "eine Katze", "x"), ("c", "Tag", "Tage")]
    )
    scores = score_lines(texts)
    assert scores == [
        sentence_chrf(text, [reference]).score
        for text, reference in zip(texts.translations, texts.references, strict=True)
    ]
    assert rank_lines(scores) == [1, 2, 0]


def test_bleu_by_length_is_that_of_the_lines_of_this_length() -> None:
    rng = random.Random(3)
    rows = []
    for n in [5] * 12 + [15] * 11 + [25] * 3:  # the last are too few
        words = rng.choices("one two three four five six".split(), k=n)
        rows.append((" ".join(words), " ".join(words), " ".join(words[:-1] + ["seven"])))
    texts = make_texts(rows)
    scores = score_by_length(texts)
    assert list(scores) == ["1-10", "11-20"]
    expected = corpus_bleu(texts.translations[12:23], [texts.references[12:23]]).score
    assert scores["11-20"] == pytest.approx(expected)


def test_faults_are_counted_once_each() -> None:
    texts = make_texts(
        [
            ("the red dog", "der rote Hund", "der rote Hund"),
            ("the red dog", "der rote Hund", "the red dog"),
            ("Berlin", "Berlin", "Berlin"),  # rightly the same
            ("the red dog", "der rote Hund", ""),
            ("the red dog", "der rote Hund", "der"),
            ("the red dog", "der rote Hund", "der rote Hund " * 3),
            ("no", "ja", "nein"),  # too short for a ratio
        ]
    )
    assert find_faults(texts) == {
        "empty": [4],
        "copied from the source": [2],
        "shorter than half of the reference": [5],
        "longer than twice the reference": [6],
    }
