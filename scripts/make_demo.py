"""Makes the corpus of the demo (configs/demo.tsv.xz) from a small synchronous English-German grammar
with real words:

    python scripts/make_demo.py configs/demo.tsv.xz

The grammar has what makes German hard (gender, case, adjective endings, verb-second and verb-final order,
separable verbs, names and numbers to copy) but no free choice: an English sentence always has one
translation, so a model that learned the grammar scores BLEU near 100, and no sentence occurs twice.
Stores and scores of the demo are compared by digest: the text, and so every draw and its place in
the order of draws, must not change. nmt/corpus/demo.py says which pairs belong to which split.
"""

import lzma
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

N_PAIRS = 21_000
SENTENCE_WORDS = range(4, 17)  # in either language
DRAW_SEED = 170603762  # of arXiv:1706.03762

Choice = TypeVar("Choice")
EnDe = tuple[str, str]  # a sentence in English and in German
Cells = Sequence[str]  # a row of a table below; mostly English, German
NOTHING = ("", "")
NOM, ACC, DAT = range(3)

# Agreement: I; he, she, it; we, they and the polite you, which share a German form.
_, THIRD, PLURAL = range(3)


# ---- lexicon: no weak nouns (Junge, Student), and no English word with two translations


@cache
def split_rows(table: str) -> list[list[str]]:
    """Commas end rows, spaces end cells; a space within a cell is written _."""
    return [[cell.replace("_", " ") for cell in row.split()] for row in table.split(",")]


PERSONAL = split_rows(
    "old alt, young jung, friendly freundlich, tired müde, clever klug, famous berühmt, poor arm"
)
LOOKS = split_rows(
    "old alt, new neu, big groß, small klein, beautiful schön, red rot, green grün, black schwarz, "
    "white weiß, expensive teuer, cheap billig, heavy schwer"
)
EDIBLE = split_rows("warm warm, cold kalt, fresh frisch, good gut, small klein, expensive teuer")
KIN = split_rows(
    "mother f Mutter Mütter, father m Vater Väter, sister f Schwester Schwestern, son m Sohn Söhne, "
    "brother m Bruder Brüder, aunt f Tante Tanten, friend m Freund Freunde, child n Kind Kinder"
)
PEOPLE = KIN[-2:] + split_rows(
    "man m Mann Männer, woman f Frau Frauen, girl n Mädchen Mädchen, teacher m Lehrer Lehrer, "
    "doctor m Arzt Ärzte, nurse f Krankenschwester Krankenschwestern"
)
PLACES = split_rows(
    "garden m Garten Gärten, kitchen f Küche Küchen, school f Schule Schulen, house n Haus Häuser, "
    "church f Kirche Kirchen, forest m Wald Wälder, hotel n Hotel Hotels, village n Dorf Dörfer"
)
DEEDS = tuple(
    (split_rows(verbs)[0], qualities, split_rows(nouns))
    for verbs, qualities, nouns in (
        (
            "write borrow find",
            LOOKS,
            "book n Buch Bücher, letter m Brief Briefe, newspaper f Zeitung Zeitungen",
        ),
        (
            "eat buy",
            EDIBLE,
            "apple m Apfel Äpfel, cake m Kuchen Kuchen, soup f Suppe Suppen, egg n Ei Eier",
        ),
        (
            "buy sell find look_for order",
            LOOKS,
            "coat m Mantel Mäntel, hat m Hut Hüte, shirt n Hemd Hemden, "
            "key m Schlüssel Schlüssel, flower f Blume Blumen, picture n Bild Bilder, cup f Tasse Tassen",
        ),
        (
            "repair sell buy see",
            LOOKS,
            "car n Auto Autos, bicycle n Fahrrad Fahrräder, clock f Uhr Uhren",
        ),
        (
            "buy sell see look_for",
            PERSONAL,
            "dog m Hund Hunde, cat f Katze Katzen, horse n Pferd Pferde",
        ),
        ("open close", LOOKS, "window n Fenster Fenster, door f Tür Türen, bag f Tasche Taschen"),
    )
)
PLURALS = dict(
    child="children", man="men", woman="women", church="churches", this="these", a="", no=""
)
# Base, past, participle; infinitive with the separable prefix, third person, preterite, participle
VERB_ROWS = split_rows(
    """
    buy bought bought kaufen kauft kaufte gekauft,
    sell sold sold verkaufen verkauft verkaufte verkauft,
    find found found finden findet fand gefunden,
    look_for looked_for looked_for suchen sucht suchte gesucht,
    order ordered ordered bestellen bestellt bestellte bestellt,
    write wrote written schreiben schreibt schrieb geschrieben,
    eat ate eaten essen isst aß gegessen,
    borrow borrowed borrowed aus-leihen leiht lieh geliehen,
    open opened opened auf-machen macht machte gemacht,
    close closed closed zu-machen macht machte gemacht,
    repair repaired repaired reparieren repariert reparierte repariert,
    see saw seen sehen sieht sah gesehen,
    visit visited visited besuchen besucht besuchte besucht,
    call called called an-rufen ruft rief gerufen,
    invite invited invited ein-laden lädt lud geladen,
    collect collected collected ab-holen holt holte geholt,
    help helped helped helfen hilft half geholfen,
    wait_for waited_for waited_for warten wartet wartete gewartet,
    speak_with spoke_with spoken_with sprechen spricht sprach gesprochen,
    give gave given geben gibt gab gegeben,
    show showed shown zeigen zeigt zeigte gezeigt,
    send sent sent schicken schickt schickte geschickt,
    work worked worked arbeiten arbeitet arbeitete gearbeitet,
    sleep slept slept schlafen schläft schlief geschlafen,
    cost cost cost kosten kostet kostete gekostet,
    run ran run laufen läuft lief gelaufen,
    travel traveled traveled reisen reist reiste gereist,
    come came come kommen kommt kam gekommen,
    arrive arrived arrived an-kommen kommt kam gekommen,
    be was been sein ist war gewesen,
    say said said sagen sagt sagte gesagt,
    know knew known wissen weiß wusste gewusst,
    ask asked asked fragen fragt fragte gefragt,
    start started started an-fangen fängt fing gefangen,
    forget forgot forgotten vergessen vergisst vergaß vergessen
    """
)
VERBS = {row[0]: row for row in VERB_ROWS}
WITH_SEIN = ("run", "travel", "come", "arrive", "be")  # in the perfect, where others have haben
MEETINGS = split_rows(
    "visit 1, invite 1, call 1, collect 1, help 2, wait_for 1 auf, speak_with 2 mit"
)
WAYS = split_rows(  # with the case of the place; without it a city
    "run to zu 2, run into in 1, run through durch 1, come into in 1, work in in 2, "
    "sleep behind hinter 2, travel to nach, come from aus, arrive in in"
)

NAMES = "Anna Peter Maria Paul Julia Martin Laura David Emma Karl Eva Robert Nina Clara Simon Ida".split()
CITIES = "Berlin Hamburg London Paris Madrid Boston Dresden Leipzig Bremen Oslo".split()
# No name ends in -s, whose German genitive would be Hans'.
STARTS, MIDDLES, NAME_ENDS, TOWN_ENDS = split_rows(
    "Ba Bel Da Del Fo Gri Hel Jo Ka Kir Lo Mi Nor Pe Ra Ste Tu Vel Wi, bi da fe lo ma ne ri so ta ti vu wa, "
    "bert dan ko lin mar na nik ro sa ta wen win, burg dorf feld heim stadt berg"
)
# With the agreement, nominative, accusative and dative. "her" only owns.
PRONOUNS = split_rows("I 0 ich - -, he 1 er - -, she 1 sie - -, we 2 wir - -, they 2 sie - -")
OBJECTS = split_rows("me 0 - mich mir, him 1 - ihn ihm, us 2 - uns uns, them 2 - sie ihnen")
NUMBERS = split_rows(
    "two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht, nine neun"
)
MODAL_ROWS = split_rows(  # "could": konnte, könnte
    "will werde wird werden, can kann kann können, must muss muss müssen, should sollte sollte sollten"
)
MODALS = {row[0]: row[1:] for row in MODAL_ROWS}
TIMES = {
    "present": "today heute, every_day jeden_Tag, every_Monday jeden_Montag, every_Friday jeden_Freitag",
    "past": "yesterday gestern, last_week letzte_Woche, last_summer letzten_Sommer",
}
LATER = "tomorrow morgen, tonight heute_Abend, next_week nächste_Woche, on_Monday am_Montag"
MODIFIERS = {"": "", "not": "nicht", "never": "nie", "already": "schon"}


# ---- endings by gender (p: plural): nominative, accusative, dative


def read_endings(table: str) -> dict[str, tuple[str, ...]]:
    rows = split_rows(table)
    return {gender: tuple(ending.strip("-") for ending in endings) for gender, *endings in rows}


STRONG = read_endings("m er en em, f e e er, n es es em, p e e en")
WEAK = read_endings("m e en en, f e e en, n e e en, p en en en")
# Of adjectives after ein, kein, mein; and of these themselves.
MIXED = WEAK | read_endings("m er en en, n es es en")
EIN = STRONG | read_endings("m - en em, n - - em")
DER = STRONG | read_endings("f ie ie er, n as as em, p ie ie en")
BARE = read_endings("m - - -, f - - -, n - - -, p - - -")
DETERMINERS = {  # English: the German stem, its endings, those of an adjective after it
    "the": ("d", DER, WEAK),
    "this": ("dies", STRONG, WEAK),
    **{en: (de, BARE, STRONG) for en, de in NUMBERS},
    **{
        en: (de, EIN, MIXED)
        for en, de in split_rows("a ein, no kein, my mein, his sein, her ihr, our unser")
    },
}
KINDS = {"no": "negative", **dict.fromkeys(("a", *(en for en, _ in NUMBERS)), "indefinite")}
CONTRACTED = split_rows("_in_dem_ _im_, _in_das_ _ins_, _zu_dem_ _zum_, _zu_der_ _zur_")


# ---- noun phrases


class NP(NamedTuple):
    """A noun phrase."""

    en: str
    de: tuple[str, str, str]  # by case
    agreement: int = THIRD
    # or indefinite, negative (kein), pronoun: it decides the place of an object
    kind: str = "definite"
    gender: str = ""  # m, f, n, and p for every plural


def join_words(*parts: str) -> str:
    return " ".join(filter(None, parts))


def decline(
    determiner: str, noun: Cells, adjective: Cells = NOTHING, is_plural: bool = False
) -> NP:
    """The determiner is an English one ("no" for the a of `not ... a`), a number word, or an
    owner's name.
    """
    word, gender, german, german_plural = noun
    if determiner in DETERMINERS:
        en = determiner
        stem, articles, endings = DETERMINERS[determiner]
    else:
        en = f"{determiner}'s"
        stem, articles, endings = f"{determiner}s", BARE, STRONG
    nouns = (german, german, german)
    if is_plural:
        word = PLURALS.get(word, f"{word}s")
        en = PLURALS.get(en, en)
        gender = "p"
        dative = german_plural if german_plural[-1] in "ns" else f"{german_plural}n"
        nouns = (german_plural, german_plural, dative)
        if determiner == "a":
            stem, articles, endings = "", BARE, STRONG

    # English: a or an
    words = join_words(adjective[0], word)
    if en in ("a", "no"):
        en = "an" if words[0] in "aeiou" else "a"

    # German: article, adjective and noun in each case; müde: der müde; teuer: der teure
    quality = adjective[1].removesuffix("e").replace("teuer", "teur")
    nom, acc, dat = (
        join_words(stem + article, quality and quality + ending, inflected)
        for article, ending, inflected in zip(articles[gender], endings[gender], nouns, strict=True)
    )
    agreement = PLURAL if is_plural else THIRD
    kind = KINDS.get(determiner, "definite")
    return NP(join_words(en, words), (nom, acc, dat), agreement, kind, gender)


# ---- verbs


class VerbForms(NamedTuple):
    """As in: he PLAIN, AUX he REST; er FINITE ... TAIL, weil er ... LAST."""

    plain: str
    aux: str
    rest: str
    finite: str
    tail: str
    last: str


@cache
def conjugate(base: str, tense: str, agreement: int) -> VerbForms:
    """Tense "to" is the infinitive."""
    _, past, done, infinitive, third, preterite, participle = VERBS[base]
    prefix, _, bare = infinitive.rpartition("-")
    if tense == "to":
        return VerbForms(
            f"to {base}", "", "", "", "", f"{prefix}zu{bare}" if prefix else f"zu {bare}"
        )
    if tense in MODALS:
        finite = MODALS[tense][agreement]
        tail = prefix + bare
        return VerbForms(f"{tense} {base}", tense, base, finite, tail, f"{tail} {finite}")
    if tense == "perfect":
        has = "has" if agreement == THIRD else "have"
        haben = ("bin", "ist", "sind") if base in WITH_SEIN else ("habe", "hat", "haben")
        finite = haben[agreement]
        tail = prefix + participle
        return VerbForms(f"{has} {done}", has, done, finite, tail, f"{tail} {finite}")
    if base == "be":
        return _conjugate_be(tense, agreement, preterite)
    if tense == "past":
        finite = preterite
        if agreement == PLURAL:
            finite += "n" if preterite.endswith("e") else "en"
        return VerbForms(past, "did", base, finite, prefix, prefix + finite)
    plain, do = base, "do"
    if agreement == THIRD:
        head, _, particle = base.partition(" ")  # looks for
        plain, do = join_words(f"{head}s", particle), "does"
    first = bare[:-1] if third.endswith("t") else third  # ich kaufe, but ich weiß
    finite = (first, third, bare)[agreement]
    return VerbForms(plain, do, base, finite, prefix, prefix + finite)


def _conjugate_be(tense: str, agreement: int, preterite: str) -> VerbForms:
    """It takes no do: was he?"""
    if tense == "past":
        be = "were" if agreement == PLURAL else "was"
        finite = f"{preterite}en" if agreement == PLURAL else preterite
    else:
        be = ("am", "is", "are")[agreement]
        finite = ("bin", "ist", "sind")[agreement]
    return VerbForms(be, be, "", finite, "", finite)


# ---- clauses


class Predicate(NamedTuple):
    """What is said of a subject."""

    verb: str  # in English
    objects: Sequence[tuple[NP, int]] = ()  # with their case
    rest: Cells = NOTHING


class Clause(NamedTuple):
    """One clause in all orders of its words."""

    en: str  # he buys it
    asked: str  # does he buy it
    second: str  # er kauft es
    first: str  # (heute) kauft er es
    last: str  # (weil) er es kauft


def build_clause(
    subject: NP, tense: str, what: Predicate, modifier: str = "", time: Cells = NOTHING
) -> Clause:
    verb = conjugate(what.verb, tense, subject.agreement)
    plain = verb.plain
    if modifier:
        plain = join_words(verb.aux, modifier, verb.rest).replace("can not", "cannot")
    objects = [phrase.en for phrase, _ in what.objects]
    en = join_words(*objects, what.rest[0], time[0])

    # German: pronouns, time, definite objects, nicht, the rest; kein is of the rest, and makes
    # nicht superfluous
    by_kind = {"pronoun": "", "definite": "", "indefinite": "", "negative": ""}
    for phrase, case in what.objects:
        by_kind[phrase.kind] = join_words(by_kind[phrase.kind], phrase.de[case])
    pronoun, definite, indefinite, negative = by_kind.values()
    nicht = "" if negative else MODIFIERS[modifier]
    middle = join_words(time[1], definite, nicht, indefinite, negative, what.rest[1])
    er = subject.de[NOM]
    return Clause(
        join_words(subject.en, plain, en),
        join_words(verb.aux, subject.en, modifier, verb.rest, en),
        join_words(er, verb.finite, pronoun, middle, verb.tail),
        join_words(verb.finite, pronoun, er, middle, verb.tail),
        join_words(er, pronoun, middle, verb.last),
    )


# ---- draws


def pick(rng: Random, items: Sequence[Choice]) -> Choice:
    # rng.choice may change between Python versions; this cannot
    return items[int(rng.random() * len(items))]


def draw_name(rng: Random, known: Cells = NAMES, ends: Cells = NAME_ENDS) -> str:
    """One in five is made of syllables: more than training can show."""
    if rng.random() < 0.2:
        return pick(rng, STARTS) + pick(rng, MIDDLES) + pick(rng, ends)
    return pick(rng, known)


def draw_noun_phrase(
    rng: Random, determiners: str, nouns: Sequence[Cells], adjectives: Sequence[Cells]
) -> NP:
    """Among the determiners, 2 is a number and A the genitive of a name."""
    determiner = pick(rng, determiners.split())
    is_number = determiner == "2"
    is_plural = rng.random() < 0.2
    if is_number:
        determiner = pick(rng, NUMBERS)[0]
    elif determiner == "A":
        determiner = draw_name(rng)
    adjective = pick(rng, adjectives) if rng.random() < 0.35 else NOTHING
    return decline(determiner, pick(rng, nouns), adjective, is_number or is_plural)


def draw_person(rng: Random, pronouns: Sequence[Cells] = (), is_definite: bool = False) -> NP:
    chance = rng.random()
    name = draw_name(rng)
    if pronouns and chance < 0.3:
        en, agreement, nom, acc, dat = pick(rng, pronouns)
        return NP(en, (nom, acc, dat), int(agreement), "pronoun")
    if chance < 0.5:
        return NP(name, (name, name, name))
    if chance < 0.7:
        return draw_noun_phrase(rng, "my his her our", KIN, PERSONAL)
    determiners = "the this" if is_definite else "the the this a"
    return draw_noun_phrase(rng, determiners, PEOPLE, PERSONAL)


def draw_predicate(rng: Random, subject: NP, is_negated: bool, is_request: bool) -> Predicate:
    # a movement or a place; a quality; something done to a thing; something given; a meeting
    chance = rng.random() * (0.7 if is_request else 1.0)  # nobody asks for the first two
    if chance > 0.82:
        return _draw_way(rng)
    if chance > 0.75:
        return Predicate("be", rest=pick(rng, PERSONAL))
    deeds = DEEDS if chance > 0.35 else DEEDS[:5]  # doors are no gifts
    verbs, qualities, nouns = pick(rng, deeds)
    determiners = "the no my" if is_negated else "the the a a my her this A 2"
    what = draw_noun_phrase(rng, determiners, nouns, qualities)
    if chance > 0.35:
        verb = pick(rng, verbs[:2] if is_request else verbs)
        return Predicate(verb, ((what, ACC),))
    pronouns = () if subject.kind == "pronoun" else OBJECTS  # no "I see me"
    # definite, because of "einem Kind das Buch" and "das Buch einem Kind" only one can be right
    whom = draw_person(rng, pronouns, is_negated or chance > 0.2)
    if chance > 0.2:
        verb = pick(rng, ("give", "show", "send"))
        return Predicate(verb, ((whom, DAT), (what, ACC)))
    verb, case, *preposition = pick(rng, MEETINGS)
    if preposition:
        return Predicate(verb, rest=(whom.en, f"{preposition[0]} {whom.de[int(case)]}"))
    return Predicate(verb, ((whom, int(case)),))


def _draw_way(rng: Random) -> Predicate:
    verb, en, de, *case = pick(rng, WAYS)
    if not case:
        city = draw_name(rng, CITIES, TOWN_ENDS)
        return Predicate(verb, rest=(f"{en} {city}", f"{de} {city}"))
    place = draw_noun_phrase(rng, "the the a", PLACES, LOOKS[:5])
    return Predicate(verb, rest=(f"{en} {place.en}", f"{de} {place.de[int(case[0])]}"))


def draw_clause(
    rng: Random, subject: NP, tense: str, time: Cells = NOTHING, is_request: bool = False
) -> Clause:
    # no "must not", which is darf nicht
    modifiers = {"to": "-", "must": "-", "perfect": "- - not never already"}
    modifier = pick(rng, modifiers.get(tense, "- - - - not").split()).strip("-")
    what = draw_predicate(rng, subject, modifier == "not", is_request or tense == "to")
    return build_clause(subject, tense, what, modifier, time)


# ---- sentences

SUBJECTS = {
    "you": NP("you", ("Sie", "", ""), PLURAL, "pronoun"),
    "who": NP("who", ("wer", "", "")),
    "please": NP("", ("Sie", "", ""), PLURAL, "pronoun"),
    "to": NP("", ("", "", ""), THIRD, "pronoun"),
}


class Pattern(NamedTuple):
    """A sentence of a clause a and perhaps a clause b. In the table below its weight comes first."""

    tenses: str  # of a
    inner: str  # tenses of b
    fixed: str  # the subject or the verbs of a, or that it is dated
    en: str
    de: str


# Of a question the tense is not past, where hat er gekauft vies with kaufte er.
PATTERNS = """
8 | past present perfect will can must should |  |  | {a.en}. | {a.second}.
6 | past past present will can must should |  | dated | {a.en}. | {a.second}.
6 | past past present will can must should |  |  | {time[0]} {a.en}. | {time[1]} {a.first}.
2 | present perfect will can must should |  |  | {a.asked}? | {a.first}?
2 | present perfect will can must should |  | you | {a.asked}? | {a.first}?
1 | present perfect will can must should |  |  | why {a.asked}? | warum {a.first}?
2 | present perfect will can must should |  | who | {a.en}? | {a.second}?
3 | present |  | please | please {a.en}. | bitte {a.first}.
4 | past present will | past present |  | {a.en} because {b.en}. | {a.second}, weil {b.last}.
2 | past | past |  | when {b.en}, {a.en}. | als {b.last}, {a.first}.
1 | past | past |  | {a.en} when {b.en}. | {a.second}, als {b.last}.
2 | will can must | present |  | if {b.en}, {a.en}. | wenn {b.last}, {a.first}.
1 | will can | present |  | {a.en} if {b.en}. | {a.second}, wenn {b.last}.
1 | past | past |  | although {b.en}, {a.en}. | obwohl {b.last}, {a.first}.
2 | past | past perfect |  | {a.en}, but {b.en}. | {a.second}, aber {b.second}.
3 | present | past perfect will | say know | {a.en} that {b.en}. | {a.second}, dass {b.last}.
2 | present | past present will | ask | {a.en} whether {b.en}. | {a.second}, ob {b.last}.
3 | present past perfect | to | start forget | {a.en} {b.en}. | {a.second}, {b.last}.
"""


def read_patterns() -> Iterator[Pattern]:
    for row in PATTERNS.strip().splitlines():
        weight, *cells = row.split(" | ")
        yield from [Pattern(*cells)] * int(weight)


WEIGHTED_PATTERNS = list(read_patterns())


def draw_sentence(rng: Random) -> EnDe:
    """One of the patterns."""
    pattern = pick(rng, WEIGHTED_PATTERNS)
    tense = pick(rng, pattern.tenses.split())
    subject = SUBJECTS.get(pattern.fixed) or draw_person(rng, PRONOUNS)
    time: Cells = pick(rng, split_rows(TIMES.get(tense, LATER)))
    year = pick(rng, range(1950, 2025))
    if tense == "past" and rng.random() < 0.25:
        time = (f"in {year}", f"im Jahr {year}")
    verbs = [verb for verb in pattern.fixed.split() if verb in VERBS]
    if verbs:
        a = build_clause(subject, tense, Predicate(pick(rng, verbs)))
    else:
        inner_time = time if pattern.fixed == "dated" else NOTHING
        a = draw_clause(rng, subject, tense, inner_time, pattern.fixed == "please")
    b = a
    if pattern.inner:
        subject = SUBJECTS.get(pattern.inner) or draw_person(rng, PRONOUNS)
        b = draw_clause(rng, subject, pick(rng, pattern.inner.split()))
    return pattern.en.format(a=a, b=b, time=time), pattern.de.format(a=a, b=b, time=time)


def draw_measure(rng: Random) -> EnDe:
    """Numbers, and a pronoun that has the gender of its noun."""
    _, qualities, nouns = pick(rng, DEEDS)
    who = draw_person(rng)
    n = pick(rng, range(2, 100))
    what = draw_noun_phrase(rng, "the this my", nouns, qualities)
    if rng.random() < 0.3:
        age = Predicate("be", rest=(f"{n} years old", f"{n} Jahre alt"))
        clause = build_clause(who, pick(rng, ("present", "past")), age)
        return f"{clause.en}.", f"{clause.second}."
    it = "it" if what.agreement == THIRD else "they"
    er = {"m": "er", "n": "es"}.get(what.gender, "sie")
    price = Predicate("cost", rest=(f"{n} euros", f"{n} Euro"))
    quality = Predicate("be", rest=pick(rng, qualities))
    reason = pick(rng, (price, quality))
    why = build_clause(NP(it, (er, "", ""), what.agreement), "past", reason)
    main = build_clause(who, "past", Predicate("buy", ((what, ACC),)))
    return f"{main.en} because {why.en}.", f"{main.second}, weil {why.last}."


def generate_distinct_pairs() -> Iterator[EnDe]:
    """Without end; no side occurs twice."""
    rng = Random(DRAW_SEED)
    seen: set[str] = set()
    kinds = (draw_sentence,) * 9 + (draw_measure,)
    while True:
        draw = pick(rng, kinds)
        en, de = draw(rng)
        en = en[0].upper() + en[1:]
        de = de[0].upper() + de[1:]
        for separate, contracted in CONTRACTED:
            de = de.replace(separate, contracted)
        has_size = len(en.split()) in SENTENCE_WORDS and len(de.split()) in SENTENCE_WORDS
        if has_size and en not in seen and de not in seen:
            seen.update((en, de))
            yield en, de


def make_text() -> str:
    pairs = islice(generate_distinct_pairs(), N_PAIRS)
    return "".join(f"{en}\t{de}\n" for en, de in pairs)


if __name__ == "__main__":
    packed = lzma.compress(make_text().encode(), preset=9 | lzma.PRESET_EXTREME)
    Path(sys.argv[1]).write_bytes(packed)
