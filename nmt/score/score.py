"""A score with its signature, and the headline BLEU that validation and nmt-eval both report.

The headline is sacreBLEU's BLEU of plain, detokenised, cased text. Lists of unequal length are
refused here, because sacreBLEU's Python interface scores them without a warning. Every other way of
counting is in nmt/score/metrics.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nmt.system.errors import UserError
from nmt.system.tables import format_interval

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

LARGEST_NLL = 50.0  # whose perplexity is still computed


@dataclass(frozen=True)
class Score:
    name: str
    value: float  # 0 to 100; TER can exceed 100, and lower is better
    signature: str  # how it was counted
    # a 95 % confidence interval, only where resampling was asked for
    low: float | None = None
    high: float | None = None

    def format_interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return format_interval(self.low, self.high)


def make_headline_counter() -> "BLEU":
    """Return the one counter behind validation's BLEU and nmt-eval's headline."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU()


def score_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    check_lengths(hypotheses, references)
    counter = make_headline_counter()
    value = counter.corpus_score(hypotheses, [references]).score
    return Score("BLEU", value, counter.get_signature().format())


def score_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    from sacrebleu.metrics.chrf import CHRF

    check_lengths(hypotheses, references)
    return float(CHRF().corpus_score(hypotheses, [references]).score)


def compute_perplexity(nll: float) -> float:
    """Return the perplexity of an NLL per piece. That of a diverged run would overflow, or fill a line
    with digits, so it ends at that of LARGEST_NLL.
    """
    return math.exp(min(nll, LARGEST_NLL))


def check_lengths(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} translations cannot be scored against {len(references)} references; "
            "both need one line for each source sentence"
        )
    if not references:
        raise UserError("nothing to score: 0 translations and 0 references")
