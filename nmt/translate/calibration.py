"""Whether a model's probabilities are as they claim: of the pieces that it is 70 % sure of, are 70 %
right?

Each piece of a reference is predicted from the true pieces before it. The confidence is the
probability of the most probable piece; it is right if that is the reference's. The expected
calibration error of Guo et al. (2017) sorts pieces into bins by confidence and takes the mean distance
of confidence and accuracy over the bins, weighed by their pieces. The loss hands out no
probabilities, so this is a pass of its own: forward only, a small share of what a search costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmt.system.progress import track
from nmt.translate.pair_scores import (
    PairScorer,
    batch_pairs,
    count_scored_rows,
    report_short_memory,
)

N_BINS = 20  # of equal width


@dataclass(frozen=True)
class Calibration:
    """Sums over the pieces, end marks included, by the bin of their confidence."""

    counts: list[int]
    confidences: list[float]
    correct: list[int]
    nll_sum: float
    impossible: int = 0  # pairs that the model cannot have translated; not counted

    @property
    def n_pieces(self) -> int:
        return sum(self.counts)

    @property
    def nll(self) -> float:
        return self.nll_sum / self.n_pieces

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll, 50.0))

    @property
    def confidence(self) -> float:
        return math.fsum(self.confidences) / self.n_pieces

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / self.n_pieces

    @property
    def error(self) -> float:
        """The expected calibration error, 0 to 1."""
        distances = [
            abs(confidence - correct)
            for confidence, correct in zip(self.confidences, self.correct, strict=True)
        ]
        return math.fsum(distances) / self.n_pieces


def sum_bins(log_probs: Tensor, gold: Tensor) -> Tensor:
    """Sum over the rows of log_probs (T, V): pieces, confidence and correct ones of each bin, (3, bins)."""
    highest, best = log_probs.max(1)
    confidence = highest.exp()
    # a confidence of 1 belongs to the last bin
    bins = (confidence.double() * N_BINS).long().clamp(max=N_BINS - 1)
    figures = torch.stack((torch.ones_like(confidence), confidence, (best == gold).float()))
    sums = torch.zeros(3, N_BINS, dtype=torch.float64, device=gold.device)
    return sums.index_add_(1, bins, figures.double())


@torch.inference_mode()
def measure_calibration(
    scorer: PairScorer, sources: Sequence[str], targets: Sequence[str]
) -> Calibration | None:
    """Compare the model's probabilities, or the mean of several models', with these targets. None if no
    pair is possible.
    """
    models, device = scorer.translator.prepared_models, scorer.translator.device
    pairs = scorer.encode_pairs(sources, targets)
    batches = batch_pairs(pairs.sources, pairs.targets, device, scorer.batch_tokens)
    sums = torch.zeros(3, N_BINS, dtype=torch.float64, device=device)
    nll_sum = torch.zeros((), dtype=torch.float64, device=device)
    n_rows = min(count_scored_rows(model) for model in models)
    for batch in track(batches, "reading references", "batches"):
        with report_short_memory():
            hidden = [model(batch.src, batch.tgt).split(n_rows) for model in models]
            for *rows, gold in zip(*hidden, batch.gold.split(n_rows), strict=True):
                each = []
                for model, states in zip(models, rows, strict=True):
                    each.append(model.projection(states).float().log_softmax(1))  # (C, V)
                log_probs = each[0]
                if len(each) > 1:  # the mean of their probabilities, as in a search
                    log_probs = torch.stack(each).logsumexp(0) - math.log(len(each))
                # the authors' model has rows after those of the pieces
                sums += sum_bins(log_probs[:, : models[0].n_pieces], gold)
                nll_sum -= log_probs.gather(1, gold[:, None]).double().sum()
    if not pairs.places:
        return None
    counts, confidences, correct = sums.cpu()
    return Calibration(
        [round(n) for n in counts.tolist()],
        confidences.tolist(),
        [round(n) for n in correct.tolist()],
        float(nll_sum),
        len(pairs.problems),
    )
