"""What a survey counts, against brute force."""

import random
from pathlib import Path

import pytest

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.survey import Survey, survey_corpus
from nmt.system.errors import UserError

TEXTS = CorpusConfig(src="a.en", tgt="a.de")


def survey(folder: Path, src: list[str], tgt: list[str]) -> Survey:
    for name, lines in (("a.en", src), ("a.de", tgt)):
        text = "".join(f"{line}\n" for line in lines)
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    return survey_corpus(TEXTS, DataConfig(root=str(folder), on_bad_line="skip"))


def test_counts_are_those_of_brute_force(tmp_path: Path) -> None:
    draw = random.Random(5)
    src = [draw.choice(["a b", "c", " c ", "d e f", "same", ""]) for _ in range(300)]
    tgt = [draw.choice(["x", "y z", "same", "u", ""]) for _ in range(300)]
    pairs = [(a.strip(), b.strip()) for a, b in zip(src, tgt, strict=True)]
    found = survey(tmp_path, src, tgt)
    sources, targets = zip(*pairs, strict=True)
    assert found.is_repeated.tolist() == [pair in pairs[:i] for i, pair in enumerate(pairs)]
    assert found.is_unique.tolist() == [
        sources.count(a) == 1 and targets.count(b) == 1 for a, b in pairs
    ]
    assert found.is_identical.tolist() == [a == b for a, b in pairs]
    assert found.is_usable.tolist() == [bool(a and b and a != b) for a, b in pairs]
    assert found.words.tolist() == [[len(a.split()), len(b.split())] for a, b in pairs]
    assert found.characters.tolist() == [[len(a), len(b)] for a, b in pairs]
    other = survey(tmp_path, ["a b", "only"], ["only", "u"])
    assert found.shares_a_side(other).tolist() == [a == "a b" or b == "u" for a, b in pairs]


def test_a_few_bad_lines_are_counted_and_many_refused(tmp_path: Path) -> None:
    good = [f"line {i}" for i in range(99)]
    found = survey(tmp_path, [*good, "\udcff"], [*good, "x"])
    assert found.n_unreadable == 1 and "a.en:100:1" in found.complaint
    assert found.n_pairs == 99
    with pytest.raises(UserError, match=r"a\.de:1:1: byte 0xff .* \(50 lines"):
        survey(tmp_path, good[:60], ["\udcff"] * 50 + good[:10])
