"""How far a score can be trusted: its interval, whether two systems differ, and the spread over
training runs.

Resampling is sacreBLEU's own, called as its command line calls it, so that the same seed gives the same
figures there and here. Four things are corrected. The p by bootstrap is two-sided: sacreBLEU resamples
the size of the difference, without its sign, and so counts one side only. Systems with the same score
have p = 1: sacreBLEU counts only differences above the observed one, finds none above 0 and reports its
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
from typing import TYPE_CHECKING, cast

from nmt.score.score import check_lengths
from nmt.system.errors import UserError
from nmt.system.tables import format_interval

if TYPE_CHECKING:
    import numpy as np
    from sacrebleu.metrics.base import Metric as Counter
    from sacrebleu.significance import Result

SEED_VARIABLE = "SACREBLEU_SEED"
References = Sequence[Sequence[str]]  # one set of lines, or several
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
    large would be seen if the systems were equally good."""

    a: float
    b: float
    difference: float  # b - a
    p_bootstrap: float
    p_randomisation: float
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

    def format_interval(self) -> str:
        return f"interval of the mean {format_interval(self.low, self.high)} (Student's t)"


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
    references: References,
    n: int = 1000,
    seed: int = 12345,
) -> tuple[float, Bootstrap]:
    """Return one system's score, and resample it. The counter tokenises the lines that it is given; each
    of the `references` is a translation of all lines.

    `corpus_score(n_bootstrap=...)` would take half the time, but it fails where chrF draws both 0
    and other scores.
    """
    score, resampled = _resample(counter, hypotheses, references, n, seed)
    return score, _summarize(counter, resampled, seed)


def compare_systems(
    counter: "Counter",
    a: Sequence[str],
    b: Sequence[str],
    references: References,
    n_bootstrap: int = 1000,
    n_randomisation: int = 10000,
    seed: int = 12345,
) -> Comparison:
    """Compare b with a by paired bootstrap (Koehn 2004) and approximate randomisation (Riezler and
    Maxwell 2005).
    """
    from sacrebleu.significance import PairedTest

    score_a, resampled_a = _resample(counter, a, references, n_bootstrap, seed)
    score_b, resampled_b = _resample(counter, b, references, n_bootstrap, seed)
    _check(b, references, n_randomisation, seed)
    with _setting_seed(seed):
        shuffling = PairedTest(
            [("a", a), ("b", b)], {"metric": counter}, references, "ar", n_randomisation
        )
        _, columns = shuffling()
    _, (_, shuffled) = columns.values()  # the first column names the systems
    p_randomisation = cast("Result", shuffled).p_value
    assert p_randomisation is not None
    difference = score_b - score_a
    if difference == 0:
        p_bootstrap = p_randomisation = 1.0
    else:
        # Were the systems equally good, the differences would vary as they do, but around 0.
        differences = resampled_b - resampled_a
        n_as_large = int((abs(differences - differences.mean()) >= abs(difference)).sum())
        p_bootstrap = (n_as_large + 1) / (n_bootstrap + 1)
        # Of the 2^k ways to exchange the k lines that differ, two give this difference: all or
        # none.
        n_different = sum(ours != theirs for ours, theirs in zip(a, b, strict=True))
        smallest = 2.0 ** (1 - min(1_000, n_different))
        p_bootstrap = max(p_bootstrap, smallest)
        p_randomisation = max(p_randomisation, smallest)
    return Comparison(
        a=score_a,
        b=score_b,
        difference=difference,
        p_bootstrap=p_bootstrap,
        p_randomisation=p_randomisation,
        n_bootstrap=n_bootstrap,
        n_randomisation=n_randomisation,
        seed=seed,
    )


def _resample(
    counter: "Counter",
    lines: Sequence[str],
    references: References,
    n: int,
    seed: int,
) -> tuple[float, "np.ndarray"]:
    """Return the score, and those of n test sets drawn from the lines: the same draws for any system."""
    import numpy as np
    from sacrebleu.significance import _bootstrap_resample

    _check(lines, references, n, seed)
    statistics = counter._extract_corpus_statistics(lines, references)
    with _setting_seed(seed):
        _, resampled = _bootstrap_resample(statistics, counter, n)
    score = counter._aggregate_and_compute(statistics).score
    return score, np.array([one.score for one in resampled])


def _check(lines: Sequence[str], references: References, n: int, seed: int) -> None:
    for reference in references:
        check_lengths(lines, reference)
    if n < 1 or seed < 1:
        raise UserError(
            f"{n} resamples with seed {seed} are not possible; both numbers must be at least 1"
        )


def _summarize(counter: "Counter", resampled: "np.ndarray", seed: int) -> Bootstrap:
    from sacrebleu.metrics.ter import TER
    from sacrebleu.significance import estimate_ci

    mean, half_width = map(float, estimate_ci(resampled))
    highest = math.inf if isinstance(counter, TER) else HIGHEST_SCORE
    low, high = max(0.0, mean - half_width), min(highest, mean + half_width)
    return Bootstrap(mean, low, high, len(resampled), seed)


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
    mean, half_width = statistics.fmean(values), find_half_width(values)
    low, high = max(0.0, mean - half_width), min(HIGHEST_SCORE, mean + half_width)
    return Spread(len(values), mean, statistics.stdev(values), low, high)


def find_half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean (Student's t), of at least two values."""
    n = len(values)
    return student_t(n - 1) * statistics.stdev(values) / math.sqrt(n)


def student_t(freedom: int) -> float:
    """Return the t that |t| stays below in 95 % of cases. The angle whose tangent is t / sqrt(freedom) has
    a power of its cosine as its density, which is added up by the rule of trapezoids.
    """
    import numpy as np

    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    shares = np.cumsum(density[:-1] + density[1:])
    return math.sqrt(freedom) * math.tan(np.interp(0.95 * shares[-1], shares, angles[1:]))
