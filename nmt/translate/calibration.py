"""Are a model's probabilities trustworthy: is it right on 70 % of the pieces to which it gives 70 %?

Each piece of a reference is predicted from the true pieces before it. The confidence is the
probability of the most probable piece, which is right if it is the reference's. The expected
calibration error of Guo et al. (2017) sorts the predictions into bins by confidence. It is the mean
distance between confidence and accuracy, weighted by the number of predictions in each bin. The
training loss does not compute probabilities, so this is a separate forward pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmt.score.score import compute_perplexity
from nmt.system.errors import Failure
from nmt.system.memory import explain_memory_error
from nmt.system.progress import track
from nmt.translate.ensemble import average_log_probs
from nmt.translate.pair_scores import (
    SCORING_TOO_LARGE,
    PairScorer,
    batch_pairs,
    iterate_log_probs,
)

N_BINS = 20  # of equal width


@dataclass(frozen=True)
class Calibration:
    """Sums over the pieces, end marks included, for each bin of confidence."""

    counts: list[int]
    confidence_sums: list[float]
    correct_counts: list[int]
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
        return compute_perplexity(self.nll)

    @property
    def confidence(self) -> float:
        return math.fsum(self.confidence_sums) / self.n_pieces

    @property
    def accuracy(self) -> float:
        return sum(self.correct_counts) / self.n_pieces

    @property
    def error(self) -> float:
        """The expected calibration error, 0 to 1."""
        # In each bin, this is the count times |mean confidence - accuracy|.
        sums = zip(self.confidence_sums, self.correct_counts, strict=True)
        weighted_distances = [abs(confidence - n_correct) for confidence, n_correct in sums]
        return math.fsum(weighted_distances) / self.n_pieces


def sum_bins(log_probs: Tensor, gold: Tensor) -> Tensor:
    """Return for each bin the number of pieces, the sum of their confidences and the number of correct
    ones, (3, bins); `log_probs` is (T, V).
    """
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
    if not pairs.places:
        return None
    batches = batch_pairs(pairs.sources, pairs.targets, device, scorer.batch_tokens)
    sums = torch.zeros(3, N_BINS, dtype=torch.float64, device=device)
    nll_sum = torch.zeros((), dtype=torch.float64, device=device)
    for batch in track(batches, "reading references", "batches"):
        with explain_memory_error(Failure(SCORING_TOO_LARGE)):
            for each, gold in iterate_log_probs(models, batch):
                log_probs = average_log_probs(each)
                # the authors' vocabulary is padded: its last rows are no pieces
                sums += sum_bins(log_probs[:, : models[0].n_pieces], gold[:, 0])
                nll_sum -= log_probs.gather(1, gold).double().sum()
    counts, confidence_sums, correct_counts = sums.cpu()
    return Calibration(
        [round(n) for n in counts.tolist()],
        confidence_sums.tolist(),
        [round(n) for n in correct_counts.tolist()],
        float(nll_sum),
        len(pairs.problems),
    )
