"""What a survey counts, against brute force; and lines that are no translations are found."""

import random
from pathlib import Path

import pytest
from support.needs import REAL_TEXT, needs_text

from nmt.config import CorpusConfig, DataConfig
from nmt.extras.init.survey import Survey, survey_corpus
from nmt.system.errors import UserError

TEXTS = CorpusConfig(src="a.en", tgt="a.de")


def survey(folder: Path, src: list[str], tgt: list[str]) -> Survey:
    for name, lines in (("a.en", src), ("a.de", tgt)):
        text = "".join(f"{line}\n" for line in lines)
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    return survey_corpus(TEXTS, DataConfig(root=str(folder), on_bad_line="skip"))


def make_lines(n: int, seed: int) -> list[str]:
    """Lines of very different lengths."""
    draw = random.Random(seed)
    return [" ".join(["wort"] * draw.randint(1, 30)) for _ in range(n)]


def test_counts_are_those_of_brute_force(tmp_path: Path) -> None:
    draw = random.Random(5)
    src = [draw.choice(["a b", "c", " c ", "d e f", "same", ""]) for _ in range(300)]
    tgt = [draw.choice(["x", "y z", "same", "u", ""]) for _ in range(300)]
    src += ["single", "double", "double"]
    tgt += ["one", "two", "two"]
    pairs = [(a.strip(), b.strip()) for a, b in zip(src, tgt, strict=True)]
    found = survey(tmp_path, src, tgt)
    assert found.is_repeated.tolist() == [pair in pairs[:i] for i, pair in enumerate(pairs)]
    sources, targets = zip(*set(pairs), strict=True)
    assert found.is_unique.tolist() == [
        sources.count(a) == targets.count(b) == 1 and (a, b) not in pairs[:i]
        for i, (a, b) in enumerate(pairs)
    ]
    assert found.is_unique[-3:].tolist() == [True, True, False]
    assert found.is_identical.tolist() == [a == b for a, b in pairs]
    assert found.is_usable.tolist() == [bool(a and b and a != b) for a, b in pairs]
    assert found.words.tolist() == [[len(a.split()), len(b.split())] for a, b in pairs]
    assert found.characters.tolist() == [[len(a), len(b)] for a, b in pairs]
    other = survey(tmp_path, ["a b", "only"], ["only", "u"])
    assert found.shares_a_side(other).tolist() == [a == "a b" or b == "u" for a, b in pairs]


def test_a_few_bad_lines_are_counted_and_many_refused(tmp_path: Path) -> None:
    good = make_lines(99, 1)
    found = survey(tmp_path, [*good, "\udcff"], [*good, "x"])
    assert found.n_unreadable == 1 and "a.en:100:1" in found.complaint
    assert found.n_pairs == 99
    with pytest.raises(UserError, match=r"a\.de:1:1: byte 0xff .* \(50 lines"):
        survey(tmp_path, good[:60], ["\udcff"] * 50 + good[:10])


def test_a_line_that_is_missing_on_each_side_is_noticed(tmp_path: Path) -> None:
    src = make_lines(8_000, 2)
    assert survey(tmp_path, src, src).find_misaligned() == []
    # from line 3,000 on the target is late by one, until line 6,000
    tgt = [*src[:3_000], "?", *src[3_000:5_999], *src[6_000:]]
    assert survey(tmp_path, src, tgt).find_misaligned() == [(3_001, 6_000)]
    assert survey(tmp_path, ["a"] * 2_000, ["b"] * 2_000).find_misaligned() == []


@needs_text("multi30k")
@pytest.mark.parametrize("is_shifted", [False, True])
def test_real_lines_are_told_from_shifted_ones(tmp_path: Path, is_shifted: bool) -> None:
    sides = []
    for language in ("en", "de"):
        text = (REAL_TEXT / "multi30k" / f"train.{language}").read_text(encoding="utf-8")
        sides.append(text.split("\n")[:4_001])
    src, tgt = sides
    if is_shifted:
        src, tgt = src[1:], tgt[:-1]
    expected = [(1, 4_000)] if is_shifted else []
    assert survey(tmp_path, src[:4_000], tgt[:4_000]).find_misaligned() == expected
