"""What is wrong with text before it is scored: each damage done to good text is named, and good
text is let through.

The good text is the demo corpus and lines that look like damage but are not (French spaces, .NET,
code, entities that are in the reference too). One damaged line of 303 must not refuse; one of two
must.
"""

import unicodedata
from collections.abc import Callable
from itertools import islice

from pytest import mark

from nmt.corpus.demo import generate_pairs
from nmt.score.text_checks import Problem, Text, find_problems

ENGLISH, GERMAN = (list(side) for side in zip(*islice(generate_pairs("train"), 303), strict=True))


def good() -> list[str]:
    """Translations with a mistake here and there: every seventh line loses a word."""
    return [" ".join(line.split()[1:]) if i % 7 == 0 else line for i, line in enumerate(GERMAN)]


def look(
    hypotheses: list[str],
    references: list[str] | None = None,
    sources: list[str] | None = None,
    language: str = "de",
) -> list[Problem]:
    found = find_problems(
        Text("out.txt", hypotheses, language),
        Text("ref.de", references or GERMAN, language),
        Text("src.en", sources, "en") if sources is not None else None,
    )
    for problem in found:
        assert "\n" not in problem.message and problem.message.isascii()
        assert len(problem.message) < 400
        assert problem.message.startswith(("out.txt:", "ref.de:", "src.en:"))
    assert found == sorted(found, key=lambda problem: not problem.is_fatal)
    return found


def bpe(line: str) -> str:
    return " ".join(word[:4] + "@@ " + word[4:] if len(word) > 6 else word for word in line.split())


def sentencepiece(line: str) -> str:
    return " ".join(f"\u2581{word}" for word in line.split())


def tokenised(line: str) -> str:
    return line.replace(",", " ,").removesuffix(".") + " ."


def escaped(line: str) -> str:
    return f"&quot; {line} &quot;"


def split(line: str) -> str:
    return f"Nord ##AT##-##AT## {line}"


def aggressive(line: str) -> str:
    return f"Nord @-@ {line}"


def pieces_of_words(line: str) -> str:
    return " ".join(word[:4] + " ##" + word[4:] if len(word) > 5 else word for word in line.split())


def joined_by_marks(line: str) -> str:
    return line.replace(".", " \uffed.")


def ended(line: str) -> str:
    return f"{line} </s>"


def tagged(line: str) -> str:
    return f"<de> {line}"


def with_score(line: str) -> str:
    return f"-1.25\t{line}"


def numbered(line: str) -> str:
    return f"0 ||| {line}"


def as_json(line: str) -> str:
    return '{"line": 1, "translation": "' + line + '"}'


def misread(line: str) -> str:
    return f"{line} f\u00fcr".encode().decode("latin-1")


def decomposed(line: str) -> str:
    return unicodedata.normalize("NFD", f"{line} f\u00fcr")


DAMAGES = [
    (bpe, "BPE"),
    (sentencepiece, "BPE"),
    (tokenised, "full stops"),
    (escaped, "entities"),
    (split, "split"),
    (aggressive, "split"),
    (pieces_of_words, "marks"),
    (joined_by_marks, "marks"),
    (ended, "marks"),
    (tagged, "marks"),
    (with_score, "columns"),
    (numbered, "columns"),
    (as_json, "columns"),
    (misread, "Latin-1"),
    (decomposed, "NFD"),
]


def test_good_text_is_let_through() -> None:
    assert look(good(), sources=ENGLISH) == []


@mark.parametrize("damage, word", DAMAGES)
def test_a_damaged_side_is_refused_by_name(damage: Callable[[str], str], word: str) -> None:
    for hypotheses, references, name in (
        (list(map(damage, good())), GERMAN, "out.txt:"),
        (good(), list(map(damage, GERMAN)), "ref.de:"),
    ):
        first = look(hypotheses, references)[0]
        assert first.is_fatal and word in first.message and first.message.startswith(name)


@mark.parametrize("damage, word", DAMAGES)
def test_one_odd_line_refuses_two_lines_but_not_303(
    damage: Callable[[str], str], word: str
) -> None:
    hypotheses = good()
    hypotheses[1] = damage("Das kostet viel Geld, sagen Donaudampfschiffer.")
    assert not any(problem.is_fatal for problem in look(hypotheses))
    first = look([GERMAN[0], hypotheses[1]], GERMAN[:2])[0]
    assert first.is_fatal and word in first.message and first.message.startswith("out.txt:2:")


@mark.parametrize("damage, word", DAMAGES)
def test_the_same_damage_on_both_sides(damage: Callable[[str], str], word: str) -> None:
    found = look(list(map(damage, good())), list(map(damage, GERMAN)))
    is_fatal = word in ("BPE", "split")
    assert found and any(problem.is_fatal for problem in found) == is_fatal


def test_accents_that_nfc_leaves_apart_are_no_damage() -> None:
    yoruba = unicodedata.normalize("NFC", "\u1eb9\u0300k\u1ecd\u0301 n\u0301l\u00e1 m\u0300")
    found = look([f"{line} {yoruba}" for line in good()])
    assert "\u0300" in yoruba and found == []


def test_where_what_and_how_many_are_told() -> None:
    hypotheses = [*GERMAN[:4], *(f"{line} Kat@@ ze" for line in GERMAN[4:200]), *GERMAN[200:]]
    (fatal,) = look(hypotheses)
    assert fatal.is_fatal and fatal.message.startswith("out.txt:5: BPE was left in: ")
    assert "Kat@@ ze" in fatal.message and "in 196 of 303 lines; join" in fatal.message


@mark.parametrize(
    "n, m, words",
    [
        (3003, 2737, ("3,003 translations", "2,737 references", "filtered wmt14", "wmt14/full")),
        (3000, 3003, ("newstest2013", "newstest2014", "wmt14/full")),
        (10, 11, ("10 translations", "11 references", "for each source sentence")),
    ],
)
def test_unequal_numbers_are_refused_and_known_sizes_named(
    n: int, m: int, words: tuple[str, ...]
) -> None:
    (fatal,) = look(["Ein Hund."] * n, ["Ein Hund."] * m)
    assert fatal.is_fatal and all(word in fatal.message for word in words), fatal


def test_empty_lines_at_the_end_are_named_as_the_reason() -> None:
    (fatal,) = look([*GERMAN[:20], ""], GERMAN[:20])
    assert fatal.is_fatal and "the last lines of out.txt are empty" in fatal.message


def test_translations_that_are_all_empty_are_worth_nothing_and_scored() -> None:
    (problem,) = look([""] * 30, ["ein Satz"] * 30)
    assert not problem.is_fatal
    assert "empty translations" in problem.message and "30 of 30" in problem.message


def test_languages_without_spaces_are_warned_of() -> None:
    lines = [f"{i} 这是一个句子。" for i in range(30)]
    (chinese,) = look(lines, [line + "。" for line in lines], language="zh")
    assert not chinese.is_fatal and "Chinese has no spaces" in chinese.message


@mark.parametrize("hypotheses, references", [([], ["a"]), (["a"], [""])])
def test_nothing_is_refused(hypotheses: list[str], references: list[str]) -> None:
    first = look(hypotheses, references)[0]
    assert first.is_fatal and "nothing to score" in first.message


def change(line: str, at: int = 0) -> list[str]:
    return [line if i % 10 == at else old for i, old in enumerate(good())]


@mark.parametrize(
    "hypotheses, words",
    [
        (change("", 3), ("out.txt:4: empty translations", "in 30 of 303")),
        (change("Ein Hund.\r"), ("carriage return",)),
        (change("Ein H\ufffdnd."), ("U+FFFD",)),
        (["\ufeff" + GERMAN[0], *good()[1:]], ("out.txt:1: a byte order mark",)),
        (change("Ein \u2047 Hund."), ("unknown pieces (10.2%",)),
        (change("Ein <unk> Hund."), ("unknown pieces",)),
        ([line.lower() for line in good()], ("upper-case",)),
        ([line.upper() for line in good()], ("lower-case",)),
    ],
)
def test_what_may_be_genuine_is_warned_of(hypotheses: list[str], words: tuple[str, ...]) -> None:
    found = look(hypotheses)
    assert any(all(word in problem.message for word in words) for problem in found), found
    assert not any(problem.is_fatal for problem in found)


def test_a_reference_in_lower_case_is_warned_of_too() -> None:
    (problem,) = look(good(), [line.lower() for line in GERMAN])
    assert not problem.is_fatal
    assert problem.message.startswith(
        "ref.de:1: hardly any upper-case letters, but out.txt has some"
    )


def test_letters_without_their_accents_are_warned_of() -> None:
    accented = [line.replace("a", "á") for line in ENGLISH]
    assert look([*ENGLISH[:-1], "Ein Café."], accented)
    for hypotheses, references in ((ENGLISH, accented), (accented, ENGLISH)):
        (problem,) = look(hypotheses, references)
        assert (
            not problem.is_fatal
            and "hardly any accented or other non-ASCII letters" in problem.message
        )
    assert not look(ENGLISH[:199], accented[:199])  # so few may have none


def test_what_a_model_wrote_is_not_blamed_on_a_file() -> None:
    lines = change("Ein H\ufffdnd.")
    references = Text("ref.de", GERMAN, "de")
    (of_file,) = find_problems(Text("out.txt", lines, "de"), references)
    (of_model,) = find_problems(Text("runs/one", lines, "de", is_of_model=True), references)
    assert "wrong encoding" in of_file.message and "the model wrote it" in of_model.message
    assert "wrong encoding" not in of_model.message


def test_an_empty_reference_is_warned_of() -> None:
    (problem,) = look(good(), ["" if i == 5 else line for i, line in enumerate(GERMAN)])
    assert not problem.is_fatal and problem.message.startswith("ref.de:6: empty references")


def test_the_source_as_translation_is_warned_of() -> None:
    pairs = zip(ENGLISH, good(), strict=True)
    mixed = [source if i % 4 == 0 else line for i, (source, line) in enumerate(pairs)]
    for hypotheses in (mixed, ENGLISH):
        found = look(hypotheses, sources=ENGLISH)
        assert not any(problem.is_fatal for problem in found)
        assert any("a copy of the source sentence" in problem.message for problem in found)


GENUINE = {
    "fr": [
        "Est-ce vrai ?",
        "Il a dit : « Oui ! »",
        "Non ; jamais.",
        "C'est l'été, et il fait chaud.",
    ],
    "de": [
        "Für .NET gibt es das auch ...",
        "Ende ...",
        "Die Adresse ist a@b.de, und @param int $x .",
        "Rot-Grün und Nord-Süd.",
    ],
    "de-HTML": ["Nutzen Sie &lt;b&gt; in HTML.", "Das kostet viel.", "Ja & nein."],
    "en": [
        'He said: "Don\'t!"',
        "R&D costs [1] a lot, they say.",
        "The C++ <vector> header is there.",
    ],
}


@mark.parametrize("language", GENUINE)
@mark.parametrize("times", [1, 100])
def test_what_looks_like_damage_and_is_none(language: str, times: int) -> None:
    lines = GENUINE[language] * times
    hypotheses = [line.replace("ist", "war").replace("vrai", "faux") for line in lines]
    assert not any(problem.is_fatal for problem in look(hypotheses, lines, language=language))
