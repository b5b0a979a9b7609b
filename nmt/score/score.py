"""The headline: sacreBLEU's BLEU of plain, detokenised, cased text, which validation and nmt-eval report alike.

Every score carries a signature that says exactly how it was counted. Lists of unequal length are refused here, because
sacreBLEU's API scores them without a word. All other ways of counting are rungs of nmt/score/metrics.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nmt.system.errors import UserError

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU


@dataclass(frozen=True)
class Score:
    name: str
    value: float  # 0 to 100; of TER 0 and above, less is better
    signature: str


def headline() -> "BLEU":
    """The one metric behind validation's figure and nmt-eval's."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU()


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    check(hypotheses, references)
    metric = headline()
    value = metric.corpus_score(hypotheses, [references]).score
    return Score("BLEU", value, metric.get_signature().format())


def check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} translations cannot be scored against {len(references)} references; "
            "both need one line for each source sentence"
        )
    if not references:
        raise UserError("nothing to score: 0 translations and 0 references")
