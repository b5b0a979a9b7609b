"""The scorer against outside truths: sacreBLEU called directly, and BLEU written out by hand as multi-bleu.perl counts.

Tokenised lines were worked out by hand from the Moses scripts of 2017. Each refusal guards against a number that would
look like a score and be none.
"""

import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import sacrebleu

from nmt.errors import UserError
from nmt.score.bleu import Score, bleu, chrf, paper_bleu, paper_tokens

REFERENCES = [
    "Das Nord-Süd-Gefälle wächst seit 1990, sagte er.",
    "Die Katze sitzt auf der Matte, und der Hund schläft.",
    '"Wir kommen um 15.30 Uhr", schrieb Frau O\'Neill an die Müller-Lüdenscheidt GmbH & Co.',
    "Es kostet 1.000,50 Euro!",
]
HYPOTHESES = [
    "Das Nord-Süd-Gefälle wuchs seit 1990, sagt er.",
    "Die Katze saß auf der Matte und der Hund schläft.",
    '"Wir kommen um 15.30 Uhr", schrieb sie an die Müller-Lüdenscheidt GmbH & Co.',
    "Das kostet 1.000,50 Euro!",
]


def multi_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of tokenised lines: clipped n-gram counts summed over the corpus, no smoothing, brevity over the corpus."""
    correct, total = [0] * 4, [0] * 4
    n_hypothesis = n_reference = 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        words, gold = hypothesis.split(), reference.split()
        n_hypothesis, n_reference = n_hypothesis + len(words), n_reference + len(gold)
        for n in range(1, 5):
            found = Counter(tuple(words[i:i + n]) for i in range(len(words) - n + 1))
            known = Counter(tuple(gold[i:i + n]) for i in range(len(gold) - n + 1))
            correct[n - 1] += sum(min(count, known[gram]) for gram, count in found.items())
            total[n - 1] += sum(found.values())
    if 0 in correct:
        return 0.0
    mean = sum(math.log(c / t) for c, t in zip(correct, total, strict=True)) / 4
    return 100 * math.exp(min(0.0, 1 - n_reference / n_hypothesis) + mean)


def damaged(lines: Sequence[str], seed: int) -> list[str]:
    """Lines with words dropped and doubled: hypotheses shorter and longer than their references."""
    rng = random.Random(seed)
    return [" ".join(w for word in line.split() for w in [word] * rng.choice([0, 1, 1, 1, 1, 2])) for line in lines]


@pytest.mark.parametrize("tokenize", ["13a", "intl", "char", "none"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_is_sacrebleus(tokenize: str, lowercase: bool) -> None:
    truth = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize=tokenize, lowercase=lowercase)
    assert bleu(HYPOTHESES, REFERENCES, tokenize, lowercase).value == truth.score


def test_chrf_is_sacrebleus() -> None:
    assert chrf(HYPOTHESES, REFERENCES).value == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score


def test_case_counts_unless_asked_otherwise() -> None:
    shouted = [line.upper() for line in REFERENCES]
    assert bleu(shouted, REFERENCES).value < 50
    assert bleu(shouted, REFERENCES, lowercase=True).value == pytest.approx(100)


@pytest.mark.parametrize("seed", range(10))
def test_paper_bleu_is_multi_bleu_of_paper_tokens(seed: int) -> None:
    hypotheses, references = damaged(HYPOTHESES * 3, seed), REFERENCES * 3
    split = paper_tokens("de")
    truth = multi_bleu([split(line) for line in hypotheses], [split(line) for line in references])
    assert 10 < truth < 90
    assert paper_bleu(hypotheses, references).value == pytest.approx(truth, abs=1e-9)


def test_paper_bleu_is_not_smoothed() -> None:
    assert paper_bleu(["der Hund"], ["der Hund bellt laut"]).value == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("line, tokens", [
    ('Er sagte: "Das ist gut."', "Er sagte : &quot; Das ist gut . &quot;"),
    ("“Ja”, sagte er …", "&quot; Ja &quot; , sagte er ..."),  # replace-unicode-punctuation
    ("„Ja“", "„ Ja &quot;"),  # it leaves the low quote alone: the reason why newstest2014's quotes were normalised
    ("Wie geht’s?", "Wie geht &apos; s ?"),
    ("Das Nord-Süd-Gefälle.", "Das Nord ##AT##-##AT## Süd ##AT##-##AT## Gefälle ."),
    ("A-B-C", "A ##AT##-##AT## B-C"),  # the B is used up by the first match, in Perl as here
    ("Vor- und Nachteile - oder", "Vor- und Nachteile - oder"),
    ("Es kostet 1.000,50 Euro.", "Es kostet 1.000,50 Euro ."),
    ("Rot, grün,blau", "Rot , grün , blau"),
    ("Dr. Meier kam am 3. Mai z.B. nicht.", "Dr. Meier kam am 3. Mai z.B. nicht ."),
    ("Ende ...", "Ende ..."),
    ("50% von [a|b] & <c>", "50 % von &#91; a &#124; b &#93; &amp; &lt; c &gt;"),
    (" a\u00a0 b\t", "a b"),
    ("", ""),
])
def test_paper_tokens(line: str, tokens: str) -> None:
    assert paper_tokens("de")(line) == tokens


def test_french_elision_stays_with_its_word() -> None:
    assert paper_tokens("fr")("C'est l'été.") == "C&apos; est l&apos; été ."


def test_identical_text_scores_100() -> None:
    for score in (bleu(REFERENCES, REFERENCES), chrf(REFERENCES, REFERENCES), paper_bleu(REFERENCES, REFERENCES)):
        assert score.value == pytest.approx(100, abs=1e-9), score


def test_signatures_say_how_it_was_counted() -> None:
    one = ["ein Satz"]
    release = re.escape(sacrebleu.__version__)
    for score, pattern in (
            (bleu(one, one), rf"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:{release}"),
            (bleu(one, one, "intl", True), rf"nrefs:1\|case:lc\|eff:no\|tok:intl\|smooth:exp\|version:{release}"),
            (chrf(one, one), rf"nrefs:1\|case:mixed\|eff:yes\|nc:6\|nw:0\|space:no\|version:{release}"),
            (paper_bleu(one, one), r"nrefs:1\|case:mixed\|eff:no\|tok:moses-2017\+atat\|lang:de\|sacremoses:[\d.]+"
                                   rf"\|smooth:none\|version:{release}")):
        assert re.fullmatch(pattern, score.signature), score


@pytest.mark.parametrize("score", [bleu, chrf, paper_bleu])
@pytest.mark.parametrize("n_hypotheses, n_references", [(2, 3), (3, 2), (0, 1), (1, 0), (0, 0)])
def test_unequal_and_empty_lists_are_refused(
        score: Callable[[Sequence[str], Sequence[str]], Score], n_hypotheses: int, n_references: int) -> None:
    with pytest.raises(UserError, match=rf"\b{n_hypotheses}\b.*\b{n_references}\b"):
        score(REFERENCES[:n_hypotheses], REFERENCES[:n_references])


def test_unknown_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'13b'.*13a"):
        bleu(["a"], ["a"], tokenize="13b")


def test_warning_about_tokenised_text_is_quiet_only_where_tokens_are_meant(caplog: pytest.LogCaptureFixture) -> None:
    tokenised = ["Das ist gut ."] * 100
    with caplog.at_level(logging.WARNING, "sacrebleu"):
        paper_bleu(tokenised, tokenised)
        bleu(tokenised, tokenised, tokenize="none")
        assert not caplog.records
        bleu(tokenised, tokenised)
    assert "forgot to detokenize" in caplog.text
