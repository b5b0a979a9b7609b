"""BPE-dropout against SentencePiece at rate 0, and against the paper's algorithm word by word at
others.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import mark
from support.sentencepieces import train_sentencepiece
from support.toy_corpus import sentences

from nmt.data.bpe_dropout import MergeTable, segment
from nmt.data.vocab import UNK

LINES = [line for pair in sentences(500, 0) for line in pair] + [
    "aaaa aaaaaaa aaa",
    "hundehaus katzenbaum",
] * 20


SYMBOL, TAG = "hund_2", "<bt>"


def train_model(has_bytes: bool) -> tuple[MergeTable, sentencepiece.SentencePieceProcessor]:
    model = train_sentencepiece(
        LINES,
        400 if has_bytes else 140,
        user_defined_symbols=[SYMBOL],
        control_symbols=[TAG],
        byte_fallback=has_bytes,
    )
    return MergeTable(model), sentencepiece.SentencePieceProcessor(model_proto=model)


MODELS = {has_bytes: train_model(has_bytes) for has_bytes in (False, True)}
TEXTS = st.lists(
    st.text(st.sampled_from("aabdehnorstuz  ß☃é"))
    | st.lists(st.sampled_from([SYMBOL, " ", "hund", "_"]), max_size=6).map("".join)
    | st.sampled_from(LINES),
    min_size=1,
    max_size=8,
)


def draw_pieces(
    has_bytes: bool, texts: list[str], rate: float
) -> tuple[list[list[int]], list[list[int]]]:
    merges, processor = MODELS[has_bytes]
    rows = processor.encode(texts, num_threads=1)
    ids, lengths = np.array(sum(rows, []), np.uint16), np.array(list(map(len, rows)))
    pieces, counts = segment(merges, ids, lengths, rate, np.random.default_rng(0))
    return rows, [row.tolist() for row in np.split(pieces, np.cumsum(counts)[:-1])]


@settings(max_examples=100)
@given(st.booleans(), TEXTS)
def test_at_rate_0_the_pieces_are_sentencepieces(has_bytes: bool, texts: list[str]) -> None:
    rows, again = draw_pieces(has_bytes, texts, 0.0)
    assert rows == again


@settings(max_examples=50)
@given(st.booleans(), TEXTS, st.sampled_from([0.1, 0.5, 0.999]))
def test_the_text_stays_and_so_does_what_has_no_letters(
    has_bytes: bool, texts: list[str], rate: float
) -> None:
    rows, new = draw_pieces(has_bytes, texts, rate)
    _, processor = MODELS[has_bytes]
    symbol = processor.piece_to_id(SYMBOL)
    assert processor.decode(new) == processor.decode(rows)
    for old, row in zip(rows, new, strict=True):
        for keeps in ({UNK, symbol}.__contains__, processor.is_byte):
            assert list(filter(keeps, row)) == list(filter(keeps, old))


def merge_one_by_one(
    word: list[str], scores: dict[str, float], rate: float, draw: Callable[[], float]
) -> list[str]:
    """Algorithm 1 of Provilkov et al., symbol by symbol."""
    while True:
        merges = []
        for i, (left, right) in enumerate(pairwise(word)):
            if left + right in scores and draw() >= rate:
                merges.append((-scores[left + right], i))
        if not merges:
            return word
        _, i = min(merges)
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]


@mark.parametrize("rate", [0.1, 0.5])
def test_as_long_and_as_often_changed_as_by_the_papers_algorithm(rate: float) -> None:
    _, processor = MODELS[False]
    scores = {
        processor.id_to_piece(i): processor.get_score(i)
        for i in range(4, processor.get_piece_size())
    }
    draw = Random(1).random
    old, new = draw_pieces(False, LINES, rate)
    ours, theirs = [], []
    for a, b in zip(old, new, strict=True):
        pieces = [processor.id_to_piece(i) for i in a]
        expected: list[str] = []
        for word in "".join(pieces).split("\u2581")[1:]:
            expected += merge_one_by_one(list("\u2581" + word), scores, rate, draw)
        ours.append((len(b), a == b))
        theirs.append((len(expected), expected == pieces))
    differences = np.array(ours, float) - np.array(theirs, float)
    limit = 4 * differences.std(0) / math.sqrt(len(old))
    assert (abs(differences.mean(0)) < limit).all()
    assert np.mean([is_same for _, is_same in ours]) < 0.9


def test_a_tag_stays_whole_and_first() -> None:
    merges, processor = MODELS[False]
    tag = processor.piece_to_id(TAG)
    row = [tag, *processor.encode("hundehaus katzenbaum")]
    new, _ = segment(merges, np.array(row), np.array([len(row)]), 0.999, np.random.default_rng(0))
    assert new[0] == tag and len(new) > len(row) and tag not in new[1:]
    again, _ = segment(merges, np.array(row), np.array([len(row)]), 0.0, np.random.default_rng(0))
    assert again.tolist() == row
