"""The embedded corpus against German as it is taught: the tables below were written by hand, not by
the grammar.
"""

import hashlib
import os
import re
import subprocess
import sys
from functools import cache
from itertools import chain, islice
from pathlib import Path
from random import Random

import pytest

from nmt.corpus.demo import (
    ACC,
    DAT,
    NP,
    NUMBERS,
    PLURAL,
    SPLITS,
    VERBS,
    Cells,
    Predicate,
    build_clause,
    conjugate,
    decline,
    draw_measure,
    draw_sentence,
    generate_pairs,
)

ROOT = Path(__file__).parents[2]
NOTHING: Cells = ("", "")

# Gender of every noun, singular / plural; and the dative plural where it differs from the plural.
NOUNS = {
    "m": "Vater/Väter Sohn/Söhne Bruder/Brüder Freund/Freunde Mann/Männer Lehrer/Lehrer Arzt/Ärzte Garten/Gärten "
    "Wald/Wälder Brief/Briefe Apfel/Äpfel Kuchen/Kuchen Mantel/Mäntel Hut/Hüte Schlüssel/Schlüssel Hund/Hunde",
    "f": "Mutter/Mütter Schwester/Schwestern Tante/Tanten Frau/Frauen Krankenschwester/Krankenschwestern Küche/Küchen "
    "Schule/Schulen Kirche/Kirchen Zeitung/Zeitungen Suppe/Suppen Blume/Blumen Tasse/Tassen Uhr/Uhren "
    "Katze/Katzen Tür/Türen Tasche/Taschen",
    "n": "Kind/Kinder Mädchen/Mädchen Haus/Häuser Hotel/Hotels Dorf/Dörfer Buch/Bücher Ei/Eier Hemd/Hemden Bild/Bilder "
    "Auto/Autos Fahrrad/Fahrräder Pferd/Pferde Fenster/Fenster",
}
ADJECTIVES = {  # as they stand before an ending
    "alt",
    "jung",
    "freundlich",
    "müd",
    "klug",
    "berühmt",
    "arm",
    "neu",
    "groß",
    "klein",
    "schön",
    "rot",
    "grün",
    "schwarz",
    "weiß",
    "teur",
    "billig",
    "schwer",
    "warm",
    "kalt",
    "frisch",
    "gut",
}
CASES = ("nom", "acc", "dat")
PARADIGM = {  # article and adjective ending by gender (p: plural), nominative accusative dative
    "d": {
        "m": "der -e den -en dem -en",
        "f": "die -e die -e der -en",
        "n": "das -e das -e dem -en",
        "p": "die -en die -en den -en",
    },
    "dies": {
        "m": "dieser -e diesen -en diesem -en",
        "f": "diese -e diese -e dieser -en",
        "n": "dieses -e dieses -e diesem -en",
        "p": "diese -en diese -en diesen -en",
    },
    "ein": {
        "m": "ein -er einen -en einem -en",
        "f": "eine -e eine -e einer -en",
        "n": "ein -es ein -es einem -en",
    },
}
for possessive in ("kein", "mein", "sein", "ihr", "unser"):
    PARADIGM[possessive] = {
        gender: forms.replace("ein", possessive) for gender, forms in PARADIGM["ein"].items()
    } | {"p": f"{possessive}e -en {possessive}e -en {possessive}en -en"}
PREPOSITIONS = {
    "mit": {"dat"},
    "aus": {"dat"},
    "zu": {"dat"},
    "hinter": {"dat"},
    "durch": {"acc"},
    "in": {"acc", "dat"},
    "zum": {"dat"},
    "zur": {"dat"},
    "im": {"dat"},
    "ins": {"acc"},
}
CONTRACTED = {"zum": "dem", "zur": "der", "im": "dem", "ins": "das"}


@cache
def corpus(split: str) -> list[tuple[str, str]]:
    return list(generate_pairs(split))


def everything() -> list[tuple[str, str]]:
    return list(chain.from_iterable(corpus(split) for split in SPLITS))


def plain(text: str) -> list[str]:
    """Words in lower case at the start and without punctuation."""
    words = re.sub(r"[.,?]", "", text).split()
    return [words[0][0].lower() + words[0][1:], *words[1:]]


def readings() -> dict[tuple[str, str, str], set[str]]:
    """(article, ending of the adjective or "", noun) -> the cases in which that is German."""
    found: dict[tuple[str, str, str], set[str]] = {}
    for gender, nouns in NOUNS.items():
        for singular, plural in (noun.split("/") for noun in nouns.split()):
            for forms in PARADIGM.values():
                for number, noun in ((gender, singular), ("p", plural)):
                    row = forms.get(number, "").split()
                    for case, article, ending in zip(CASES, row[::2], row[1::2], strict=False):
                        ended = (
                            noun + "n"
                            if number == "p" and case == "dat" and noun[-1] not in "ns"
                            else noun
                        )
                        for adjective in ("", ending[1:]):
                            found.setdefault((article, adjective, ended), set()).add(case)
    return found


READINGS = readings()
ARTICLES = {article for article, _, _ in READINGS}
NOUN_FORMS = {noun for _, _, noun in READINGS}


def articled(words: list[str]) -> list[tuple[str, str, str, str]]:
    """(word before, article, ending, noun) of each noun phrase with an article."""
    found = []
    for i, word in enumerate(words):
        article = CONTRACTED.get(word, word)
        before = word if word in CONTRACTED else words[i - 1] if i else ""
        if article in ARTICLES and i + 1 < len(words):
            if words[i + 1] in NOUN_FORMS:
                found.append((before, article, "", words[i + 1]))
            elif i + 2 < len(words) and words[i + 2] in NOUN_FORMS:
                stem = re.sub(r"(e|er|es|en|em)$", "", words[i + 1])
                if stem in ADJECTIVES:
                    found.append((before, article, words[i + 1][len(stem) :], words[i + 2]))
    return found


def named(text: str) -> set[str]:
    """What cannot be a word of the lexicon: capital letters inside an English sentence."""
    known = {"I", "Monday", "Friday"}
    return {
        word.strip(".,?").removesuffix("'s") for word in text.split()[1:] if word[0].isupper()
    } - known


# ---- the splits


def test_sizes_and_an_unknown_split() -> None:
    assert [len(corpus(split)) for split in SPLITS] == [20000, 500, 500]
    with pytest.raises(ValueError, match=r"dev.*train, valid, test"):
        generate_pairs("dev")


def test_no_sentence_of_either_side_occurs_twice() -> None:
    for side in zip(*everything(), strict=True):
        assert len(set(side)) == 21000


def test_the_pairs_depend_on_nothing_but_the_split() -> None:
    script = """
import hashlib, itertools
from nmt.corpus.demo import SPLITS, generate_pairs
lines = [repr(pair) for split in SPLITS for pair in itertools.islice(generate_pairs(split), 2000)]
print(hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""
    lines = [repr(pair) for split in SPLITS for pair in corpus(split)[:2000]]
    there = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == hashlib.sha256("\n".join(lines).encode()).hexdigest()
    # An iterator read in part leaves no trace
    assert list(islice(generate_pairs("train"), 5)) == corpus("train")[:5]


def test_the_text_is_clean() -> None:
    for english, german in everything():
        for side in (english, german):
            assert re.fullmatch(r"[A-ZÄÖÜ][\wäöüßÄÖÜ' ,]*[a-zäöüß\d][.?]", side), side
            assert "  " not in side and " ," not in side and "_" not in side
            assert 4 <= len(side.split()) <= 16
        assert english[-1] == german[-1]
        assert english.isascii()


def test_an_english_sentence_has_one_translation() -> None:
    rng, known = Random(3), dict[str, str]()
    for english, german in (
        make(rng) for make in (draw_sentence, draw_measure) for _ in range(6000)
    ):
        assert known.setdefault(english, german) == german


# ---- copying


def test_names_and_digits_are_copied() -> None:
    for english, german in everything():
        for word in named(english):
            assert re.search(rf"\b{word}(s)?\b", german), (english, german)
        assert re.findall(r"\d+", english) == re.findall(r"\d+", german)


def test_some_names_of_the_test_were_never_seen() -> None:
    seen = set(chain.from_iterable(named(english) for english, _ in corpus("train")))
    unseen = [english for english, _ in corpus("test") if named(english) - seen]
    assert 10 <= len(unseen) <= 100


# ---- German grammar over the whole corpus


def test_articles_adjectives_and_nouns_agree() -> None:
    n = 0
    for _, german in everything():
        for before, article, ending, noun in articled(plain(german)):
            cases = READINGS.get((article, ending, noun))
            assert cases, (article, ending, noun, german)
            # "..., leiht sie aus, der"
            if before in PREPOSITIONS and not (before == "aus" and article != "dem"):
                assert cases & PREPOSITIONS[before], (before, article, ending, noun, german)
            n += 1
    assert n > 15000


def test_numbers_and_bare_plurals_take_strong_endings() -> None:
    plurals = {noun.split("/")[1] for nouns in NOUNS.values() for noun in nouns.split()}
    for _, german in everything():
        words = plain(german)
        for number, adjective, noun in zip(words, words[1:], words[2:], strict=False):
            if number in dict(NUMBERS).values() and adjective.islower():
                assert adjective.endswith("e") and noun in plurals, german


def test_a_subordinate_clause_follows_a_comma_and_ends_with_its_verb() -> None:
    forms = [
        conjugate(verb, tense, agreement)
        for verb in VERBS
        for agreement in range(3)
        for tense in ("present", "past", "perfect", "will", "can", "must")
    ]
    # Rief, anrief
    early, late = ({form[3] for form in forms}, {form[5].split()[-1] for form in forms})
    for _, german in everything():
        clauses = german.rstrip(".?").split(", ")
        for i, text in enumerate(clauses):
            first, *_, last = plain(text)
            if first in ("weil", "dass", "obwohl", "wenn", "als", "ob"):
                assert last in late, german
                if i == 0:  # and the main clause starts with its verb
                    assert plain(clauses[1])[0] in early, german
        assert not re.search(r"[^,] (weil|dass|obwohl|ob|aber) ", german)


def test_a_prefix_leaves_its_verb_only_where_the_verb_comes_early() -> None:
    joined = {
        "an": "anruf|ankomm|ankam|anfang",
        "auf": "aufmach",
        "zu": "zumach",
        "ab": "abhol",
        "aus": "auslei|auslie",
    }
    for _, german in everything():
        for text in german.rstrip(".?").split(", "):
            words = plain(text)
            is_inside = words[0] in ("weil", "dass", "obwohl", "wenn", "als", "ob")
            if is_inside:
                assert words[-1] not in joined, german
            if words[-1] in joined:
                assert not re.search(joined[words[-1]], text), german


# ---- single constructions, by hand

NOUN = {
    row[0]: row
    for row in (
        words.split()
        for words in (
            "man m Mann Männer",
            "woman f Frau Frauen",
            "child n Kind Kinder",
            "house n Haus Häuser",
            "apple m Apfel Äpfel",
            "car n Auto Autos",
            "book n Buch Bücher",
            "teacher m Lehrer Lehrer",
            "door f Tür Türen",
        )
    )
}


@pytest.mark.parametrize(
    "determiner, noun, adjective, number, english, german",
    [
        (
            "the",
            "man",
            "old alt",
            1,
            "the old man",
            "der alte Mann, den alten Mann, dem alten Mann",
        ),
        (
            "a",
            "man",
            "tired müde",
            1,
            "a tired man",
            "ein müder Mann, einen müden Mann, einem müden Mann",
        ),
        (
            "a",
            "apple",
            "old alt",
            1,
            "an old apple",
            "ein alter Apfel, einen alten Apfel, einem alten Apfel",
        ),
        ("a", "apple", "", 1, "an apple", "ein Apfel, einen Apfel, einem Apfel"),
        (
            "my",
            "woman",
            "clever klug",
            1,
            "my clever woman",
            "meine kluge Frau, meine kluge Frau, meiner klugen Frau",
        ),
        (
            "this",
            "car",
            "expensive teuer",
            1,
            "this expensive car",
            "dieses teure Auto, dieses teure Auto, diesem teuren Auto",
        ),
        (
            "our",
            "car",
            "new neu",
            1,
            "our new car",
            "unser neues Auto, unser neues Auto, unserem neuen Auto",
        ),
        (
            "no",
            "house",
            "big groß",
            1,
            "a big house",
            "kein großes Haus, kein großes Haus, keinem großen Haus",
        ),
        (
            "the",
            "child",
            "small klein",
            2,
            "the small children",
            "die kleinen Kinder, die kleinen Kinder, den kleinen Kindern",
        ),
        ("this", "teacher", "", 2, "these teachers", "diese Lehrer, diese Lehrer, diesen Lehrern"),
        ("a", "book", "new neu", 2, "new books", "neue Bücher, neue Bücher, neuen Büchern"),
        (
            "no",
            "book",
            "new neu",
            2,
            "new books",
            "keine neuen Bücher, keine neuen Bücher, keinen neuen Büchern",
        ),
        (
            "three",
            "car",
            "red rot",
            2,
            "three red cars",
            "drei rote Autos, drei rote Autos, drei roten Autos",
        ),
        (
            "Anna",
            "car",
            "red rot",
            1,
            "Anna's red car",
            "Annas rotes Auto, Annas rotes Auto, Annas rotem Auto",
        ),
        ("her", "door", "", 1, "her door", "ihre Tür, ihre Tür, ihrer Tür"),
    ],
)
def test_noun_phrases(
    determiner: str, noun: str, adjective: str, number: int, english: str, german: str
) -> None:
    phrase = decline(determiner, NOUN[noun], adjective.split() or NOTHING, number == 2)
    assert phrase.en == english and ", ".join(phrase.de) == german


def do(verb: str, *objects: tuple[NP, int], rest: Cells = NOTHING) -> Predicate:
    return Predicate(verb, objects, rest)


MAN, WOMEN = (
    decline("the", NOUN["man"], ("old", "alt")),
    decline("the", NOUN["woman"], NOTHING, True),
)
CHILD, BOOK, NO_CAR = (
    decline("a", NOUN["child"]),
    decline("the", NOUN["book"]),
    decline("no", NOUN["car"]),
)
ICH, US = (
    NP("I", ("ich", "mich", "mir"), 0, "pronoun"),
    NP("us", ("wir", "uns", "uns"), PLURAL, "pronoun"),
)


@pytest.mark.parametrize(
    "subject, tense, what, modifier, english, second, first, last",
    [
        (
            MAN,
            "past",
            do("buy", (BOOK, ACC)),
            "",
            "the old man bought the book",
            "der alte Mann kaufte das Buch",
            "kaufte der alte Mann das Buch",
            "der alte Mann das Buch kaufte",
        ),
        (
            WOMEN,
            "present",
            do("call", (MAN, ACC)),
            "",
            "the women call the old man",
            "die Frauen rufen den alten Mann an",
            "rufen die Frauen den alten Mann an",
            "die Frauen den alten Mann anrufen",
        ),
        (
            ICH,
            "perfect",
            do("invite", (MAN, ACC)),
            "already",
            "I have already invited the old man",
            "ich habe den alten Mann schon eingeladen",
            "habe ich den alten Mann schon eingeladen",
            "ich den alten Mann schon eingeladen habe",
        ),
        (
            MAN,
            "past",
            do("buy", (NO_CAR, ACC)),
            "not",
            "the old man did not buy a car",
            "der alte Mann kaufte kein Auto",
            "kaufte der alte Mann kein Auto",
            "der alte Mann kein Auto kaufte",
        ),
        (
            MAN,
            "can",
            do("buy", (BOOK, ACC)),
            "not",
            "the old man cannot buy the book",
            "der alte Mann kann das Buch nicht kaufen",
            "kann der alte Mann das Buch nicht kaufen",
            "der alte Mann das Buch nicht kaufen kann",
        ),
        (
            MAN,
            "past",
            do("help", (US, DAT)),
            "",
            "the old man helped us",
            "der alte Mann half uns",
            "half uns der alte Mann",
            "der alte Mann uns half",
        ),
        (
            WOMEN,
            "perfect",
            do("travel", rest=("to Berlin", "nach Berlin")),
            "",
            "the women have traveled to Berlin",
            "die Frauen sind nach Berlin gereist",
            "sind die Frauen nach Berlin gereist",
            "die Frauen nach Berlin gereist sind",
        ),
        (
            ICH,
            "past",
            do("be", rest=("tired", "müde")),
            "not",
            "I was not tired",
            "ich war nicht müde",
            "war ich nicht müde",
            "ich nicht müde war",
        ),
        (ICH, "present", do("know"), "", "I know", "ich weiß", "weiß ich", "ich weiß"),
        (
            MAN,
            "will",
            do("help", (CHILD, DAT)),
            "",
            "the old man will help a child",
            "der alte Mann wird einem Kind helfen",
            "wird der alte Mann einem Kind helfen",
            "der alte Mann einem Kind helfen wird",
        ),
        (
            WOMEN,
            "past",
            do("give", (CHILD, DAT), (NO_CAR, ACC)),
            "",
            "the women gave a child a car",
            "die Frauen gaben einem Kind kein Auto",
            "gaben die Frauen einem Kind kein Auto",
            "die Frauen einem Kind kein Auto gaben",
        ),
        (
            NP("", ("", "", "")),
            "to",
            do("open", (BOOK, ACC)),
            "",
            "to open the book",
            "das Buch",
            "das Buch",
            "das Buch aufzumachen",
        ),
    ],
)
def test_clauses(
    subject: NP,
    tense: str,
    what: Predicate,
    modifier: str,
    english: str,
    second: str,
    first: str,
    last: str,
) -> None:
    made = build_clause(subject, tense, what, modifier)
    assert (made.en, made.second, made.first, made.last) == (english, second, first, last)


def test_a_time_stands_behind_the_verb_and_before_the_object() -> None:
    made = build_clause(MAN, "past", do("buy", (BOOK, ACC)), "", ("yesterday", "gestern"))
    assert (made.en, made.second) == (
        "the old man bought the book yesterday",
        "der alte Mann kaufte gestern das Buch",
    )


def test_the_pronoun_for_a_thing_has_its_gender() -> None:
    pronouns = {"m": "er", "f": "sie", "n": "es"}
    genders = {
        noun.split("/")[0]: gender for gender, nouns in NOUNS.items() for noun in nouns.split()
    }
    found = [
        (match[1], match[2])
        for english, german in everything()
        if " because it " in english
        if (match := re.search(r" (\w+), weil (er|sie|es) .*(war|kostete)\.$", german))
    ]
    assert len(found) > 300 and all(pronouns[genders[noun]] == it for noun, it in found)
