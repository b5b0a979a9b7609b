"""Chooses among the candidates of an n-best list with a model of the other direction.

total = score of the list + REVERSE * log p(source | candidate), divided by the reverse model's
length penalty, + LENGTH * pieces of the candidate. With both weights 0, and among
equals, the order of the list is kept. The weights are chosen on a dev set: a table of BLEU over a
grid of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from nmt.score.score import score_bleu
from nmt.translate.n_best import NBest
from nmt.translate.pair_scores import PairScorer

LISTS_AT_ONCE = 512
REVERSE_GRID = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5)
LENGTH_GRID = (-0.1, 0.0, 0.05, 0.1, 0.15, 0.2, 0.3)


@dataclass(frozen=True)
class RerankWeights:
    reverse: float
    length: float

    def __str__(self) -> str:
        return f"{self.reverse:g},{self.length:g}"


@dataclass(frozen=True)
class RatedCandidates:
    """The candidates of one source, and the scores of each."""

    texts: list[str]
    scores: list[float]
    reverse_scores: list[float]
    lengths: list[int]  # in pieces

    def choose_best(self, weights: RerankWeights) -> str:
        totals = []
        for score, reverse, length in zip(
            self.scores, self.reverse_scores, self.lengths, strict=True
        ):
            total = score + weights.length * length
            if weights.reverse:  # 0 * -inf would be NaN
                total += weights.reverse * reverse
            totals.append(total)
        best = max(range(len(totals)), key=totals.__getitem__)  # of equals the first
        return self.texts[best].replace("\n", " ")


def rate_candidates(scorer: PairScorer, lists: Iterator[NBest]) -> Iterator[RatedCandidates]:
    """Score the source of each list given each of its candidates."""
    while some := list(islice(lists, LISTS_AT_ONCE)):
        texts: list[str] = []
        sources: list[str] = []
        for one in some:
            texts += one.texts
            sources += [one.source] * len(one.texts)
        scores = scorer.score_pairs(texts, sources)
        reverse_scores = iter([score.value("search", scorer.config) for score in scores])
        lengths = iter(map(len, scorer.translator.vocab.src.encode(texts)))
        for one in some:
            n = len(one.texts)
            yield RatedCandidates(
                one.texts, one.scores, list(islice(reverse_scores, n)), list(islice(lengths, n))
            )


def measure_weights(
    rated: Sequence[RatedCandidates], references: Sequence[str]
) -> dict[RerankWeights, float]:
    """Return the BLEU of the candidates that each pair of weights chooses."""
    scores = {}
    for reverse in REVERSE_GRID:
        for length in LENGTH_GRID:
            weights = RerankWeights(reverse, length)
            texts = [one.choose_best(weights) for one in rated]
            scores[weights] = score_bleu(texts, references).value
    return scores


def format_weights(scores: dict[RerankWeights, float]) -> str:
    """Format the table of BLEU, and the weights that are best; of equals the smaller ones."""
    rows = ["REVERSE  LENGTH " + " ".join(f"{length:7g}" for length in LENGTH_GRID)]
    for reverse in REVERSE_GRID:
        cells = [f"{scores[RerankWeights(reverse, length)]:7.2f}" for length in LENGTH_GRID]
        rows.append(f"{reverse:7g}         " + " ".join(cells))
    best = max(scores, key=lambda one: (scores[one], -one.reverse, -abs(one.length)))
    unchanged = scores[RerankWeights(0.0, 0.0)]
    rows.append(f"BLEU {unchanged:.2f} -> {scores[best]:.2f} with --rerank={best}")
    return "\n".join(rows) + "\n"
