"""Alignments against plain attention, one sentence at a time."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from pytest import raises
from support.processor import CPU
from support.untrained import DECODING, make_model, make_vocab

from nmt.extras.maps.alignment import add_alignments, align
from nmt.system.errors import UserError
from nmt.translate.translator import Translator


def test_candidates_of_lines(tmp_path: Path) -> None:
    """A link to the tag is one to the first piece; a line in capitals is read in small letters."""
    vocab = make_vocab(tmp_path, tags=["<2de>"])
    config = replace(DECODING, tag="<2de>", lower_capitals=True)
    translator = Translator(make_model(vocab), vocab, config, CPU)
    lines = ["Red dog likes, the house.", "", "RED DOG LIKES, THE HOUSE."]
    plain = translator.find_candidates(lines, 2)
    small, empty, capitals = found = add_alignments(translator, lines, plain)
    assert empty == plain[1]
    source = [vocab.find_symbol("<2de>"), *vocab.encode(lines[:1])[0]]
    for candidate in small:
        (links,) = align(translator.model, [source], [list(candidate.piece_ids)])
        assert candidate.alignment == tuple(max(0, place - 1) for place in links)
    assert [each.alignment for each in capitals] == [each.alignment for each in small]
    for given, own in zip(plain, found, strict=True):
        assert given == [replace(each, alignment=()) for each in own]


def test_another_engine_has_none() -> None:
    with raises(UserError, match="other 1.0 does not show its attention"):
        add_alignments(SimpleNamespace(engine="other 1.0"), [], [])  # type: ignore[arg-type]
