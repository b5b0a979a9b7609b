"""Our scores against figures that others published, so that a change of ours or of sacreBLEU's cannot move them unseen.

The cases are those of sacreBLEU's own tests (test/test_bleu.py, test_chrf.py, test_ter.py) that our settings cover;
figures of whole systems, counted by mteval-v13a, mteval-v14, chrF++.py and tercom, stand in its test.sh and need the
texts of WMT17 in a folder that NMT_WMT17 names.
"""

import os
from pathlib import Path

import pytest

from nmt.score.metrics import CHRF2, EDIT_RATE, HEADLINE, Metric, compute_score, make_bleu

WMT17 = os.environ.get("NMT_WMT17", "")
NEEDS_WMT17 = pytest.mark.skipif(
    not WMT17, reason="NMT_WMT17 names no folder with the WMT17 systems as plain text"
)


def value_of(metric: Metric, hypotheses: list[str], references: list[str]) -> float:
    return compute_score(metric, hypotheses, references, "anchors", "en-de").value


def wmt17(name: str) -> list[str]:
    return (Path(WMT17) / name).read_text("utf-8").removesuffix("\n").split("\n")


# test_bleu.py: test_raw_bleu_cases that no smoothing touches, and that empty translations are not left out.
@pytest.mark.parametrize(
    "hypotheses, references, value",
    [
        (["this is a test"], ["this is a test"], 100.0),
        (["this is a test", "another test"], ["ref1", "ref2"], 0.0),
        (["", "", ""], ["ref1", "ref2", "ref3"], 0.0),
    ],
)
@pytest.mark.parametrize("tokenize", ["13a", "intl", "none"])
def test_bleu(hypotheses: list[str], references: list[str], value: float, tokenize: str) -> None:
    assert value_of(make_bleu("BLEU", tokenize), hypotheses, references) == pytest.approx(
        value, abs=1e-6
    )


# test_chrf.py: test_cases_effective_order (where precision is recall, so that their beta of 3 gives what our 2 does)
# and those of test_cases that smoothing does not touch.
@pytest.mark.parametrize(
    "hypotheses, references, value",
    [
        (["a"], ["a"], 100.0),
        ([""], ["reference"], 0.0),
        (["a b c"], ["a b c"], 100.0),
        (["a b c"], ["abc"], 100.0),
        ([""], ["c"], 0.0),
        (["a", "b"], ["a", "c"], 50.0),
        (["aa"], ["ab"], 25.0),
        (["abcdefg"], ["hijklmnop"], 0.0),
        (["a"], ["b"], 0.0),
        ([""], ["ref"], 0.0),
    ],
)
def test_chrf(hypotheses: list[str], references: list[str], value: float) -> None:
    assert value_of(CHRF2, hypotheses, references) == pytest.approx(value, abs=1e-4)


# test_ter.py: test_cases; edits for each word of the reference, times 100.
@pytest.mark.parametrize(
    "hypotheses, references, value",
    [
        (["aaaa bbbb cccc dddd"], ["aaaa bbbb cccc dddd"], 0),
        (["dddd eeee ffff"], ["aaaa bbbb cccc"], 100),
        ([""], ["a"], 100),
        (["a"], [""], 100),
        ([""], [""], 0),
        (["d e f g h a b c"], ["a b c d e f g h"], 12.5),
    ],
)
def test_ter(hypotheses: list[str], references: list[str], value: float) -> None:
    assert value_of(EDIT_RATE, hypotheses, references) == pytest.approx(value, abs=1e-3)


# test.sh: MTEVAL (13a) and TER of newstest2017 en-de, MTEVAL14 (intl), CHRF.
@NEEDS_WMT17
@pytest.mark.parametrize(
    "name, value",
    [
        ("C-3MA.4959", 22.67),
        ("FBK.4870", 26.33),
        ("KIT.4950", 26.08),
        ("LIUM-NMT.4900", 26.60),
        ("LMU-nmt-reranked.4934", 27.11),
        ("LMU-nmt-single.4893", 26.56),
        ("PROMT-Rule-based.4735", 16.61),
        ("RWTH-nmt-ensemble.4921", 26.02),
        ("SYSTRAN.4847", 26.71),
        ("TALP-UPC.4834", 21.24),
        ("online-A.0", 20.80),
        ("online-B.0", 26.65),
        ("online-F.0", 15.45),
        ("online-G.0", 18.16),
        ("uedin-nmt.4722", 28.30),
        ("xmu.4910", 26.69),
    ],
)
def test_bleu_13a_of_whole_systems(name: str, value: float) -> None:
    found = value_of(HEADLINE, wmt17(f"newstest2017.{name}.en-de"), wmt17("reference"))
    assert found == pytest.approx(
        value, abs=0.0101
    )  # mteval rounds; one system is off by a hundredth


@NEEDS_WMT17
def test_bleu_intl_of_a_whole_system() -> None:
    found = value_of(
        make_bleu("BLEU", "intl"), wmt17("newstest2017.LIUM-NMT.4900.en-de"), wmt17("reference")
    )
    assert found == pytest.approx(26.89, abs=0.00501)


@NEEDS_WMT17
@pytest.mark.parametrize("name, value", [("C-3MA.4959", 51.9533), ("FBK.4870", 54.7152)])
def test_chrf_of_whole_systems(name: str, value: float) -> None:
    assert value_of(
        CHRF2, wmt17(f"newstest2017.{name}.en-de"), wmt17("reference")
    ) == pytest.approx(value, abs=1e-4)


@NEEDS_WMT17
@pytest.mark.parametrize("name, value", [("LIUM-NMT.4900", 63.3), ("SYSTRAN.4847", 61.1)])
def test_ter_of_whole_systems(name: str, value: float) -> None:
    assert value_of(
        EDIT_RATE, wmt17(f"newstest2017.{name}.en-de"), wmt17("reference")
    ) == pytest.approx(value, abs=0.0501)
