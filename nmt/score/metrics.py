"""The metrics: sacreBLEU's BLEU and others, and the ways in which the paper may have computed BLEU.

The same translations score 27.5 by the first metric and 29.0 by the last way to count tokens, so a figure means nothing
without its metric. The paper does not say how it computed BLEU. Each way it may have done so is a
metric here, and the metric's `reading` names the source that suggests it. Every metric prepares the
text and lets sacreBLEU count. Its signature is sacreBLEU's own, plus the test set, the language pair,
the number of lines, the tokenizer, and the version of this package.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from sacrebleu.metrics.base import Metric as Counter
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

import nmt
from nmt.languages import find_code
from nmt.score import moses
from nmt.score.score import Score, make_headline_counter
from nmt.score.significance import References, bootstrap, read_seed

Prepare = Callable[[str], str]


@dataclass(frozen=True)
class Metric:
    name: str
    make_counter: Callable[[], Counter]  # a new one for each use: it remembers what it has counted
    prepare_hypothesis: Prepare = str
    prepare_reference: Prepare = str
    tokens: str = ""  # what the signature gives as the tokenizer instead of "none"
    reading: str = ""  # whose way of counting tokens this is
    is_likeliest: bool = False  # of the readings of Table 2; the verdict uses this one


def make_bleu(name: str, tokenize: str = "13a", is_lowercase: bool = False) -> Metric:
    return Metric(name, partial(BLEU, tokenize=tokenize, lowercase=is_lowercase))


HEADLINE = Metric("BLEU", make_headline_counter)
CHRF2 = Metric("chrF2", CHRF)
CHRF2_WORDS = Metric("chrF2++", partial(CHRF, word_order=2))  # runs of words too: Popović 2017
EDIT_RATE = Metric("TER", TER)


def list_metrics(language: str) -> list[Metric]:
    """Return every metric for a target language: BLEU from the headline to the tokenised ones, then
    the others.
    """
    return [
        HEADLINE,
        make_bleu("BLEU, lower-cased", is_lowercase=True),
        make_bleu("BLEU intl", "intl"),
        make_bleu("BLEU intl, lower-cased", "intl", is_lowercase=True),
        *_list_tokenized(language),
        CHRF2,
        CHRF2_WORDS,
        EDIT_RATE,
    ]


def find_paper_metric(language: str) -> Metric:
    """Return the likeliest reading of Table 2, or plain tokenised BLEU for a language that the
    paper does not translate into.
    """
    metrics = _list_tokenized(language)
    for metric in metrics:
        if metric.is_likeliest:
            return metric
    return metrics[0]


def _list_tokenized(language: str) -> list[Metric]:
    """Text as Moses tokenised it in 2017, counted as multi-bleu.perl counts."""
    language = find_code(language)
    tokenize = cache(moses.make_tokenizer(language))  # several metrics ask for the same line
    name = f"tokenizer.perl-2017.{language}"
    reading = "Moses' tokenizer, as in most papers from 2014 to 2018"
    tokenised = _make_tokenized("BLEU tokenised", tokenize, tokenize, name, reading)
    if language == "de":
        return [tokenised, *_list_german(tokenize, name)]
    if language != "fr":
        return [tokenised]
    tokenize_aggressively = moses.make_tokenizer(language, is_aggressive=True)
    aggressive = _make_tokenized(
        "BLEU tokenised, aggressive",
        tokenize_aggressively,
        tokenize_aggressively,
        f"{name}+aggressive",
        "the same with the tokenizer's -a, which splits at hyphens, as in fairseq's scripts",
    )
    # Nothing is known of the authors' English-French. For German they used the tokenizer without
    # -a, so the same is likeliest for French.
    return [replace(tokenised, is_likeliest=True), aggressive]


def _list_german(tokenize: Prepare, name: str) -> list[Metric]:
    """The readings of the authors' get_ende_bleu.sh, which splits compounds, for German alone."""

    def split(line: str) -> str:
        return moses.split_compounds(tokenize(line))

    def replace_and_split(line: str) -> str:
        return split(moses.replace_unicode_punctuation(line))

    def make_plain_and_split(line: str) -> str:
        return split(moses.make_quotes_plain(line))

    # The first is the likeliest: it is all that an author stated in the paper's month (L. Kaiser,
    # tensor2tensor issue 61), and the public script nearest to the one behind their files
    # (google/seq2seq, bin/data/wmt16_en_de.sh) tokenises training text and test sets alike, without
    # touching quotes. It is not certain: the commit of 2018 calls its new step "forgotten", and the
    # reference that they released then has plain quotes.
    now = "the authors' statement of June 2017, and their script before April 2018"
    later = "the authors' script since April 2018, which replaces Unicode punctuation in the output only"
    plain = (
        "the same script with plain quotes in the reference, as in the copy that Google released"
    )
    likeliest = _make_tokenized("BLEU tokenised, split", split, split, f"{name}+atat", now)
    name += "+atat+hyp-unicode-punctuation"
    return [
        replace(likeliest, is_likeliest=True),
        _make_tokenized(
            "BLEU tokenised, split, plain output", replace_and_split, split, name, later
        ),
        _make_tokenized(
            "BLEU tokenised, split, plain quotes",
            replace_and_split,
            make_plain_and_split,
            f"{name}+ref-quotes",
            plain,
        ),
    ]


def _make_tokenized(
    name: str, prepare_hypothesis: Prepare, prepare_reference: Prepare, tokens: str, reading: str
) -> Metric:
    counter = partial(BLEU, tokenize="none", force=True, smooth_method="none")
    return Metric(name, counter, prepare_hypothesis, prepare_reference, tokens, reading)


def compute_score(
    metric: Metric,
    hypotheses: Sequence[str],
    references: Sequence[str],
    test: str,
    pair: str,
    n_bootstrap: int,
    more_references: References = (),
) -> Score:
    """Score the hypotheses, with a 95 % interval of `n_bootstrap` resamples.

    `test` names the test set and `pair` the languages, such as en-de; both go into the signature.
    There may be more than one reference translation of the test set.
    """
    texts = [metric.prepare_hypothesis(line) for line in hypotheses]
    gold = [
        [metric.prepare_reference(line) for line in lines]
        for lines in (references, *more_references)
    ]
    counter = metric.make_counter()
    value, resampled = bootstrap(counter, texts, gold, n_bootstrap, read_seed())
    facts = {"test": test, "lang": pair, "lines": len(texts)}
    if metric.tokens:
        facts |= {"tok": metric.tokens, "lists": moses.ABBREVIATIONS}
    facts |= {"bs": resampled.n, "seed": resampled.seed}
    signature = counter.get_signature()
    for key, fact in facts.items():
        signature.update(key, str(fact))
    described = f"{signature.format()}|nmt:{nmt.__version__}"
    return Score(metric.name, value, described, resampled.low, resampled.high)
