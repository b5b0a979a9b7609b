"""The embedded English-German corpus: a small synchronous grammar with real words, to try the whole toolkit
offline, in minutes, on a CPU. It has what makes German hard (gender, case, adjective endings, verb-second and
verb-final order, separable verbs, names and numbers to copy) but no free choice: always, an English sentence
has one translation, so a model that learned the grammar scores BLEU near 100, and no sentence occurs twice.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from random import Random
from typing import NamedTuple, TypeVar

SPLITS = ("train", "valid", "test")
DRAWN = {
    "test": (0, 500),
    "valid": (500, 1000),
    "train": (1000, 21000),
}  # held-out text comes first, at once
N_WORDS = range(4, 17)  # of a sentence, in either language
SEED = 170603762

T = TypeVar("T")
Pair = tuple[str, str]  # English, German
Row = Sequence[str]  # of a table below; mostly English, German
NOTHING = ("", "")
NOM, ACC, DAT = range(3)
THIRD, PLURAL = (
    1,
    2,
)  # he, she, it; we, they and the polite you, which share a German form. And 0 is I.


# ---- lexicon: no weak nouns (Junge, Student), no English word whose translation its context leaves open


@cache
def rows(table: str) -> list[list[str]]:
    """Commas end rows, spaces end cells; a space within a cell is written _."""
    return [[cell.replace("_", " ") for cell in row.split()] for row in table.split(",")]


PERSONAL = rows(
    "old alt, young jung, friendly freundlich, tired müde, clever klug, famous berühmt, poor arm"
)
LOOKS = rows(
    "old alt, new neu, big groß, small klein, beautiful schön, red rot, green grün, black schwarz, "
    "white weiß, expensive teuer, cheap billig, heavy schwer"
)
EDIBLE = rows("warm warm, cold kalt, fresh frisch, good gut, small klein, expensive teuer")
KIN = rows(
    "mother f Mutter Mütter, father m Vater Väter, sister f Schwester Schwestern, son m Sohn Söhne, "
    "brother m Bruder Brüder, aunt f Tante Tanten, friend m Freund Freunde, child n Kind Kinder"
)
PEOPLE = KIN[-2:] + rows(
    "man m Mann Männer, woman f Frau Frauen, girl n Mädchen Mädchen, teacher m Lehrer Lehrer, "
    "doctor m Arzt Ärzte, nurse f Krankenschwester Krankenschwestern"
)
PLACES = rows(
    "garden m Garten Gärten, kitchen f Küche Küchen, school f Schule Schulen, house n Haus Häuser, "
    "church f Kirche Kirchen, forest m Wald Wälder, hotel n Hotel Hotels, village n Dorf Dörfer"
)
DEEDS = tuple(
    (rows(verbs)[0], qualities, rows(nouns))
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
VERBS = {
    row[0]: row
    for row in rows(
        "buy bought bought kaufen kauft kaufte gekauft, sell sold sold verkaufen verkauft verkaufte verkauft, "
        "find found found finden findet fand gefunden, look_for looked_for looked_for suchen sucht suchte "
        "gesucht, order ordered ordered bestellen bestellt bestellte bestellt, write wrote written schreiben "
        "schreibt schrieb geschrieben, eat ate eaten essen isst aß gegessen, borrow borrowed borrowed "
        "aus-leihen leiht lieh geliehen, open opened opened auf-machen macht machte gemacht, close closed "
        "closed zu-machen macht machte gemacht, repair repaired repaired reparieren repariert reparierte "
        "repariert, see saw seen sehen sieht sah gesehen, visit visited visited besuchen besucht besuchte "
        "besucht, call called called an-rufen ruft rief gerufen, invite invited invited ein-laden lädt lud "
        "geladen, collect collected collected ab-holen holt holte geholt, help helped helped helfen hilft half "
        "geholfen, wait_for waited_for waited_for warten wartet wartete gewartet, speak_with spoke_with "
        "spoken_with sprechen spricht sprach gesprochen, give gave given geben gibt gab gegeben, show showed "
        "shown zeigen zeigt zeigte gezeigt, send sent sent schicken schickt schickte geschickt, work worked "
        "worked arbeiten arbeitet arbeitete gearbeitet, sleep slept slept schlafen schläft schlief geschlafen, "
        "cost cost cost kosten kostet kostete gekostet, run ran run laufen läuft lief gelaufen, travel traveled "
        "traveled reisen reist reiste gereist, come came come kommen kommt kam gekommen, arrive arrived arrived "
        "an-kommen kommt kam gekommen, be was been sein ist war gewesen, say said said sagen sagt sagte gesagt, "
        "know knew known wissen weiß wusste gewusst, ask asked asked fragen fragt fragte gefragt, start started "
        "started an-fangen fängt fing gefangen, forget forgot forgotten vergessen vergisst vergaß vergessen"
    )
}
WITH_SEIN = ("run", "travel", "come", "arrive", "be")  # in the perfect, where others have haben
MEETINGS = rows("visit 1, invite 1, call 1, collect 1, help 2, wait_for 1 auf, speak_with 2 mit")
WAYS = rows(
    "run to zu 2, run into in 1, run through durch 1, come into in 1, work in in 2, "
    "sleep behind hinter 2, travel to nach, come from aus, arrive in in"
)  # no case: city

NAMES = "Anna Peter Maria Paul Julia Martin Laura David Emma Karl Eva Robert Nina Clara Simon Ida".split()
CITIES = "Berlin Hamburg London Paris Madrid Boston Dresden Leipzig Bremen Oslo".split()
STARTS, MIDDLES, ENDS, TOWN_ENDS = rows(  # no name ends in -s, whose German genitive would be Hans'
    "Ba Bel Da Del Fo Gri Hel Jo Ka Kir Lo Mi Nor Pe Ra Ste Tu Vel Wi, bi da fe lo ma ne ri so ta ti vu wa, "
    "bert dan ko lin mar na nik ro sa ta wen win, burg dorf feld heim stadt berg"
)
PRONOUNS = rows(
    "I 0 ich - -, he 1 er - -, she 1 sie - -, we 2 wir - -, they 2 sie - -"
)  # with the agreement
OBJECTS = rows(
    "me 0 - mich mir, him 1 - ihn ihm, us 2 - uns uns, them 2 - sie ihnen"
)  # "her" only owns
NUMBERS = rows(
    "two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht, nine neun"
)
MODALS = {
    "will": ("werde", "wird", "werden"),
    "can": ("kann", "kann", "können"),  # "could": konnte, könnte
    "must": ("muss", "muss", "müssen"),
    "should": ("sollte", "sollte", "sollten"),
}
TIMES = {
    "present": "today heute, every_day jeden_Tag, every_Monday jeden_Montag, every_Friday jeden_Freitag",
    "past": "yesterday gestern, last_week letzte_Woche, last_summer letzten_Sommer",
}
LATER = "tomorrow morgen, tonight heute_Abend, next_week nächste_Woche, on_Monday am_Montag"
MODIFIERS = {"": "", "not": "nicht", "never": "nie", "already": "schon"}


# ---- inflection

STRONG = {
    "m": ("er", "en", "em"),
    "f": ("e", "e", "er"),
    "n": ("es", "es", "em"),
    "p": ("e", "e", "en"),
}
WEAK = {
    "m": ("e", "en", "en"),
    "f": ("e", "e", "en"),
    "n": ("e", "e", "en"),
    "p": ("en", "en", "en"),
}
MIXED = WEAK | {
    "m": ("er", "en", "en"),
    "n": ("es", "es", "en"),
}  # of adjectives after ein, kein, mein
EIN = STRONG | {"m": ("", "en", "em"), "n": ("", "", "em")}  # of ein, kein, mein themselves
DER = STRONG | {"f": ("ie", "ie", "er"), "n": ("as", "as", "em"), "p": ("ie", "ie", "en")}
BARE = dict.fromkeys("mfnp", ("", "", ""))
DETERMINERS = {  # English: the German stem, its endings, those of an adjective after it
    "the": ("d", DER, WEAK),
    "this": ("dies", STRONG, WEAK),
    **{en: (de, BARE, STRONG) for en, de in NUMBERS},
    **{
        en: (de, EIN, MIXED)
        for en, de in rows("a ein, no kein, my mein, his sein, her ihr, our unser")
    },
}
KINDS = {"no": "negative", **dict.fromkeys(("a", *(en for en, _ in NUMBERS)), "indefinite")}
CONTRACTED = rows("_in_dem_ _im_, _in_das_ _ins_, _zu_dem_ _zum_, _zu_der_ _zur_")


class NP(NamedTuple):
    en: str
    de: tuple[str, str, str]  # by case
    agreement: int = THIRD
    kind: str = (
        "definite"  # or indefinite, negative (kein), pronoun: it decides the place of an object
    )
    gender: str = ""  # m, f, n, and p for every plural


def join(*parts: str) -> str:
    return " ".join(filter(None, parts))


def decline(determiner: str, noun: Row, adjective: Row = NOTHING, is_plural: bool = False) -> NP:
    """The determiner is an English one ("no" for the a of `not ... a`), a number word, or an owner's name."""
    word, gender, german, german_plural = noun
    stem, own, endings = DETERMINERS.get(determiner, (determiner + "s", BARE, STRONG))
    en = determiner if determiner in DETERMINERS else determiner + "'s"
    if is_plural:
        word, gender, german, en = (
            PLURALS.get(word, word + "s"),
            "p",
            german_plural,
            PLURALS.get(en, en),
        )
        stem, own, endings = ("", BARE, STRONG) if determiner == "a" else (stem, own, endings)
    words = join(adjective[0], word)
    en = "an" if en in ("a", "no") and words[0] in "aeiou" else "a" if en == "no" else en
    nouns = (german, german, german + "n" if is_plural and german[-1] not in "ns" else german)
    like = (
        adjective[1].removesuffix("e").replace("teuer", "teur")
    )  # müde: der müde; teuer: der teure
    nom, acc, dat = (
        join(stem + article, like and like + ending, inflected)
        for article, ending, inflected in zip(own[gender], endings[gender], nouns, strict=True)
    )
    kind = KINDS.get(determiner, "definite")
    return NP(join(en, words), (nom, acc, dat), PLURAL if is_plural else THIRD, kind, gender)


@cache
def conjugate(base: str, tense: str, agreement: int) -> tuple[str, str, str, str, str, str]:
    """As in: he PLAIN, AUX he REST; er FINITE ... TAIL, weil er ... LAST. Tense "to" is the infinitive."""
    _, past, done, infinitive, third, preterite, participle = VERBS[base]
    prefix, _, bare = infinitive.rpartition("-")
    be, bin = ("am", "is", "are")[agreement], ("bin", "ist", "sind")[agreement]
    do, has = ("does", "has") if agreement == THIRD else ("do", "have")
    if tense == "to":
        return f"to {base}", "", "", "", "", f"{prefix}zu{bare}" if prefix else f"zu {bare}"
    if tense in MODALS:
        finite, tail = MODALS[tense][agreement], prefix + bare
        return f"{tense} {base}", tense, base, finite, tail, f"{tail} {finite}"
    if tense == "perfect":
        finite, tail = (
            bin if base in WITH_SEIN else ("habe", "hat", "haben")[agreement],
            prefix + participle,
        )
        return f"{has} {done}", has, done, finite, tail, f"{tail} {finite}"
    if tense == "past":
        plain, do, be = past, "did", "were" if agreement == PLURAL else "was"
        finite = (
            preterite
            if agreement != PLURAL
            else preterite + ("n" if preterite.endswith("e") else "en")
        )
    else:
        head, _, particle = base.partition(" ")
        plain = join(head + "s", particle) if agreement == THIRD else base
        first = bare[:-1] if third.endswith("t") else third  # ich kaufe, but ich weiß
        finite = bin if base == "be" else (first, third, bare)[agreement]
    return (
        (be, be, "", finite, "", finite)
        if base == "be"
        else (plain, do, base, finite, prefix, prefix + finite)
    )


# ---- clauses

Predicate = tuple[
    str, Sequence[tuple[NP, int]], Row
]  # English verb, objects with their case, the rest


class Clause(NamedTuple):
    en: str  # he buys it
    asked: str  # does he buy it
    second: str  # er kauft es
    first: str  # (heute) kauft er es
    last: str  # (weil) er es kauft


def clause(
    subject: NP, tense: str, what: Predicate, modifier: str = "", time: Row = NOTHING
) -> Clause:
    """In German: pronouns, time, definite objects, nicht, the rest; kein is of the rest, and spares nicht."""
    verb, objects, (en_rest, de_rest) = what
    plain, aux, infinite, finite, tail, last = conjugate(verb, tense, subject.agreement)
    said = join(aux, modifier, infinite).replace("can not", "cannot") if modifier else plain
    en = join(*(phrase.en for phrase, _ in objects), en_rest, time[0])
    slots = {"pronoun": "", "definite": "", "indefinite": "", "negative": ""}
    for phrase, case in objects:
        slots[phrase.kind] = join(slots[phrase.kind], phrase.de[case])
    pronoun, definite, indefinite, negative = slots.values()
    middle = join(
        time[1], definite, "" if negative else MODIFIERS[modifier], indefinite, negative, de_rest
    )
    er = subject.de[NOM]
    return Clause(
        join(subject.en, said, en),
        join(aux, subject.en, modifier, infinite, en),
        join(er, finite, pronoun, middle, tail),
        join(finite, pronoun, er, middle, tail),
        join(er, pronoun, middle, last),
    )


def pick(rng: Random, items: Sequence[T]) -> T:
    return items[
        int(rng.random() * len(items))
    ]  # rng.choice may change between Python versions; this cannot


def name(rng: Random, known: Row = NAMES, ends: Row = ENDS) -> str:
    """One in five is made of syllables: more than training can show."""
    made = pick(rng, STARTS) + pick(rng, MIDDLES) + pick(rng, ends) if rng.random() < 0.2 else ""
    return made or pick(rng, known)


def noun_phrase(
    rng: Random, determiners: str, nouns: Sequence[Row], adjectives: Sequence[Row]
) -> NP:
    """Among the determiners, 2 stands for a number and A for the genitive of a name."""
    which, is_plural = pick(rng, determiners.split()), rng.random() < 0.2
    determiner = pick(rng, NUMBERS)[0] if which == "2" else name(rng) if which == "A" else which
    adjective = pick(rng, adjectives) if rng.random() < 0.35 else NOTHING
    return decline(determiner, pick(rng, nouns), adjective, which == "2" or is_plural)


def person(rng: Random, pronouns: Sequence[Row] = (), is_definite: bool = False) -> NP:
    chance, who = rng.random(), name(rng)
    if pronouns and chance < 0.3:
        en, agreement, nom, acc, dat = pick(rng, pronouns)
        return NP(en, (nom, acc, dat), int(agreement), "pronoun")
    if chance < 0.5:
        return NP(who, (who, who, who))
    if chance < 0.7:
        return noun_phrase(rng, "my his her our", KIN, PERSONAL)
    return noun_phrase(rng, "the this" if is_definite else "the the this a", PEOPLE, PERSONAL)


def predicate(rng: Random, subject: NP, is_negated: bool, is_request: bool) -> Predicate:
    chance = rng.random() * (0.7 if is_request else 1.0)  # a request is for what comes last
    if chance > 0.82:
        verb, en, de, *cases = pick(rng, WAYS)
        if not cases:
            city = name(rng, CITIES, TOWN_ENDS)
            return verb, (), (f"{en} {city}", f"{de} {city}")
        place = noun_phrase(rng, "the the a", PLACES, LOOKS[:5])
        return verb, (), (f"{en} {place.en}", f"{de} {place.de[int(cases[0])]}")
    if chance > 0.75:
        return "be", (), pick(rng, PERSONAL)
    verbs, qualities, nouns = pick(rng, DEEDS if chance > 0.35 else DEEDS[:5])  # doors are no gifts
    what = noun_phrase(
        rng, "the no my" if is_negated else "the the a a my her this A 2", nouns, qualities
    )
    if chance > 0.35:
        return pick(rng, verbs[:2] if is_request else verbs), ((what, ACC),), NOTHING
    pronouns = () if subject.kind == "pronoun" else OBJECTS  # no "I see me"
    whom = person(
        rng, pronouns, is_negated or chance > 0.2
    )  # no einem Kind das Buch, das Buch einem Kind
    if chance > 0.2:
        return pick(rng, ("give", "show", "send")), ((whom, DAT), (what, ACC)), NOTHING
    verb, case, *preposition = pick(rng, MEETINGS)
    if preposition:
        return verb, (), (whom.en, f"{preposition[0]} {whom.de[int(case)]}")
    return verb, ((whom, int(case)),), NOTHING


def tell(
    rng: Random, subject: NP, tense: str, time: Row = NOTHING, is_request: bool = False
) -> Clause:
    modifiers = {"to": "-", "must": "-", "perfect": "- - not never already"}.get(
        tense, "- - - - not"
    )
    modifier = pick(rng, modifiers.split()).strip("-")  # no "must not", which is darf nicht
    what = predicate(rng, subject, modifier == "not", is_request or tense == "to")
    return clause(subject, tense, what, modifier, time)


# ---- sentences

SUBJECTS = {
    "you": NP("you", ("Sie", "", ""), PLURAL, "pronoun"),
    "who": NP("who", ("wer", "", "")),
    "please": NP("", ("Sie", "", ""), PLURAL, "pronoun"),
    "to": NP("", ("",) * 3, THIRD, "pronoun"),
}
ANY, DATED = "past present perfect will can must should", "past past present will can must should"
ASKED = "present perfect will can must should"  # not past, where hat er gekauft vies with kaufte er
PATTERNS = tuple(
    pattern
    for weight, *pattern in (  # weight; tenses of clauses a and b; what is set about a
        (8, ANY, "", "", "{a.en}.", "{a.second}."),
        (6, DATED, "", "dated", "{a.en}.", "{a.second}."),
        (6, DATED, "", "", "{time[0]} {a.en}.", "{time[1]} {a.first}."),
        (2, ASKED, "", "", "{a.asked}?", "{a.first}?"),
        (2, ASKED, "", "you", "{a.asked}?", "{a.first}?"),
        (1, ASKED, "", "", "why {a.asked}?", "warum {a.first}?"),
        (2, ASKED, "", "who", "{a.en}?", "{a.second}?"),
        (3, "present", "", "please", "please {a.en}.", "bitte {a.first}."),
        (
            4,
            "past present will",
            "past present",
            "",
            "{a.en} because {b.en}.",
            "{a.second}, weil {b.last}.",
        ),
        (2, "past", "past", "", "when {b.en}, {a.en}.", "als {b.last}, {a.first}."),
        (1, "past", "past", "", "{a.en} when {b.en}.", "{a.second}, als {b.last}."),
        (2, "will can must", "present", "", "if {b.en}, {a.en}.", "wenn {b.last}, {a.first}."),
        (1, "will can", "present", "", "{a.en} if {b.en}.", "{a.second}, wenn {b.last}."),
        (1, "past", "past", "", "although {b.en}, {a.en}.", "obwohl {b.last}, {a.first}."),
        (2, "past", "past perfect", "", "{a.en}, but {b.en}.", "{a.second}, aber {b.second}."),
        (
            3,
            "present",
            "past perfect will",
            "say know",
            "{a.en} that {b.en}.",
            "{a.second}, dass {b.last}.",
        ),
        (
            2,
            "present",
            "past present will",
            "ask",
            "{a.en} whether {b.en}.",
            "{a.second}, ob {b.last}.",
        ),
        (
            3,
            "present past perfect",
            "to",
            "start forget",
            "{a.en} {b.en}.",
            "{a.second}, {b.last}.",
        ),
    )
    for _ in range(weight)
)


def patterned(rng: Random) -> Pair:
    tenses, inside, fixed, english, german = pick(rng, PATTERNS)
    tense, subject = pick(rng, tenses.split()), SUBJECTS.get(fixed) or person(rng, PRONOUNS)
    time, year = pick(rng, rows(TIMES.get(tense, LATER))), pick(rng, range(1950, 2025))
    if tense == "past" and rng.random() < 0.25:
        time = [f"in {year}", f"im Jahr {year}"]
    verbs = [verb for verb in fixed.split() if verb in VERBS]
    a = b = (
        clause(subject, tense, (pick(rng, verbs), (), NOTHING))
        if verbs
        else (tell(rng, subject, tense, time if fixed == "dated" else NOTHING, fixed == "please"))
    )
    if inside:
        b = tell(rng, SUBJECTS.get(inside) or person(rng, PRONOUNS), pick(rng, inside.split()))
    return english.format(a=a, b=b, time=time), german.format(a=a, b=b, time=time)


def measured(rng: Random) -> Pair:
    """Numbers, and a pronoun that has the gender of its noun."""
    (_, qualities, nouns), who, n = pick(rng, DEEDS), person(rng), pick(rng, range(2, 100))
    what = noun_phrase(rng, "the this my", nouns, qualities)
    if rng.random() < 0.3:
        told = clause(
            who, pick(rng, ("present", "past")), ("be", (), (f"{n} years old", f"{n} Jahre alt"))
        )
        return f"{told.en}.", f"{told.second}."
    it, er = (
        "it" if what.agreement == THIRD else "they",
        {"m": "er", "n": "es"}.get(what.gender, "sie"),
    )
    worth = pick(rng, (("cost", (), (f"{n} euros", f"{n} Euro")), ("be", (), pick(rng, qualities))))
    why = clause(NP(it, (er, "", ""), what.agreement), "past", worth)
    main = clause(who, "past", ("buy", ((what, ACC),), NOTHING))
    return f"{main.en} because {why.en}.", f"{main.second}, weil {why.last}."


def distinct() -> Iterator[Pair]:
    rng, seen = Random(SEED), set[str]()
    while True:
        en, de = (
            side[0].upper() + side[1:] for side in pick(rng, (patterned,) * 9 + (measured,))(rng)
        )
        for spelled, spoken in CONTRACTED:
            de = de.replace(spelled, spoken)
        if len(en.split()) in N_WORDS and len(de.split()) in N_WORDS and seen.isdisjoint((en, de)):
            seen.update((en, de))
            yield en, de


def generate_pairs(split: str) -> Iterator[Pair]:
    """The sentence pairs of one split, English first."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} of the demo corpus: use one of {', '.join(SPLITS)}")
    return islice(distinct(), *DRAWN[split])
