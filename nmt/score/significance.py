"""How far a score can be trusted: its interval, whether two systems differ, and the spread over
training runs.

Resampling is sacreBLEU's own PairedTest, called as its command line calls it, so that the same seed
gives the same figures there and here. Three things are corrected. Systems with the same score have
p = 1: sacreBLEU counts only differences above the observed one, finds none above 0 and reports its
smallest p. For the same reason p is never smaller than 2^(1-k), the smallest that k differing lines
allow. And seed 0, which sacreBLEU takes for no seed at all, is refused. The environment is left as
it was found.
"""

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nmt.score.score import check_lengths
from nmt.system.errors import UserError

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as Counter
    from sacrebleu.significance import Result

SEED_VARIABLE = "SACREBLEU_SEED"
HIGHEST_SCORE = 100.0  # of BLEU and chrF


@dataclass(frozen=True)
class Bootstrap:
    """A 95 % interval by resampling lines. As in sacreBLEU, it is centred on the mean of the
    resampled scores, which differs a little from the score itself, and is as wide as the range from
    percentile 2.5 to 97.5; but it ends where scores end."""

    mean: float
    low: float
    high: float
    n: int  # resamples
    seed: int


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same references. Each p is two-sided: how often a difference at least this
    large would be seen if the systems were equally good. Each system has its own interval, on the
    same resamples."""

    a: float
    b: float
    difference: float  # b - a
    p_bootstrap: float
    p_randomisation: float
    interval_a: Bootstrap
    interval_b: Bootstrap
    n_bootstrap: int
    n_randomisation: int
    seed: int


@dataclass(frozen=True)
class Spread:
    """Several runs of one recipe, for example with different seeds. `low` and `high` are a 95 %
    interval (Student's t, n - 1 degrees of freedom) of the mean over all such runs; single runs are
    further apart."""

    n: int
    mean: float
    std: float  # of the runs, over n - 1
    low: float
    high: float


def read_seed() -> int:
    """Return the seed that the sacrebleu command line would use here."""
    text = os.environ.get(SEED_VARIABLE, "12345")
    if not text.isdecimal() or int(text) == 0:
        raise UserError(
            f"{SEED_VARIABLE} is {text!r}; set it to a whole number above 0, or unset it to use 12345"
        )
    return int(text)


def bootstrap(
    counter: "Counter",
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    n: int = 1000,
    seed: int = 12345,
) -> tuple[float, Bootstrap]:
    """Return one system's score, and resample it. The counter tokenises the lines that it is given; each
    of the `references` is a translation of all lines.

    `corpus_score(n_bootstrap=...)` would take half the time, but it fails where chrF draws both 0
    and other scores.
    """
    (result,) = _run_paired_test(counter, [hypotheses], references, "bs", n, seed)
    return result.score, _read_bootstrap(counter, result, n, seed)


def compare_systems(
    counter: "Counter",
    a: Sequence[str],
    b: Sequence[str],
    references: Sequence[Sequence[str]],
    n_bootstrap: int = 1000,
    n_randomisation: int = 10000,
    seed: int = 12345,
) -> Comparison:
    """Compare b with a by paired bootstrap (Koehn 2004) and approximate randomisation (Riezler and
    Maxwell 2005).
    """
    first, second = _run_paired_test(counter, [a, b], references, "bs", n_bootstrap, seed)
    _, shuffled = _run_paired_test(counter, [a, b], references, "ar", n_randomisation, seed)
    assert second.p_value is not None and shuffled.p_value is not None
    difference = second.score - first.score
    if difference == 0:
        p_bootstrap = p_randomisation = 1.0
    else:
        # Of the 2^k ways to exchange the k lines that differ, two give this difference: all or
        # none.
        n_different = sum(ours != theirs for ours, theirs in zip(a, b, strict=True))
        smallest = 2.0 ** (1 - min(1_000, n_different))
        p_bootstrap = max(second.p_value, smallest)
        p_randomisation = max(shuffled.p_value, smallest)
    return Comparison(
        a=first.score,
        b=second.score,
        difference=difference,
        p_bootstrap=p_bootstrap,
        p_randomisation=p_randomisation,
        interval_a=_read_bootstrap(counter, first, n_bootstrap, seed),
        interval_b=_read_bootstrap(counter, second, n_bootstrap, seed),
        n_bootstrap=n_bootstrap,
        n_randomisation=n_randomisation,
        seed=seed,
    )


def _run_paired_test(
    counter: "Counter",
    systems: Sequence[Sequence[str]],
    references: Sequence[Sequence[str]],
    kind: str,
    n: int,
    seed: int,
) -> list["Result"]:
    """Return one result for each system; `kind` is "bs" for bootstrap or "ar" for randomisation."""
    from sacrebleu.significance import PairedTest

    for lines in systems:
        for reference in references:
            check_lengths(lines, reference)
    if n < 1 or seed < 1:
        raise UserError(
            f"{n} resamples with seed {seed} are not possible; both numbers must be at least 1"
        )
    named = [(str(number), lines) for number, lines in enumerate(systems)]
    with _setting_seed(seed):
        _, results = PairedTest(named, {"metric": counter}, references, kind, n)()
    (column,) = set(results) - {"System"}
    return results[column]  # type: ignore[return-value]  # only the column "System" holds names


def _read_bootstrap(counter: "Counter", result: "Result", n: int, seed: int) -> Bootstrap:
    from sacrebleu.metrics.ter import TER

    assert result.mean is not None and result.ci is not None
    mean, half_width = float(result.mean), float(result.ci)
    highest = math.inf if isinstance(counter, TER) else HIGHEST_SCORE
    low, high = max(0.0, mean - half_width), min(highest, mean + half_width)
    return Bootstrap(mean, low, high, n, seed)


@contextmanager
def _setting_seed(seed: int) -> Iterator[None]:
    before = os.environ.get(SEED_VARIABLE)
    os.environ[SEED_VARIABLE] = str(seed)
    try:
        yield
    finally:
        del os.environ[SEED_VARIABLE]
        if before is not None:
            os.environ[SEED_VARIABLE] = before


def estimate_spread(values: Sequence[float]) -> Spread:
    """Estimate it from scores of BLEU, which ends at 0 and 100."""
    n = len(values)
    mean, std = statistics.fmean(values), statistics.stdev(values)
    half_width = student_t(n - 1) * std / math.sqrt(n)
    low, high = max(0.0, mean - half_width), min(HIGHEST_SCORE, mean + half_width)
    return Spread(n, mean, std, low, high)


def student_t(freedom: int) -> float:
    """Return the t that |t| stays below in 95 % of cases, found by bisection over its angle."""
    low, high = 0.0, math.pi / 2
    while True:
        middle = (low + high) / 2
        if middle in (low, high):  # low and high are adjacent floats
            return math.sqrt(freedom) * math.tan(high)
        if _probability_within(middle, freedom) > 0.95:
            high = middle
        else:
            low = middle


def _probability_within(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) * tan(angle)): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    is_odd = freedom % 2
    term, total = 1.0, 0.0
    for k in range(freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k + 1 + is_odd) / (2 * k + 2 + is_odd)
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return math.sin(angle) * total
