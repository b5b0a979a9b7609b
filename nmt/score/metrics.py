"""All the ways in which results are quoted, from sacreBLEU's BLEU to the tokenised, split BLEU of
the authors.

The same translations score 27.5 on the first metric and 29.0 on the last, so a figure means nothing
without its metric. Each one is a counter from sacreBLEU over text that is prepared for it. Its
signature is sacreBLEU's own, plus the test set, the language pair, the number of lines, the
tokenizer, and the version of this package.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version

from sacrebleu.metrics.base import Metric as Counter
from sacrebleu.metrics.base import Signature
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt.score import moses
from nmt.score.score import Interval, Score, check_lengths, make_headline_counter
from nmt.score.significance import bootstrap, read_seed

Prepare = Callable[[str], str]


@dataclass(frozen=True)
class Metric:
    name: str
    make_counter: Callable[[], Counter]  # a new one for each use: it remembers what it has counted
    prepare_hypothesis: Prepare = str
    prepare_reference: Prepare = str
    tokens: str = ""  # what the signature gives as the tokenizer instead of "none"
    is_of_paper: bool = False  # Table 2 of the paper was counted this way


def make_bleu(name: str, tokenize: str = "13a", is_lowercase: bool = False) -> Metric:
    return Metric(name, partial(BLEU, tokenize=tokenize, lowercase=is_lowercase))


HEADLINE = Metric("BLEU", make_headline_counter)
CHRF2 = Metric("chrF2", CHRF)
EDIT_RATE = Metric("TER", TER)


def list_metrics(language: str) -> list[Metric]:
    """Return every metric for a target language: BLEU from the headline to the paper's, then the
    others.
    """
    return [
        HEADLINE,
        make_bleu("BLEU, lower-cased", is_lowercase=True),
        make_bleu("BLEU intl", "intl"),
        make_bleu("BLEU intl, lower-cased", "intl", is_lowercase=True),
        *_list_tokenized(language),
        CHRF2,
        EDIT_RATE,
    ]


def find_paper_metric(language: str) -> Metric:
    """Return the metric of Table 2, or plain tokenised BLEU for a language that the paper does not
    translate into.
    """
    metrics = _list_tokenized(language)
    for metric in metrics:
        if metric.is_of_paper:
            return metric
    return metrics[0]


def _list_tokenized(language: str) -> list[Metric]:
    """Text as Moses tokenised it in 2017, counted as multi-bleu.perl counts."""
    language = re.split("[-_]", language.lower())[0]  # de_AT is German
    tokenize = cache(moses.make_tokenizer(language))  # several metrics ask for the same line

    def tokenize_and_split(line: str) -> str:
        return moses.split_compounds(tokenize(line))

    def tokenize_and_split_plain(line: str) -> str:
        return tokenize_and_split(moses.make_quotes_plain(line))

    counter = partial(BLEU, tokenize="none", force=True, smooth_method="none")
    name = f"moses-2017.{language}"
    tokenised = Metric(
        "BLEU tokenised", counter, tokenize, tokenize, name, is_of_paper=language == "fr"
    )
    if language != "de":  # the authors split compounds for German alone
        return [tokenised]
    split = Metric(
        "BLEU tokenised, split",
        counter,
        tokenize_and_split,
        tokenize_and_split,
        f"{name}+atat",
    )
    split_plain = Metric(
        "BLEU tokenised, split, plain quotes",
        counter,
        tokenize_and_split,
        tokenize_and_split_plain,
        f"{name}+atat+refquotes",
        is_of_paper=True,
    )
    return [tokenised, split, split_plain]


def compute_score(
    metric: Metric,
    hypotheses: Sequence[str],
    references: Sequence[str],
    test: str,
    pair: str,
    n_bootstrap: int = 0,
) -> Score:
    """Score the hypotheses, with a 95 % interval if `n_bootstrap` is above 0.

    `test` names the test set and `pair` the languages, such as en-de; both go into the signature.
    """
    check_lengths(hypotheses, references)
    texts = [metric.prepare_hypothesis(line) for line in hypotheses]
    gold = [metric.prepare_reference(line) for line in references]
    counter = metric.make_counter()
    value = counter.corpus_score(texts, [gold]).score
    signature = counter.get_signature()
    _complete_signature(signature, metric, test, pair, len(texts))
    interval = None
    if n_bootstrap:
        resampled = bootstrap(metric.make_counter(), texts, gold, n_bootstrap, read_seed())
        interval = Interval(resampled.low, resampled.high)
        signature.update("bs", str(resampled.n))
        signature.update("seed", str(resampled.seed))
    return Score(metric.name, value, f"{signature.format()}|nmt:{version('nmt')}", interval)


def _complete_signature(
    signature: Signature, metric: Metric, test: str, pair: str, n_lines: int
) -> None:
    signature.update("test", test)
    signature.update("lang", pair)
    signature.update("lines", str(n_lines))
    if metric.tokens:
        signature.update("tok", metric.tokens)
        signature.update("lists", moses.ABBREVIATIONS)
