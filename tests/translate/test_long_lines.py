"""Where a line that is too long is split."""

import random

import pytest

from nmt.data.vocab import SPACE
from nmt.translate.long_lines import split_pieces


@pytest.mark.parametrize(
    ("pieces", "longest", "parts"),
    [
        ("_a|_b|_c|.", 4, ["_a|_b|_c|."]),
        # At a sentence, though it is not the half
        ("_a|_b.|_c|_d.|_e|_f.", 4, ["_a|_b.", "_c|_d.|_e|_f."]),
        ("_a|_b|,|_c|_d|_e", 5, ["_a|_b|,", "_c|_d|_e"]),
        ("_a.|_b,|_c|_d|_e", 4, ["_a.", "_b,|_c|_d|_e"]),
        ("_a|x|x|_b|_c|x", 5, ["_a|x|x", "_b|_c|x"]),
        ("_a|_b|_3|.|14|_c|_d", 5, ["_a|_b|_3|.|14", "_c|_d"]),  # not within a number
        ('_a|_b|.|"|_c|_d|_e', 5, ['_a|_b|.|"', "_c|_d|_e"]),
    ],
)
def test_lines_are_split_at_sentences_else_clauses_else_words(
    pieces: str, longest: int, parts: list[str]
) -> None:
    row = pieces.replace("_", SPACE).split("|")
    assert [
        "|".join(row[i] for i in part).replace(SPACE, "_") for part in split_pieces(row, longest)
    ] == parts


def test_splitting_a_line_without_spaces() -> None:
    assert split_pieces(["x"] * 10, 4) == [range(0, 4), range(4, 7), range(7, 10)]
    assert split_pieces(list("今日は。明日も。"), 5) == [range(0, 4), range(4, 8)]


@pytest.mark.parametrize("seed", range(30))
def test_parts_are_short_and_make_up_the_line(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 400)
    pieces = [
        rng.choice(("", SPACE)) + rng.choice(("x", "yy", ".", ",", "。", '"')) for _ in range(n)
    ]
    longest = rng.randint(1, 50)
    parts = split_pieces(pieces, longest)
    assert [i for part in parts for i in part] == list(range(len(pieces)))
    assert all(0 < len(part) <= longest for part in parts)
    assert len(parts) <= 4 * -(-len(pieces) // longest)
