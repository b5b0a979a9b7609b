"""Forbidden and required phrases: what occurs in a text against a regular expression, and the search against brute
force over everything that can be said."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.plain_search import EOS, Ids, Toy, assert_same, everything
from support.soaking import counted
from support.toy_corpus import sentences
from support.untrained import make_checkpoint, make_vocab

from nmt.commands.translate import main as nmt_translate
from nmt.config import DecodingConfig
from nmt.data.batch import pack
from nmt.translate.phrases import START, LinePhrases, PhraseRules, make_pattern, read_bytes_after
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules

# a language of four pieces that can spell its words in several ways, and an unknown one
TEXTS = ["", " \u2047 ", "", "", " a", "b", " ", "a b,"]
PHRASES = ["a", "b", "ab", "a b", "b,", "bb", "a a", "b a b", "\u2047"]
PLAIN = DecodingConfig(max_ratio=0.0, max_extra=5)


def say(ids: Sequence[int]) -> str:
    return "".join(TEXTS[i] for i in ids)


def occurs(phrase: str, ids: Sequence[int]) -> bool:
    return make_pattern(phrase).search(say(ids)) is not None


@pytest.mark.parametrize("text", ["Das Haus,", "das  Haus\u00a0steht", "(Haus)", "Haus"])
def test_what_occurs(text: str) -> None:
    assert make_pattern("Haus").search(text)


@pytest.mark.parametrize("text", ["Hausboot", "haus", "_Haus", "Haus2", "Haus\u0308", "Hau s"])
def test_what_does_not_occur(text: str) -> None:
    assert not make_pattern("Haus").search(text)


# of characters alone, and with the bytes of some: of é, of an ellipsis, of a letter and a comma
CHARACTERS = [*TEXTS[:4], *"ab, .", " a", "\u00a0", "ab", "b a", "  ", "a, a b", "\u0301", "1"]
BYTES = [bytes([byte]) for byte in b"a,\xc3\xa9\xe2\x80\xa6"]


@pytest.mark.parametrize("texts", [CHARACTERS, [*CHARACTERS[:9], *BYTES]], ids=["plain", "bytes"])
def test_states_say_what_the_pattern_says(texts: list[str | bytes]) -> None:
    rng = random.Random(1)
    letters = "ab,1" if texts is CHARACTERS else "ab,é…"
    for _ in range(counted(500, 50_000)):
        ids = [rng.choice([1, *range(4, len(texts))]) for _ in range(rng.randint(0, 7))]
        phrase = " ".join(
            "".join(rng.choice(letters) for _ in range(rng.randint(1, 2)))
            for _ in range(rng.randint(1, 3))
        )
        spelled = [texts[i] for i in ids]
        data = b"".join(one if isinstance(one, bytes) else one.encode() for one in spelled)
        text = data.decode(errors="replace")
        is_there = make_pattern(phrase).search(text) is not None
        forbidden = PhraseRules(texts, [phrase]).without_required
        assert is_allowed(forbidden, ids) == (not is_there), (phrase, text)
        required = LinePhrases(PhraseRules(texts), [phrase])
        assert is_allowed(required, ids) == is_there, (phrase, text)


def is_allowed(line: LinePhrases, ids: Sequence[int]) -> bool:
    state = START
    for piece in [*ids, EOS]:
        if any(piece in banned for banned in line.find_banned(state)):
            return False
        state = line.advance(state, piece)
    return True


@pytest.mark.parametrize("preset", DecodingConfig.PRESETS)
def test_a_beam_that_holds_everything_finds_the_best_that_keeps_to_its_phrases(preset: str) -> None:
    values = {**DecodingConfig.PRESETS[preset], "max_ratio": 0.0, "max_extra": 4, "beam": 300}
    n_found = 0
    for seed in range(counted(2, 40)):
        rng = random.Random(f"{preset} {seed}")
        toy = Toy(seed, n=7, ending=rng.choice((-2.0, 0.0, 2.0)))
        config = replace(
            DecodingConfig(**values),
            min_length=rng.choice((0, 2)),
            no_repeat_ngram=rng.choice((None, 2)),
        )
        given: list[Ids] = [(4, EOS), (5, EOS), (6, 4, EOS)]
        prefixes: list[Ids] = [(), (), (5,)]
        forbidden = rng.sample(PHRASES, rng.choice((0, 1, 2)))
        rules = PhraseRules(TEXTS[:7], forbidden)
        required = [rng.sample(["a", "b", "ab"], n) for n in (0, 1, 1)]
        lines = [LinePhrases(rules, phrases) for phrases in required]
        found = search(toy, pack(given), make_rules(config, 3), prefixes, lines)
        for src, prefix, own, some in zip(given, prefixes, required, found, strict=True):
            longest = max(4, len(prefix) + sum(len(phrase) + 2 for phrase in own))
            expected = [
                (score, ids)
                for score, ids in everything(toy, src, replace(config, max_extra=longest), prefix)
                if all(occurs(phrase, ids) for phrase in own)
                and not any(occurs(phrase, ids) for phrase in forbidden)
            ]
            assert_same(some, expected[:3], f"{preset} {seed} {own} {forbidden}")
            n_found += len(some)
    assert n_found


@pytest.mark.parametrize("preset", DecodingConfig.PRESETS)
@pytest.mark.parametrize("beam", [2, 5])
def test_phrases_hold_with_any_beam_and_in_any_batch(preset: str, beam: int) -> None:
    rng = random.Random(f"{preset} {beam}")
    config = replace(DecodingConfig(**DecodingConfig.PRESETS[preset]), beam=beam, max_extra=8)
    config = replace(config, max_ratio=min(config.max_ratio, 1.0))
    toy = Toy(beam, n=8, ending=-1.0)
    rules = PhraseRules(TEXTS, ["b b", "bb"])
    given: list[Ids] = [(*(rng.randrange(4, 8) for _ in range(3)), EOS) for _ in range(12)]
    lines = [
        LinePhrases(rules, rng.sample(["a", "b", "ab", "b,", "a b", "a a", "a b a"], n % 4))
        for n in range(12)
    ]
    together = search(toy, pack(given), make_rules(config), None, lines)
    for src, line, some in zip(given, lines, together, strict=True):
        (alone,) = search(toy, pack([src]), make_rules(config), None, [line])
        assert_same(some, [(one.score, tuple(one.ids)) for one in alone])
        assert some, line.required
        for phrase in line.required:
            assert occurs(phrase, some[0].ids), (line.required, say(some[0].ids))
        assert not occurs("b b", some[0].ids) and not occurs("bb", some[0].ids)


def test_a_required_phrase_is_spelled_in_bytes() -> None:
    texts: list[str | bytes] = [*TEXTS, *(bytes([byte]) for byte in "é😀".encode())]
    toy = Toy(3, n=len(texts), ending=-1.0)
    line = LinePhrases(PhraseRules(texts), ["bé", "😀 a"])
    for beam in (2, 4):
        rules = make_rules(replace(PLAIN, beam=beam))
        (found,) = search(toy, pack([(4, 5, EOS)]), rules, None, [line])
        spelled = [texts[i] for i in found[0].ids]
        data = b"".join(one if isinstance(one, bytes) else one.encode() for one in spelled)
        assert make_pattern("bé").search(data.decode(errors="replace"))
        assert make_pattern("😀 a").search(data.decode(errors="replace"))


def test_what_cannot_be_kept_to_has_no_translation() -> None:
    line = LinePhrases(PhraseRules(TEXTS, ["a"]), ["a b"])
    assert search(Toy(1, n=8), pack([(4, EOS)]), make_rules(PLAIN), None, [line]) == [[]]


# ---- text to text -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(folder / "average", make_vocab(folder))


def put(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_the_text_of_a_piece_is_what_it_adds_to_a_line(tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    rng = random.Random(1)
    for vocab in (make_vocab(tmp_path), make_vocab(tmp_path / "bytes", 340, byte_fallback=True)):
        texts = vocab.list_texts()
        for _ in range(200):
            ids = [rng.randrange(vocab.size) for _ in range(8)]
            text = ""
            tail = b""
            for i in ids:
                more, tail = read_bytes_after(tail, texts[i])
                text += more
            expected = vocab.decode([ids])[0].strip(" ")
            assert text.strip(" ").replace("\ufffd", "") == expected.rstrip("\ufffd").replace(
                "\ufffd", ""
            )


def test_translations_keep_to_files_of_phrases(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [src for src, _ in sentences(6, seed=7)]
    words = [line.split()[0] for line in lines]
    source = put(tmp_path / "in", "".join(line + "\n" for line in lines))
    options = [str(place), "-i", source, "--beam", "6", "decoding.max_extra=6"]
    assert nmt_translate(options) == 0
    plain = capfd.readouterr().out.splitlines()
    unwanted = next(word for line in plain for word in line.split() if word.isalpha())
    wanted = words[1]
    forbid = put(tmp_path / "forbid", f"{unwanted}\n\n")
    glossary = put(tmp_path / "glossary", f"{words[0]}\t{wanted}  {wanted}\n")
    must = put(tmp_path / "must", f"{wanted}\n" + "\n" * 4 + f"{unwanted}\n")
    rules = ["--forbid", forbid, "--glossary", glossary, "--must", must]
    outputs = []
    for more in (["decoding.batch_tokens=20"], []):
        assert nmt_translate([*options, *rules, *more]) == 0
        out, err = capfd.readouterr()
        warning = (
            "warning: line 6: no translation was found that obeys its phrases; it is left empty"
        )
        told, cut = err.splitlines()
        assert told == warning and "raise decoding.max_extra" in cut
        outputs.append(out.splitlines())
    assert outputs[0] == outputs[1]
    for line, text in zip(lines[:-1], outputs[0], strict=False):
        assert make_pattern(unwanted).search(text) is None
        if make_pattern(words[0]).search(line):
            assert make_pattern(f"{wanted} {wanted}").search(text)
    assert make_pattern(unwanted).search("\n".join(plain)) and outputs[0][-1] == ""


def test_of_a_glossary_the_longer_phrase_counts() -> None:
    rules = PhraseRules(TEXTS, (), {"bank": "Bank", "river bank": "Ufer", "C++": "C++"})
    assert rules.for_line("The river  bank, 1").required == ("Ufer",)
    assert sorted(rules.for_line("(bank) a river bank C++").required) == ["Bank", "C++", "Ufer"]
    assert rules.for_line("banks embank Bank C++x").required == ()
    assert rules.for_line("x", ["", " a  b ", "a b"]).required == ("a b",)


MISTAKES = {
    ("--glossary", "a b\n"): "FILE:1: is not of the form SOURCE PHRASE, tab, TARGET PHRASE",
    ("--glossary", "a\tb\na\tc\n"): "FILE:2: 'a' has a second translation",
    ("--glossary", "a\t\u2603\n"): "the vocabulary has no '\u2603', so the model cannot write it",
    ("--glossary", "\n"): "FILE: has no phrases",
    ("--forbid", "\n"): "FILE: has no phrases",
    ("--forbid", "a\n", "--sample"): "decoding.sample does not support --forbid",
    ("--glossary", "a\tb\n", "--beam", "1"): "decoding.beam is 1, but --glossary and --must need",
    ("--must", "a\n", "--sample"): "decoding.sample does not support",
    (
        "--forbid",
        "a\n",
        "--engine",
        "ctranslate2",
    ): "--engine ctranslate2 does not support --forbid",
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_in_one_line(
    case: tuple[str, ...], place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    option, text, *others = case
    file = put(tmp_path / "phrases", text)
    source = put(tmp_path / "in", "a\n")
    try:
        code = nmt_translate([str(place), "-i", source, option, file, *others])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    err = capfd.readouterr().err.replace(file, "FILE")
    assert code == 2 and MISTAKES[case] in err.splitlines()[-1]
