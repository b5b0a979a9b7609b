"""How far a score can be trusted: its interval, whether two systems differ, and the spread over
training runs.

The draws are those of sacreBLEU's command line, so that the same seed gives the same figures there and here.
Four things are corrected. The p by bootstrap is two-sided: sacreBLEU resamples the size of the difference,
without its sign, and so counts one side only. Both p count differences equal to the observed one:
sacreBLEU counts only larger ones, so where few lines differ its p is too small. The p by bootstrap is never
smaller than 2^(1-k), the smallest that k differing lines allow. And seed 0, which sacreBLEU takes for no
seed at all, is refused.
"""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nmt.score.score import check_lengths
from nmt.system.errors import UserError
from nmt.system.tables import format_interval

if TYPE_CHECKING:
    import numpy as np
    from sacrebleu.metrics.base import Metric as Counter

SEED_VARIABLE = "SACREBLEU_SEED"
References = Sequence[Sequence[str]]  # one set of lines, or several
HIGHEST_SCORE = 100.0  # of BLEU and chrF
ROUNDING = 1e-9  # of a score; differences this close are equal


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
    score, resampled, _ = _resample(counter, hypotheses, references, n, seed)
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
    score_a, resampled_a, of_a = _resample(counter, a, references, n_bootstrap, seed)
    score_b, resampled_b, of_b = _resample(counter, b, references, n_bootstrap, seed)
    difference = score_b - score_a
    # Were the systems equally good, the differences would vary as they do, but around 0.
    differences = resampled_b - resampled_a
    p_bootstrap = _compute_p(differences - differences.mean(), difference)
    # Of the 2^k ways to exchange the k lines that differ, two always give this difference: all or none.
    n_different = int((of_a != of_b).any(1).sum())
    p_bootstrap = max(p_bootstrap, 2.0 ** min(0, 1 - n_different))
    exchanged = _exchange(counter, of_a, of_b, n_randomisation, seed)
    return Comparison(
        a=score_a,
        b=score_b,
        difference=difference,
        p_bootstrap=p_bootstrap,
        p_randomisation=_compute_p(exchanged, difference),
        n_bootstrap=n_bootstrap,
        n_randomisation=n_randomisation,
        seed=seed,
    )


def _resample(
    counter: "Counter", lines: Sequence[str], references: References, n: int, seed: int
) -> tuple[float, "np.ndarray", "np.ndarray"]:
    """Return the score, those of n test sets drawn from the lines, the same draws for any system, and
    the statistics of each line, whose sums give a score.
    """
    import numpy as np

    for reference in references:
        check_lengths(lines, reference)
    if n < 1 or seed < 1:
        raise UserError(
            f"{n} resamples with seed {seed} are not possible; both numbers must be at least 1"
        )
    statistics = counter._extract_corpus_statistics(lines, references)
    draws = np.random.default_rng(seed).choice(len(lines), size=(n, len(lines)))
    # sacreBLEU's precision, so that the last digits are the same
    rounded = np.array(statistics, np.float32)
    resampled = _compute_scores(counter, (rounded[drawn].sum(0) for drawn in draws))
    score = counter._aggregate_and_compute(statistics).score
    return score, resampled, np.array(statistics, float)


def _exchange(
    counter: "Counter", of_a: "np.ndarray", of_b: "np.ndarray", n: int, seed: int
) -> "np.ndarray":
    """Return the difference between the systems after lines were exchanged at random, n times."""
    import numpy as np

    is_exchanged = np.random.default_rng(seed).integers(2, size=(n, len(of_a)), dtype=bool)
    moved = is_exchanged @ (of_a - of_b)
    scores_a = _compute_scores(counter, of_a.sum(0) - moved)
    return _compute_scores(counter, of_b.sum(0) + moved) - scores_a


def _compute_scores(counter: "Counter", sums: Iterable[Any]) -> "np.ndarray":
    import numpy as np

    return np.array([counter._compute_score_from_stats(one).score for one in sums])


def _compute_p(differences: "np.ndarray", observed: float) -> float:
    """Return how often a difference is at least as large as the observed one, which counts as well."""
    n_as_large = int((abs(differences) >= abs(observed) - ROUNDING).sum())
    return (n_as_large + 1) / (len(differences) + 1)


def _summarize(counter: "Counter", resampled: "np.ndarray", seed: int) -> Bootstrap:
    from sacrebleu.metrics.ter import TER
    from sacrebleu.significance import estimate_ci

    mean, half_width = map(float, estimate_ci(resampled))
    highest = math.inf if isinstance(counter, TER) else HIGHEST_SCORE
    low, high = max(0.0, mean - half_width), min(highest, mean + half_width)
    return Bootstrap(mean, low, high, len(resampled), seed)


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
