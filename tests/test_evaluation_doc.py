"""docs/evaluation.md tells what the code does: its worked example and its rungs are held against the ladder."""

import re
from pathlib import Path

import pytest
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacrebleu.tokenizers.tokenizer_intl import TokenizerV14International

from nmt.score import moses
from nmt.score.ladder import ladder, measure

TEXT = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text()


def block(label: str, n: int) -> list[str]:
    """The lines behind a label of the worked example."""
    first = re.search(rf"^    {re.escape(label)} +(.+(?:\n {{18}}.+){{{n - 1}}})$", TEXT, re.MULTILINE)
    assert first, label
    return [line.strip() for line in first[1].split("\n")]


def test_the_worked_example_is_what_the_ladder_says() -> None:
    references, hypotheses = block("ref.de", 3), block("hyp.de", 3)
    rows = re.findall(r"^ {6}(\S.*?) +([\d.]+)([* ]) \[([\d.]+), ([\d.]+)\]  ", TEXT, re.MULTILINE)
    assert len(rows) == 9
    for rung, (name, value, mark, low, high) in zip(ladder("de"), rows, strict=True):
        found = measure(rung, hypotheses, references, "ref.de", "en-de", 1000)
        assert found.interval and name == rung.name and mark == "*" * rung.is_papers + " " * (not rung.is_papers)
        assert f"{found.score.value:.2f}" == value
        assert (float(low), float(high)) == pytest.approx((found.interval.low, found.interval.high), abs=0.0051)


def test_the_tokens_are_cut_as_shown() -> None:
    lines = block("ref.de", 3)[0], block("hyp.de", 3)[0]
    tokens = moses.tokenizer("de")
    for label, cut in (("13a", Tokenizer13a()), ("intl", TokenizerV14International()), ("tokenised", tokens),
                       ("split", lambda line: moses.split_compounds(tokens(line)))):
        assert block(label, 2) == [cut(line) for line in lines]


def test_every_rung_has_its_row() -> None:
    rows = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?`) \|", TEXT.partition("## The ladder")[2].partition(
        "\n\n")[2].partition("\n\n")[0], re.MULTILINE)))
    assert set(rows) >= {rung.name for rung in ladder("de")} - {"TER", "chrF2"}
