"""Sentences in other letters: the same words, symbols and tags, or no change at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sentencepieces import train_sentencepiece

from nmt.config import AugmentConfig
from nmt.data.letter_case import CaseChanger, capitalise_words
from nmt.data.vocab import SymbolKind, Vocab, append_symbols

LINES = ["der Fuß im Gras", "ein [<url>] hat es", "DER FUSS IM GRAS EIN HAT ES", "'tis it's 3d"] * 9
MODEL = train_sentencepiece(LINES, 300, byte_fallback=True)
TAGGED = append_symbols(MODEL, ["<bt>"], SymbolKind.CONTROL)
VOCAB = Vocab(append_symbols(TAGGED, ["[<url>]", "[<url>]s"], SymbolKind.USER_DEFINED))
CHANGER = CaseChanger(VOCAB, AugmentConfig())
WORDS = st.sampled_from(
    ["fuß", "gras", "[<url>]", "[<url>]s", "ŉ", "x[<url>]y", "\u6f22", "😀", "Ñ"]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it's o'clock", "It's O'clock"),
        ('"der fuß" (ein)', '"Der Fuß" (Ein)'),
        ("3d élan", "3d Élan"),
        ("ßa \u01c6", "Ssa \u01c5"),
        ("\u6f22\u5b57 - !", "\u6f22\u5b57 - !"),
    ],
)
def test_the_first_letter_of_each_word_is_a_capital(text: str, expected: str) -> None:
    assert capitalise_words(text) == expected


@given(st.lists(WORDS, min_size=1))
def test_symbols_and_tags_survive_capitals(words: list[str]) -> None:
    (ids,) = VOCAB.encode([" ".join(words)])
    tag = VOCAB.find_symbol("<bt>")
    found = CHANGER.change(VOCAB, np.array([tag, *ids], np.uint16), str.upper)
    assert found is not None and found[0] == tag and found.dtype == np.uint16
    parts = [word.upper().replace("[<URL>]S", "[<url>]s") for word in words]
    expected = " ".join(parts).replace("[<URL>]", "[<url>]")
    assert VOCAB.decode([found.tolist()]) == [expected]
    assert found[1:].tolist() == VOCAB.encode([expected])[0]


def test_what_would_lose_its_text_stays() -> None:
    known = Vocab(train_sentencepiece(["abc ABC ß"] * 9, 14))
    changer = CaseChanger(known, AugmentConfig())
    rows = known.encode(["abc", "ab\N{SNOWMAN}", "ß", "abc"])
    rows[3].reverse()  # not the pieces of any text
    changed = [changer.change(known, np.array(ids, np.uint16), str.upper) for ids in rows]
    assert [ids is None for ids in changed] == [False, True, True, True]
