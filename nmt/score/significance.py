"""How far a score can be trusted: its interval, whether two systems differ, and the spread over training runs.

Resampling is sacreBLEU's own PairedTest, reached the way its command line reaches it, so that the same seed gives the
same figures there and here. Three things are mended. Systems with the same score have p = 1: sacreBLEU counts only
differences above the observed one, finds none above 0 and reports its smallest p. For the same reason p is nowhere
below what the lines that differ can show: with k of them, 2^(1-k). And seed 0, which it takes for no seed at all, is
refused. The environment is left as it was found.
"""

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nmt.score.score import check
from nmt.system.errors import UserError

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric
    from sacrebleu.significance import Result

SEED = "SACREBLEU_SEED"


@dataclass(frozen=True)
class Interval:
    """95 %, by bootstrap over lines. As sacreBLEU counts it: half the width between the percentiles 2.5 and 97.5 on
    either side of the mean of the resampled scores, which is not quite the score itself."""

    mean: float
    low: float
    high: float
    n: int  # resamples
    seed: int


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same references. Each p is two-sided: how often a difference at least this large would be
    seen if the systems were equally good; `interval_*` belong to each system alone, on the same resamples."""

    a: float
    b: float
    difference: float  # b - a
    p_bootstrap: float
    p_randomisation: float
    interval_a: Interval
    interval_b: Interval
    n_bootstrap: int
    n_randomisation: int
    seed: int


@dataclass(frozen=True)
class Spread:
    """Several runs of one recipe, e.g. with other seeds. `low` and `high` hold the mean that endlessly many such runs
    would have, with 95 % confidence (Student's t with n - 1 degrees of freedom); single runs lie wider apart."""

    n: int
    mean: float
    std: float  # of the runs, over n - 1
    low: float
    high: float


def seed_asked_for() -> int:
    """The seed that the sacrebleu command line would use here."""
    text = os.environ.get(SEED, "12345")
    if not text.isdecimal() or int(text) == 0:
        raise UserError(
            f"{SEED} is {text!r}; it must be a whole number above 0, or unset for 12345"
        )
    return int(text)


def interval(
    metric: "Metric",
    hypotheses: Sequence[str],
    references: Sequence[str],
    n: int = 1000,
    seed: int = 12345,
) -> Interval:
    """The 95 % interval of one system's score; the lists hold what the metric itself is to tokenise. By PairedTest:
    `corpus_score(n_bootstrap=...)` would do it in half the time, but fails where chrF draws both 0 and other scores."""
    return interval_of(tested(metric, [hypotheses], references, "bs", n, seed)[0], n, seed)


def compare(
    metric: "Metric",
    a: Sequence[str],
    b: Sequence[str],
    references: Sequence[str],
    n_bootstrap: int = 1000,
    n_randomisation: int = 10000,
    seed: int = 12345,
) -> Comparison:
    """Paired bootstrap (Koehn 2004) and approximate randomisation (Riezler and Maxwell 2005) of system b against a."""
    first, second = tested(metric, [a, b], references, "bs", n_bootstrap, seed)
    shuffled = tested(metric, [a, b], references, "ar", n_randomisation, seed)[1]
    difference = second.score - first.score
    assert second.p_value is not None and shuffled.p_value is not None
    # Of the 2^k ways to exchange the k lines that differ, two give this difference: all or none.
    least = 2.0 ** (1 - min(1_000, sum(ours != theirs for ours, theirs in zip(a, b, strict=True))))
    p_bootstrap, p_randomisation = (
        max(p, least) if difference else 1.0 for p in (second.p_value, shuffled.p_value)
    )
    return Comparison(
        first.score,
        second.score,
        difference,
        p_bootstrap,
        p_randomisation,
        interval_of(first, n_bootstrap, seed),
        interval_of(second, n_bootstrap, seed),
        n_bootstrap,
        n_randomisation,
        seed,
    )


def tested(
    metric: "Metric",
    systems: Sequence[Sequence[str]],
    references: Sequence[str],
    test: str,
    n: int,
    seed: int,
) -> list["Result"]:
    from sacrebleu.significance import PairedTest

    for lines in systems:
        check(lines, references)
    if n < 1 or seed < 1:
        raise UserError(f"{n} resamples with seed {seed}; both must be 1 or more")
    with environment(SEED, str(seed)):
        named = [(str(number), lines) for number, lines in enumerate(systems)]
        results = PairedTest(named, {"metric": metric}, [references], test, n)()[1]
    (column,) = set(results) - {"System"}
    return results[column]  # type: ignore[return-value]  # only the column "System" holds names


def interval_of(result: "Result", n: int, seed: int) -> Interval:
    assert result.mean is not None and result.ci is not None
    mean, half = float(result.mean), float(result.ci)
    return Interval(mean, mean - half, mean + half, n, seed)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def spread(values: Sequence[float]) -> Spread:
    n = len(values)
    if n < 2:
        raise UserError(f"{n} score has no spread; score two runs or more")
    mean, std = statistics.fmean(values), statistics.stdev(values)
    half = student_t(n - 1) * std / math.sqrt(n)
    return Spread(n, mean, std, mean - half, mean + half)


def student_t(freedom: int) -> float:
    """The t that |t| stays below with probability 0.95, by halving the interval around it."""
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if share_within(middle, freedom) > 0.95 else (middle, high)
    return math.sqrt(freedom) * math.tan(high)


def share_within(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) * tan(angle)): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    is_odd, term, total = freedom % 2, 1.0, 0.0
    for k in range(freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k + 1 + is_odd) / (2 * k + 2 + is_odd)
    return (
        2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
        if is_odd
        else math.sin(angle) * total
    )
