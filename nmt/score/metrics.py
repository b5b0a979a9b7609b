"""The ladder: one output counted in every way in which results are quoted, from sacreBLEU's to that of the authors.

One and the same model is worth 27.5 on the first rung and 29.0 on the last, so that a figure means nothing without its
rung. A rung is a metric of sacreBLEU over text prepared for it; its signature is sacreBLEU's own, with the test set,
its lines, what was done to the text, and the version of this package. The rung of the paper's Table 2 is marked.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt.score import moses
from nmt.score.score import Score, check, headline
from nmt.score.significance import Interval, interval, seed_asked_for

Prepare = Callable[[str], str]


@dataclass(frozen=True)
class Rung:
    name: str
    metric: Callable[[], Metric]  # a new one for each use: it remembers what it has counted
    hypothesis: Prepare = str
    reference: Prepare = str
    tokens: str = ""  # what the signature says of them instead of tok:none
    is_papers: bool = False  # Table 2 was counted so

    def prepared(
        self, hypotheses: Sequence[str], references: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        return list(map(self.hypothesis, hypotheses)), list(map(self.reference, references))


@dataclass(frozen=True)
class Measured:
    """A score and, where it was asked for, its uncertainty."""

    score: Score
    interval: Interval | None
    is_papers: bool


def bleu_rung(name: str, tokenize: str = "13a", is_lowercase: bool = False) -> Rung:
    return Rung(name, partial(BLEU, tokenize=tokenize, lowercase=is_lowercase))


HEADLINE = Rung("BLEU", headline)  # what validation reports
CHRF2 = Rung("chrF2", CHRF)
EDITS = Rung("TER", TER)


def papers_rung(language: str) -> Rung:
    """What Table 2 would have been counted on; for languages that it has not, tokens as they are."""
    rungs = {rung.name: rung for rung in _tokenized(language)}
    return next((rung for rung in rungs.values() if rung.is_papers), rungs["BLEU tokenised"])


def ladder(language: str) -> Iterator[Rung]:
    """All rungs for a target language, from the headline to the paper's; then what is not BLEU."""
    yield HEADLINE
    yield bleu_rung("BLEU, lower-cased", is_lowercase=True)
    yield bleu_rung("BLEU intl", "intl")
    yield bleu_rung("BLEU intl, lower-cased", "intl", is_lowercase=True)
    yield from _tokenized(language)
    yield CHRF2
    yield EDITS


def _tokenized(language: str) -> Iterator[Rung]:
    """Text as Moses tokenised it in 2017, counted as multi-bleu.perl counts. Compounds were split for German alone."""
    language = re.split("[-_]", language.lower())[0]  # de_AT is German
    tokens = cache(moses.tokenizer(language))  # several rungs ask for the same line

    def split(line: str) -> str:
        return moses.split_compounds(tokens(line))

    def split_plain(line: str) -> str:
        return split(moses.plain_quotes(line))

    rung = partial(Rung, metric=partial(BLEU, tokenize="none", force=True, smooth_method="none"))
    name = f"moses-2017.{language}"
    yield rung(
        "BLEU tokenised",
        hypothesis=tokens,
        reference=tokens,
        tokens=name,
        is_papers=language == "fr",
    )
    if language == "de":
        yield rung(
            "BLEU tokenised, split", hypothesis=split, reference=split, tokens=f"{name}+atat"
        )
        yield rung(
            "BLEU tokenised, split, plain quotes",
            hypothesis=split,
            reference=split_plain,
            tokens=f"{name}+atat+refquotes",
            is_papers=True,
        )


def measure(
    rung: Rung,
    hypotheses: Sequence[str],
    references: Sequence[str],
    test: str,
    pair: str,
    n_bootstrap: int = 0,
) -> Measured:
    """Climb one rung, with so many resamples also its 95 % interval. `test` names the set, `pair` is like en-de."""
    check(hypotheses, references)
    texts, gold = rung.prepared(hypotheses, references)
    metric = rung.metric()
    value = metric.corpus_score(texts, [gold]).score
    signature = metric.get_signature()
    for key, said in (
        ("test", test),
        ("lang", pair),
        ("tok", rung.tokens),
        ("lines", str(len(texts))),
        ("lists", rung.tokens and moses.LISTS),
    ):
        if said:
            signature.update(key, said)
    bounds = (
        interval(rung.metric(), texts, gold, n_bootstrap, seed_asked_for()) if n_bootstrap else None
    )
    if bounds:
        signature.update("bs", str(bounds.n))
        signature.update("seed", str(bounds.seed))
    return Measured(
        Score(rung.name, value, f"{signature.format()}|nmt:{version('nmt')}"),
        bounds,
        rung.is_papers,
    )
