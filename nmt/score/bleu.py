"""Scores of translated text against references, each with a signature that says exactly how it was counted.

`bleu` and `chrf` are sacreBLEU's own; `paper_bleu` is the tokenised, compound-split BLEU behind the paper's 27.3 and
28.4, which lies about 1.5 points higher on the same output and must never be compared with the others. Lists of
unequal length are refused here, because sacreBLEU's API scores them without a word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nmt.errors import UserError
from nmt.score.moses import VERSION, split_compounds, tokenizer

TOKENIZERS = ("13a", "intl", "char", "zh", "none")  # those that need neither a download nor another package


@dataclass(frozen=True)
class Score:
    name: str
    value: float  # 0 to 100
    signature: str


def bleu(hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a", lowercase: bool = False) -> Score:
    """sacreBLEU's BLEU of plain, detokenised text; cased unless asked otherwise."""
    from sacrebleu.metrics.bleu import BLEU

    check(hypotheses, references)
    if tokenize not in TOKENIZERS:
        raise UserError(f"tokenize is {tokenize!r}; it must be one of {', '.join(TOKENIZERS)}")
    # `force` quiets the warning about tokenised text; with "none" tokenised text is what is asked for.
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
    value = metric.corpus_score(hypotheses, [references]).score
    return Score("BLEU", value, metric.get_signature().format())


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """sacreBLEU's chrF2: the F-score of character 1- to 6-grams."""
    from sacrebleu.metrics.chrf import CHRF

    check(hypotheses, references)
    metric = CHRF()
    value = metric.corpus_score(hypotheses, [references]).score
    return Score("chrF2", value, metric.get_signature().format())


def paper_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str = "de") -> Score:
    """The paper's BLEU: Moses tokens of 2017, hyphenated compounds split, counted as multi-bleu.perl counts."""
    from sacrebleu.metrics.bleu import BLEU

    check(hypotheses, references)
    split = paper_tokens(language)
    metric = BLEU(tokenize="none", force=True, smooth_method="none")
    value = metric.corpus_score([split(line) for line in hypotheses], [[split(line) for line in references]]).score
    signature = metric.get_signature().format().replace(
        "tok:none", f"tok:moses-2017+atat|lang:{language}|{VERSION}")
    return Score("paper BLEU", value, signature)


def paper_tokens(language: str) -> Callable[[str], str]:
    """The paper's preparation of one line: Moses tokens of 2017, then `rich-text` -> `rich ##AT##-##AT## text`."""
    tokenize = tokenizer(language)
    return lambda line: split_compounds(tokenize(line))


def check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise UserError(f"{len(hypotheses)} translations cannot be scored against {len(references)} references; "
                        "both need one line for each source sentence")
    if not references:
        raise UserError("nothing to score: 0 translations and 0 references")
