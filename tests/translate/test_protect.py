"""Strings that must survive: what they are, and that they come through where a search alone loses them."""

from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest
import torch
from support.toy_corpus import sentences
from support.untrained import DECODING, make_model, make_vocab

from nmt.config import DecodingConfig
from nmt.system.errors import UserError
from nmt.translate.protect import Survival, find_lost, find_protected
from nmt.translate.translator import Request, Translator

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        (
            "See https://x.org/a?b=1&c=2#d, or (www.foo.de/bar).",
            ["https://x.org/a?b=1&c=2#d", "www.foo.de/bar"],
        ),
        ("Mail a.b+c@d-e.org.", ["a.b+c@d-e.org"]),
        (
            "{0} of {name} and ${x}: %s %1$s %d, %.2f",
            ["{0}", "{name}", "${x}", "%s", "%1$s", "%d", "%.2f"],
        ),
        (
            "On 2024-05-06 at 12:30:45, in 1984, 0049-30-123456",
            ["2024-05-06", "12:30:45", "1984", "0049-30-123456"],
        ),
        ("12,345.67 10.000 3 of 999, 50% sure, 100%sure, 50%d, v1.2.3, a4711, 4711b", []),
        ("1984 and 1984", ["1984", "1984"]),
    ],
)
def test_what_is_protected(text: str, strings: list[str]) -> None:
    assert sorted(find_protected(text).elements()) == sorted(strings)
    assert not find_lost(find_protected(text), text)
    assert sorted(find_lost(find_protected(text), "").elements()) == sorted(strings)
    assert find_lost(find_protected("1984 {x}"), "119847 ${x}").total() == 2


@pytest.mark.parametrize("text", ["a" * 100_000, "1-" * 50_000, "1" * 100_000 + "a", "@" * 50_000])
def test_a_hostile_line_is_read_soon(text: str) -> None:
    before = process_time()
    find_protected(text)
    assert process_time() - before < 1


def test_strings_come_through_because_they_are_demanded(tmp_path: Path) -> None:
    vocab = make_vocab(tmp_path, 340, byte_fallback=True)
    lines = [line for line, _ in sentences(12, seed=2)]
    strings = ["{0}", "1984", "a@b.de", "%s"]
    lines = [f"{line} {strings[i % 4]}" if i % 3 else line for i, line in enumerate(lines)]
    config = replace(DECODING, beam=4)
    plain = Translator(make_model(vocab), vocab, config, CPU)
    ours = Translator(make_model(vocab), vocab, replace(config, protect=True), CPU)
    before = plain.find_candidates(lines, Request())
    after = ours.find_candidates(lines, Request())
    for line, ((first, *_), (second, *_)) in zip(
        lines, zip(before, after, strict=True), strict=True
    ):
        assert not find_lost(find_protected(line), second.text)
        if not find_lost(find_protected(line), first.text):
            assert second.text == first.text  # nothing was wrong with it
    assert ours.survival == Survival(8, 0, 8)
    assert str(ours.survival) == (
        "protected strings: 8 of 8 are in their translations, 8 of them because they were required"
    )
    assert [one.text for one in ours.translate(lines)] == [first.text for (first, *_) in after]


def test_what_cannot_be_said_is_left_as_it_was(tmp_path: Path) -> None:
    vocab = make_vocab(tmp_path)  # without bytes and digits
    lines = ["red dog 1984", "red dog"]
    plain = Translator(make_model(vocab), vocab, DECODING, CPU)
    ours = Translator(make_model(vocab), vocab, replace(DECODING, protect=True), CPU)
    assert ours.translate(lines) == plain.translate(lines)
    assert ours.survival == Survival(1, 0, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"beam": 1}, "needs several hypotheses"), ({"sample": True}, "decoding.sample does not")],
)
def test_a_search_that_cannot_demand_is_refused(
    settings: dict[str, int], words: str, tmp_path: Path
) -> None:
    config: DecodingConfig = replace(DECODING, protect=True, **settings)  # type: ignore[arg-type]
    vocab = make_vocab(tmp_path)
    with pytest.raises(UserError, match=words):
        Translator(make_model(vocab), vocab, config, CPU).translate(["red dog"])
