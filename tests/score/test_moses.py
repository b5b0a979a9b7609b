"""Our Moses tokens against the Perl scripts of 2017: 16,000 lines, half of them made to be awkward,
and 20 BLEU scores.

tests/golden holds what Perl printed (scripts/make_golden.py). Inputs are made again here and held
against their digest first, so that a generator that drifted is not taken for a tokeniser that did.
No Perl is needed, except for a comparison with each script alone, which is skipped without it.
"""

import lzma
import operator
import os
import re
import shutil
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from pytest import approx, mark
from sacrebleu.metrics.bleu import BLEU
from support.awkward import awkward_lines, real_lines
from support.checkout import ROOT
from support.needs import REAL_TEXT

from nmt.system.files import read_json
from nmt.system.strict_json import Fields

sys.path.insert(0, str(ROOT / "scripts"))

from make_golden import GOLDEN, LANGUAGES, SEEDS, N, digest, line_digest, pairs, perl  # noqa: E402

from nmt.score.moses import (  # noqa: E402
    ABBREVIATIONS,
    make_quotes_plain,
    make_tokenizer,
    replace_unicode_punctuation,
    split_compounds,
)

FACTS: Fields = read_json(GOLDEN / "moses.json")


def unpacked(name: str) -> list[str]:
    return lzma.decompress((GOLDEN / name).read_bytes()).decode().split("\n")[:-1]


@cache
def golden(language: str) -> tuple[list[str], list[str]]:
    """Perl's tokens, and its tokens with compounds split."""
    lines = unpacked(f"moses.{language}.xz")
    assert digest(lines) == FACTS["made"][language]["outputs"], (
        f"moses.{language}.xz is not the file of moses.json"
    )
    return lines[:N], lines[N:]


@cache
def made(language: str) -> list[str]:
    lines = awkward_lines(language, N, SEEDS[language])
    assert digest(lines) == FACTS["made"][language]["inputs"], (
        "tests/support/awkward.py makes other lines than the golden files were made of; the tokeniser is not to blame"
    )
    return lines


def differing(
    inputs: list[str], ours: list[str], expected: list[str]
) -> list[tuple[str, str, str]]:
    return [triple for triple in zip(inputs, ours, expected, strict=True) if triple[1] != triple[2]]


@mark.parametrize("language", LANGUAGES)
def test_tokens_of_awkward_lines_are_perls(language: str) -> None:
    """As the golden files are made: replace-unicode-punctuation.perl, tokenizer.perl, and compounds
    split.
    """
    lines, tokenize = made(language), make_tokenizer(language)
    tokens = [tokenize(replace_unicode_punctuation(line)) for line in lines]
    expected, expected_split = golden(language)
    assert differing(lines, tokens, expected) == []
    assert differing(lines, list(map(split_compounds, tokens)), expected_split) == []
    assert sum(map(operator.ne, expected, expected_split)) > N / 4


@mark.parametrize("language", LANGUAGES)
def test_tokens_of_real_lines_are_perls(language: str) -> None:
    try:
        lines = real_lines(REAL_TEXT, language, N)
    except FileNotFoundError as error:
        pytest.skip(f"no {error.filename}; NMT_TEST_DATA names the folder of real text")
    assert digest(lines) == FACTS["real"]["inputs"][language], (
        f"{REAL_TEXT} holds other text than the digests were made of"
    )
    digests = unpacked("moses.real.xz")
    assert digest(digests) == FACTS["real"]["outputs"]
    tokenize, first = make_tokenizer(language), LANGUAGES.index(language) * N
    tokens = [tokenize(replace_unicode_punctuation(line)) for line in lines]
    ours = [line_digest(line, split_compounds(line)) for line in tokens]
    assert differing(tokens, ours, digests[first : first + N]) == []


def test_bleu_is_multi_bleus() -> None:
    metric = BLEU(tokenize="none", force=True, smooth_method="none")
    systems = pairs({language: golden(language)[1] for language in LANGUAGES})
    scores = [metric.corpus_score(hypotheses, [references]) for hypotheses, references in systems]
    assert [score.score for score in scores] == [
        approx(expected, abs=0.0051) for expected in FACTS["multi_bleu"]
    ]  # Perl prints two decimals
    ratios = [score.sys_len / score.ref_len for score in scores]
    assert (
        len(scores) == 20
        and min(ratios) < 0.9
        and max(ratios) > 1.05
        and FACTS["multi_bleu"].count(0.0) > 1
    )
    assert min(len(references) for _, references in systems) < 10 and max(FACTS["multi_bleu"]) > 50


@mark.parametrize(
    "line, tokens",
    [
        ("１２", "１２"),
        ("„Ja“, sagte er … d’été", "„ Ja “ , sagte er … d ’ été"),  # Unicode punctuation stays
        ("Was\x1cser\x0b und\x85Öl", "Wasser und Öl"),
        ("漢字 \U00020000\U00020001 हिन्दी", "漢字 \U00020000\U00020001 हिन ् दी"),
        ("\xa0", "\xa0"),  # Perl prints a blank line as it is
        ("\x1c \x1c", ""),
        ("a.b. c", "a.b. c"),
        ("a,,5 5,,6", "a , ,5 5 , , 6"),
    ],
)
def test_where_perl_surprises(line: str, tokens: str) -> None:
    assert make_tokenizer("de")(line) == tokens


@mark.parametrize(
    "line, replaced",
    [
        ("“Ja”, „nein‟ «a» ‚b‘", '"Ja", „nein‟ «a» ‚b‘'),  # low quotes and guillemets stay
        ("d’été … － ━ –", "d'été ... － - –"),
        ("１２", '"2'),  # as it was until 2019: the full-width 1 was taken for a quote
        ("Ende。   Neu．Dann", "Ende. Neu. Dann"),
    ],
)
def test_unicode_punctuation_that_is_replaced(line: str, replaced: str) -> None:
    assert replace_unicode_punctuation(line) == replaced


@mark.parametrize(
    "line, tokens",
    [
        ("est-à-dire", "est @-@ à @-@ dire"),  # the lookahead leaves the à for the next hyphen
        ("Vor- und -nach, a--b 1-2", "Vor- und -nach , a--b 1 @-@ 2"),
        ("L'Est-Ouest.", "L&apos; Est @-@ Ouest ."),
    ],
)
def test_aggressive_splitting_is_at_hyphens_inside_words(line: str, tokens: str) -> None:
    assert make_tokenizer("fr", is_aggressive=True)(line) == tokens


# The Perl scripts themselves, of any date from June 2017 to October 2018
SCRIPTS = os.environ.get("NMT_MOSES", "")
NEEDS_SCRIPTS = mark.skipif(
    not (SCRIPTS and shutil.which("perl")),
    reason="needs Perl, and NMT_MOSES must name the folder scripts/ of a mosesdecoder of 2017",
)


@NEEDS_SCRIPTS
@mark.parametrize("language", LANGUAGES)
@mark.parametrize("options", [(), ("-a",)])
def test_each_script_alone_gives_our_lines(language: str, options: tuple[str, ...]) -> None:
    lines, folder = made(language), Path(SCRIPTS, "tokenizer")
    tokenize = make_tokenizer(language, is_aggressive="-a" in options)
    tokens = perl(lines, str(folder / "tokenizer.perl"), "-q", "-l", language, *options)
    assert differing(lines, [tokenize(line) for line in lines], tokens) == []
    replaced = perl(lines, str(folder / "replace-unicode-punctuation.perl"))
    assert differing(lines, [replace_unicode_punctuation(line) for line in lines], replaced) == []


def test_english_knows_abbreviations_of_numbers() -> None:
    assert (
        make_tokenizer("en")("No. 5, No. a, No. B, No. ٣. don't")
        == "No. 5 , No. a , No . B , No . ٣. don &apos;t"
    )


def test_compounds_are_split_byte_by_byte() -> None:
    assert split_compounds("A-B-C") == "A ##AT##-##AT## B-C"
    assert split_compounds("A-Ü-C") == "A ##AT##-##AT## Ü ##AT##-##AT## C"
    assert split_compounds("Vor- und -nach - a--b") == "Vor- und -nach - a ##AT##-##AT## -b"
    assert split_compounds("\udc80-x") == "\udc80 ##AT##-##AT## x"  # what is no text passes through


def test_double_quotes_become_plain_and_single_ones_stay() -> None:
    assert make_quotes_plain("„a“ “b” «c» »d« ‟e”") == '"a" "b" "c" "d" "e"'
    assert make_quotes_plain("‚a‘ d’été ‹x› 'y' \"z\"") == "‚a‘ d’été ‹x› 'y' \"z\""
    assert make_tokenizer("de")(make_quotes_plain("„Ja“")) == "&quot; Ja &quot;"


def test_the_lists_of_abbreviations_are_named_with_their_version() -> None:
    assert re.fullmatch(r"sacremoses-[\d.]+", ABBREVIATIONS)
    assert ABBREVIATIONS.endswith(version("sacremoses"))
