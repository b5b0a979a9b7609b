"""Intervals and tests of significance against the sacrebleu command line, run beside them with the
same seed.

Published figures of real systems (WMT17, from sacreBLEU's own tests) are checked where NMT_WMT17
names a folder with one plain-text file for each system and one called reference. Student's t is
held against a printed table.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
from pytest import MonkeyPatch, approx, mark, raises
from sacrebleu.metrics.base import Score, Signature
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from support.text_lines import join_lines

from nmt.corpus.demo import generate_pairs
from nmt.score.significance import (
    Bootstrap,
    Comparison,
    bootstrap,
    compare_systems,
    estimate_spread,
    read_seed,
    student_t,
)
from nmt.system.errors import UserError

METRICS = {"bleu": BLEU, "chrf": CHRF, "ter": TER}
REFERENCES = [german for _, german in itertools.islice(generate_pairs("train"), 200)]
WMT17 = os.environ.get("NMT_WMT17", "")


def damaged(rate: float, seed: int) -> list[str]:
    """The references with words dropped."""
    rng = Random(seed)
    return [
        " ".join(word for word in line.split() if rng.random() > rate) or line
        for line in REFERENCES
    ]


def sacrebleu_prints(
    folder: Path, systems: Sequence[Sequence[str]], seed: int, *options: str
) -> Any:
    names = [f"system{i}" for i in range(len(systems))]
    for name, lines in (("ref", REFERENCES), *zip(names, systems, strict=True)):
        (folder / name).write_text(join_lines(lines), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", *names, "-w", "8"]
    environment = os.environ | {"SACREBLEU_SEED": str(seed)}
    done = subprocess.run(
        [*command, "--format", "json", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def half(found: Bootstrap) -> float:
    assert found.high - found.mean == approx(found.mean - found.low)
    return (found.high - found.low) / 2


def test_intervals_end_where_scores_end() -> None:
    lines = [*REFERENCES[:2], "something else altogether"]
    for metric in METRICS.values():
        _, found = bootstrap(metric(), lines, [REFERENCES[:3]], 60, 7)
        assert found.low >= 0
        assert metric is TER or found.high <= 100
    assert estimate_spread([90.0, 99.0, 99.5]).high == 100.0
    assert estimate_spread([0.5, 9.0]).low == 0.0


def test_interval_is_the_command_lines(tmp_path: Path) -> None:
    lines = damaged(0.2, 1)
    truths = sacrebleu_prints(
        tmp_path, [lines], 7, "-m", *METRICS, "--confidence", "--confidence-n", "60"
    )
    for (name, metric), truth in zip(METRICS.items(), truths, strict=True):
        _, found = bootstrap(metric(), lines, [REFERENCES], 60, 7)
        assert truth["name"].lower().startswith(name) and truth["seed"] == "7"
        assert (found.mean, half(found)) == approx(
            (truth["confidence_mean"], truth["confidence_var"]), abs=1e-5
        )
        assert (found.n, found.seed) == (60, 7)
        assert 0 < found.low < truth["score"] < found.high


def test_comparison_is_the_command_lines(tmp_path: Path) -> None:
    """BLEU alone: its JSON of other metrics is broken there (a float32 of numpy). The p by bootstrap is not
    the command line's, which is one-sided."""
    a, b = systems = damaged(0.20, 1), damaged(0.21, 2)
    first, second = sacrebleu_prints(tmp_path, systems, 7, "--paired-bs", "--paired-bs-n", "60")
    _, shuffled = sacrebleu_prints(tmp_path, systems, 7, "--paired-ar", "--paired-ar-n", "80")
    first, second, shuffled = first["BLEU"], second["BLEU"], shuffled["BLEU"]
    found = compare_systems(BLEU(), a, b, [REFERENCES], 60, 80, 7)
    assert (found.a, found.b) == approx((first["score"], second["score"]), abs=1e-9)
    assert found.difference == found.b - found.a
    assert found.p_randomisation == approx(shuffled["p_value"], abs=1e-12)


class Total:
    """The sum of lines that are numbers: a metric whose true p is known."""

    def _extract_corpus_statistics(self, lines: Sequence[str], _: Any) -> list[list[float]]:
        return [[float(line)] for line in lines]

    def _aggregate_and_compute(self, statistics: Any) -> Score:
        return self._compute_score_from_stats(np.sum(statistics, axis=0))

    def _compute_score_from_stats(self, sums: Any) -> Score:
        return Score("total", float(sums[0]))

    def get_signature(self) -> Signature:
        return Signature({"num_refs": 1})


def compare_numbers(a: Any, b: Any, n_trials: int = 200) -> Comparison:
    counter = cast(BLEU, Total())
    lines, others = ([str(number) for number in numbers] for numbers in (a, b))
    return compare_systems(counter, lines, others, [lines], 200, n_trials)


def test_equal_systems_differ_at_5_percent_in_5_percent_of_pairs() -> None:
    """Two systems whose lines come from one distribution are equally good, however their means differ."""
    rng = np.random.default_rng(1)
    pairs = [compare_numbers(*rng.normal(50, 10, (2, 100))) for _ in range(500)]
    by_bootstrap = sum(found.p_bootstrap < 0.05 for found in pairs) / len(pairs)
    by_randomisation = sum(found.p_randomisation < 0.05 for found in pairs) / len(pairs)
    assert 0.02 < by_randomisation < 0.085
    assert 0.02 < by_bootstrap < 0.085  # a one-sided p: 0.11
    # the two tests say the same, pair by pair
    assert max(abs(found.p_bootstrap - found.p_randomisation) for found in pairs) < 0.2


@mark.parametrize("better", [-3.0, 3.0])
def test_clear_differences_have_the_p_of_a_two_sided_test(better: float) -> None:
    """A difference of z standard errors, in either direction, has the p of the normal distribution."""
    rng = np.random.default_rng(2)
    noise = rng.normal(0, 10, 400)
    noise -= noise.mean()
    for z in (0.5, 1.0, 1.5, 2.0):
        shift = math.copysign(z, better) * noise.std() / math.sqrt(len(noise))
        found = compare_numbers(50 + 0 * noise, 50 + noise + shift)
        truth = math.erfc(z / math.sqrt(2))
        assert found.p_bootstrap == approx(truth, abs=0.1)
        assert found.p_randomisation == approx(truth, abs=0.1)


@mark.parametrize("metric", METRICS)
def test_a_system_against_itself_has_p_of_1(metric: str) -> None:
    lines = damaged(0.2, 1)[:100]
    found = compare_systems(METRICS[metric](), lines, list(lines), [REFERENCES[:100]], 30, 30)
    assert (found.difference, found.p_bootstrap, found.p_randomisation) == (0, 1, 1)


@mark.parametrize("n_worse, n_better", [(0, 1), (0, 4), (1, 7)])
def test_p_is_what_the_differing_lines_can_show(n_worse: int, n_better: int) -> None:
    """With k lines that differ by the same, the p of randomisation is that of all 2^k exchanges: those
    that show as much count, even if their sums are rounded to less.
    """
    changes = np.array([-0.3] * n_worse + [0.3] * n_better)
    found = compare_numbers(50.1 + 0 * changes, 50.1 + changes, 5000)
    shown = np.array([*itertools.product((-1, 1), repeat=len(changes))]) @ changes
    exact = np.mean(abs(shown) > found.difference - 0.01)
    assert found.p_randomisation == approx(exact, abs=0.02)
    assert found.p_bootstrap >= 2.0 ** (1 - len(changes))


@mark.parametrize("before", [None, "99"])
def test_the_environment_is_left_as_found_and_does_not_decide(
    before: str | None, monkeypatch: MonkeyPatch
) -> None:
    lines = damaged(0.2, 1)
    truth = bootstrap(BLEU(), lines, [REFERENCES], 20, 5)
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    if before:
        monkeypatch.setenv("SACREBLEU_SEED", before)
    environment = dict(os.environ)
    assert bootstrap(BLEU(), lines, [REFERENCES], 20, 5) == truth
    assert bootstrap(BLEU(), lines, [REFERENCES], 20, 6) != truth
    with raises(AttributeError):  # of sacreBLEU, halfway
        bootstrap(BLEU(), [None] * 200, [REFERENCES], 20, 5)  # type: ignore[list-item]
    assert dict(os.environ) == environment
    assert read_seed() == int(before or 12345)


@mark.parametrize("text", ["none", "0", "-1", "1.5", ""])
def test_a_seed_that_is_none_is_refused(text: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", text)
    with raises(UserError, match="SACREBLEU_SEED"):
        read_seed()


def test_what_cannot_be_resampled_is_refused() -> None:
    three = REFERENCES[:3]
    with raises(UserError, match="2 translations.*3 references"):
        compare_systems(BLEU(), three, three[:2], [three])
    with raises(UserError, match="0 translations"):
        bootstrap(BLEU(), [], [[]])
    with raises(UserError, match="seed 0"):  # sacreBLEU would draw other figures each time
        compare_systems(BLEU(), three, three, [three], seed=0)
    with raises(UserError, match="0 resamples"):
        bootstrap(BLEU(), three, [three], n=0)


PRINTED_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 1000: 1.962}


def test_student_t_is_the_printed_tables() -> None:
    found = {freedom: student_t(freedom) for freedom in PRINTED_T}
    assert found == approx(PRINTED_T, abs=6e-4)


def test_spread_over_runs() -> None:
    found = estimate_spread([27.0, 27.3, 27.6])
    half_width = PRINTED_T[2] * 0.3 / math.sqrt(3)
    expected = (3, 27.3, 0.3, 27.3 - half_width, 27.3 + half_width)
    assert astuple(found) == approx(expected, abs=1e-3)
    assert estimate_spread([5.0, 5.0]).low == 5.0


# Multeval's randomisation against LIUM-NMT, in sacreBLEU's test/test_significance.py. The p that Moses'
# bootstrap gives there (0.0, 0.0223, 0.0438) counts one side.
@mark.skipif(not WMT17, reason="NMT_WMT17 names no folder with the WMT17 systems as plain text")
@mark.parametrize(
    "name, one_sided, p_randomisation",
    [
        ("C-3MA.4959", 0.00000, 0.0001),
        ("KIT.4950", 0.02233, 0.0410),
        ("LMU-nmt-reranked.4934", 0.04383, 0.09029),
        ("SYSTRAN.4847", None, 0.59914),
        ("online-B.0", None, 0.94111),
    ],
)
def test_published_p_values(name: str, one_sided: float | None, p_randomisation: float) -> None:
    a, b, references = (
        (Path(WMT17) / file).read_text("utf-8").removesuffix("\n").split("\n")
        for file in ("newstest2017.LIUM-NMT.4900.en-de", f"newstest2017.{name}.en-de", "reference")
    )
    found = compare_systems(BLEU(tokenize="none"), a, b, [references], n_bootstrap=2000)
    two_sided = p_randomisation if one_sided is None else 2 * one_sided
    assert found.p_bootstrap == approx(two_sided, abs=2e-2)
    assert found.p_randomisation == approx(p_randomisation, abs=1e-2)
