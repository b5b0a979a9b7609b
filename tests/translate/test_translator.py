"""Text to text against sentence-by-sentence search: n-best lists, long lines, prefixes, failures."""

from dataclasses import replace
from pathlib import Path

from pytest import MonkeyPatch, approx, fixture, raises
from support.capture import Capture, read_errors, read_stderr
from support.processor import CPU
from support.toy_corpus import sentences
from support.untrained import DECODING, SHAPE, make_model, make_vocab

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.data.vocab import EOS, Vocab
from nmt.system.errors import Failure
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules
from nmt.translate.sentences import RunningText
from nmt.translate.translator import (
    LineTooLong,
    Translation,
    Translator,
)

SOURCES = [src for src, _ in sentences(30, seed=5)]


def translator(
    vocab: Vocab, config: DecodingConfig = DECODING, shape: ModelConfig = SHAPE
) -> Translator:
    return Translator(make_model(vocab, shape), vocab, config, CPU)


def test_a_model_in_training_mode_stays_in_it(vocab: Vocab) -> None:
    ours = translator(vocab, shape=replace(SHAPE, dropout=0.5))
    ours.model.train()
    assert ours.translate(SOURCES) == ours.translate(SOURCES)  # without dropout
    assert ours.model.training


def test_a_text_is_the_translations_of_its_sentences(
    vocab: Vocab, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(Translator, "chunk_lines", 3)  # it has more
    ours = translator(vocab, replace(DECODING, max_source=12))
    ours.languages = "en", "de"
    long = ", ".join(SOURCES[9:12])
    text = f"  A dog.  Two cats!\n\n{long}?\t\r\n"
    (translated,) = ours.translate_texts([RunningText(text, ours.make_splitter())], 2)
    sentences = [one.text for one in translated.sentences]
    assert sentences[:2] == ["A dog.", "Two cats!"]
    assert " ".join(sentences[2:]) == f"{long}?" and len(sentences) > 3
    assert all(len(ids) <= 12 for ids in vocab.encode(sentences))
    assert translated.candidates == ours.find_candidates(sentences, 2)

    best = [candidates[0].text for candidates in translated.candidates]
    assert translated.text == f"  {best[0]}  {best[1]}\n\n{' '.join(best[2:])}\t\r\n"
    assert ours.translate_text(text).text == translated.text
    shown = read_errors(capsys)
    assert f"warning: {len(best) - 2} parts of sentences are translated separately" in shown[0]
    assert ours.translate_text(" \n").text == " \n"


def test_a_line_that_is_too_long_is_refused_by_number(vocab: Vocab) -> None:
    ours = translator(vocab, replace(DECODING, long_lines="refuse", max_source=40))
    with raises(
        LineTooLong, match=r"line 12 has [0-9]+ pieces, more than 40; .*max_source.*long_lines"
    ) as error:
        ours.find_candidates([*SOURCES[:2], " ".join(SOURCES)], 1, numbers=[10, 11, 12])
    assert error.value.number == 12


def test_the_shortest_table_of_several_models_bounds_a_line(vocab: Vocab, capsys: Capture) -> None:
    learned = replace(SHAPE, positions="learned", max_positions=16)
    ours = Translator(
        make_model(vocab),
        vocab,
        DECODING,
        CPU,
        [make_model(vocab, learned, seed=3)],
    )
    assert ours.translate(["red " * 20, "blue dog"])[0].score < 0
    assert "and is cut to 15" in read_stderr(capsys)


def test_a_prefix_is_bounded_as_a_line_is(vocab: Vocab) -> None:
    ours = translator(vocab, shape=replace(SHAPE, positions="learned", max_positions=16))
    ids = vocab.encode(["hund hund hund hund hund hund hund hund"])[0][:16]
    with raises(LineTooLong, match="line 8: its prefix has 16 pieces, more than 15; ") as error:
        ours.find_candidates(["red", "blue"], 1, ["", *vocab.decode([ids])], [7, 8])
    assert error.value.number == 8
    found = ours.find_candidates(["red"], 1, vocab.decode([ids[:15]]))[0][0]
    assert found.piece_ids == tuple(ids[:15])  # nothing more has a place


def test_a_search_that_does_not_fit_in_memory_is_a_failure(vocab: Vocab) -> None:
    with raises(Failure, match="ran out of memory; lower decoding.beam"):
        translator(vocab, replace(DECODING, beam=10**13)).translate(["red dog"])


@fixture(scope="module")
def tagged(module_path: Path) -> Vocab:
    return make_vocab(module_path, tags=("<a>", "<b>"))


def test_a_tag_is_in_front_of_each_line(tagged: Vocab) -> None:
    ours = translator(tagged, replace(DECODING, max_source=30, tag="<b>"))
    tag = tagged.find_symbol("<b>")
    lines = [SOURCES[0], SOURCES[3], ""]
    together = ours.find_candidates(lines, 1)
    assert together[2] == [Translation("", 0.0)]
    for line, (best,) in zip(lines[:2], together, strict=False):
        source = [tag, *tagged.encode([line])[0]]
        (found,) = search(ours.model, pack([[*source, EOS]]), make_rules(DECODING))[0]
        assert best.score == approx(found.score, abs=1e-4)
    ours.set_tag("<a>")
    assert ours.translate(lines) != [best for (best,) in together]


def test_a_line_in_capitals_is_read_in_small_letters(vocab: Vocab) -> None:
    lines = ["Red dog likes, the house.", "RED DOG LIKES, THE HOUSE.", "NATO", "A1 B2", ""]
    plain = translator(vocab)
    ours = translator(vocab, replace(DECODING, lower_capitals=True))
    small = plain.find_candidates(lines[:1], 2)[0]
    found = ours.find_candidates(lines, 2)
    assert found[0] == small
    assert [one.text for one in found[1]] == [one.text.upper() for one in small]
    assert found[2:] == plain.find_candidates(lines[2:], 2)
    assert ours.translate_text(lines[1]).text == small[0].text.upper()


def test_spaces_of_any_kind_at_the_ends_of_a_line_are_not_read(vocab: Vocab) -> None:
    ours = translator(vocab)
    plain, *odd = ours.find_candidates(["red dog", "\u00a0red dog\u2029", "\tred dog \u0085"], 2)
    assert odd == [plain, plain]
    assert ours.translate(["\u00a0\t"])[0].text == ""


def test_a_translation_that_ends_with_the_table_of_positions_is_cut(vocab: Vocab) -> None:
    shape = replace(SHAPE, positions="learned", max_positions=9)
    config = replace(DECODING, max_extra=50, min_length=40)
    (found,) = translator(vocab, config, shape).translate(["dog"])
    assert len(found.piece_ids) == 8 and found.is_cut
