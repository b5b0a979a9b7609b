"""The readings of Table 2, end to end against the Perl pipelines that they stand for.

Six made outputs, three of each language, are scored by `compute_score` and, where there are Perl and
the scripts, by the scripts of both dates: the last of mosesdecoder before 29 June 2017 (dc42bcbd),
when the authors stated how they scored, and before 6 April 2018 (ae7aa6a9), when their script began to
replace Unicode punctuation. EXPECTED is what both printed.
"""

import os
import shutil
import sys
from pathlib import Path

from pytest import approx, mark
from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from make_golden import SPLIT, multi_bleu, perl  # noqa: E402

from nmt.score.metrics import compute_score, list_metrics  # noqa: E402

REFERENCES = {
    "de": [
        "„Der Nord-Süd-Tunnel kostet 1.250,75 Euro“, sagte sie – und lachte …",
        "Die 35-jährige Ärztin kam um 15.30 Uhr z.B. nicht ins ‚Café‘ am Ost-West-Platz.",
        "Wie geht’s der «alten» U-Bahn-Linie 7, fragt Dr. Weiß am 3. Mai?",
        "Das Wetter war gut; der Zug – ein neuer ICE – fuhr trotzdem nicht ab...",
        "Rund 3,5 % der Vor- und Nachteile sind laut “Umfrage” 10-20 Leuten egal!",
    ],
    "fr": [
        "« Le rendez-vous est fixé à 15 h 30 », dit-elle aujourd’hui – peut-être…",
        "L'Est-Ouest n'a coûté que 1 250,75 euros, c'est-à-dire 3,5 % du budget.",
        "Qu’est-ce qu'il y a là-bas, M. Dupont, au-dessus du “vieux” pont ?",
        "Jusqu'à 10-20 élèves attendaient l’autobus, mais personne n'est venu...",
        'Le porte-parole du sous-marin a répondu: "C\'est non."',
    ],
}
OUTPUTS = {
    "de, plain quotes": [
        '"Der Nord-Süd-Tunnel kostet 1.250,75 Euro", sagte sie - und lachte ...',
        "Die 35-jährige Ärztin kam um 15.30 Uhr z.B. nicht ins 'Café' am Ost-West-Platz.",
        'Wie geht\'s der "alten" U-Bahn-Linie 7, fragt Dr. Weiß am 3. Mai?',
        "Das Wetter war gut; der Zug - ein neuer ICE - fuhr trotzdem nicht ab...",
        'Rund 3,5 % der Vor- und Nachteile sind laut "Umfrage" 10-20 Leuten egal!',
    ],
    "de, typographic quotes": [
        "„Der Nord-Süd-Tunnel kostete 1.250,75 Euro“, sagte sie – und lachte …",
        "Die 35-jährige Frau kam um 15.30 Uhr z.B. nicht in das ‚Café‘ am Ost-West-Platz.",
        "Wie geht’s der «alten» U-Bahn-Linie 7, fragte Dr. Weiß am 3. Mai?",
        "Das Wetter war gut; der Zug – ein neuer ICE – fuhr aber nicht ab...",
        "Rund 3,5 % aller Vor- und Nachteile sind laut “Umfrage” 10-20 Menschen egal!",
    ],
    "de, mixed": [
        "“Der Nord-Süd-Tunnel kostet 1250.75 Euro”, sagte sie ... und lachte.",
        "Die 35 jährige Ärztin kam um 15:30 Uhr nicht ins „Café“ am Ost-West-Platz.",
        "Wie geht’s der “alten” U-Bahn Linie 7, fragt Dr. Weiß am 3. Mai?",
        "Das Wetter war gut; der Zug - ein neuer ICE – fuhr trotzdem nicht ab…",
        "Rund 3,5% der Vor- und Nachteile sind laut „Umfrage” 10–20 Leuten egal!",
    ],
    "fr, plain quotes": [
        '"Le rendez-vous est fixé à 15 h 30", dit-elle aujourd\'hui - peut-être...',
        "L'Est-Ouest n'a coûté que 1 250,75 euros, c'est-à-dire 3,5 % du budget.",
        "Qu'est-ce qu'il y a là-bas, M. Dupont, au-dessus du \"vieux\" pont ?",
        "Jusqu'à 10-20 élèves attendaient l'autobus, mais personne n'est venu...",
        'Le porte-parole du sous-marin a répondu: "C\'est non."',
    ],
    "fr, typographic quotes": [
        "« Le rendez-vous est fixé pour 15 h 30 », dit-il aujourd’hui – peut-être…",
        "L’Est-Ouest n’a coûté que 1 250,75 euros, c’est-à-dire 3,5 % des budgets.",
        "Qu’est-ce qu’il y a là-haut, M. Dupont, au-dessus du “vieux” pont ?",
        "Jusqu’à 10-20 enfants attendaient l’autobus, mais personne n’est venu…",
        "Le porte-parole du sous-marin a dit: « C’est non. »",
    ],
    "fr, mixed": [
        "“Le rendez vous est fixé à 15.30 h”, dit-elle aujourd'hui – peut être...",
        "L'Est-Ouest n'a coûté que 1.250,75 euros, c'est-à-dire 3.5% du budget.",
        "Qu'est-ce qu’il y a là-bas, M. Dupont, au dessus du «vieux» pont?",
        "Jusqu'à 10–20 élèves attendaient le bus, mais personne n'est venu.",
        "Le porte-parole du sous-marin a répondu : “C'est non”.",
    ],
}
# By each reading, in the order of list_metrics
EXPECTED = {
    "de, plain quotes": "61.02 68.65 68.65 82.8",
    "de, typographic quotes": "74.09 78.66 66.86 68.89",
    "de, mixed": "49.57 59.08 56.58 65.95",
    "fr, plain quotes": "74.94 80.05",
    "fr, typographic quotes": "50.61 61.51",
    "fr, mixed": "41.32 52.85",
}
SCRIPTS = os.environ.get("NMT_MOSES", "")
NEEDS_SCRIPTS = mark.skipif(
    not (SCRIPTS and shutil.which("perl")),
    reason="needs Perl, and NMT_MOSES must name the folder scripts/ of a mosesdecoder of 2017",
)


def read_expected(output: str) -> list[float]:
    return [float(value) for value in EXPECTED[output].split()]


@mark.parametrize("output", OUTPUTS)
def test_each_reading_is_what_perl_printed(output: str) -> None:
    language = output[:2]
    found = [
        compute_score(metric, OUTPUTS[output], REFERENCES[language], "made", "en-xx", 1).value
        for metric in list_metrics(language)
        if metric.reading
    ]
    assert found == approx(read_expected(output), abs=0.00501)


@NEEDS_SCRIPTS
@mark.parametrize("output", OUTPUTS)
def test_perl_prints_what_is_expected(output: str) -> None:
    assert score_with_perl(Path(SCRIPTS), output) == read_expected(output)


def score_with_perl(scripts: Path, output: str) -> list[float]:
    language = output[:2]
    texts, gold = OUTPUTS[output], REFERENCES[language]
    tokenizer = str(scripts / "tokenizer/tokenizer.perl")

    def tokenize(lines: list[str], *options: str) -> list[str]:
        return perl(lines, tokenizer, "-q", "-l", language, *options)

    def tokenize_and_split(lines: list[str]) -> list[str]:
        return perl(tokenize(lines), "-ple", SPLIT)

    tokenised = multi_bleu(scripts, tokenize(texts), tokenize(gold))
    if language == "fr":
        aggressive = multi_bleu(scripts, tokenize(texts, "-a"), tokenize(gold, "-a"))
        return [tokenised, aggressive]
    split, gold_split = tokenize_and_split(texts), tokenize_and_split(gold)
    replaced = perl(texts, str(scripts / "tokenizer/replace-unicode-punctuation.perl"), "-l", "de")
    later = tokenize_and_split(replaced)
    plain = perl(gold, "-CSD", "-Mutf8", "-pe", 's/[„“”‟«»]/"/g')
    return [
        tokenised,
        multi_bleu(scripts, split, gold_split),
        multi_bleu(scripts, later, gold_split),
        multi_bleu(scripts, later, tokenize_and_split(plain)),
    ]
