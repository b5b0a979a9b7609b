"""Several models that translate together: the mean of their probabilities, piece by piece.

An ensemble is searched as a model is, by the methods of `Decodable`. Models may differ in
everything but the vocabulary. The mean is taken in `projection`, so `step` returns the models'
hidden states side by side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import Packed
from nmt.translate.search_state import NEG_INF, Decodable


@dataclass
class EnsembleCache:
    """The caches of the models."""

    each: list[Any]

    def reorder(self, parents: Tensor) -> None:
        for cache in self.each:
            cache.reorder(parents)

    def keep(self, n: int, free_rows: Tensor, moved_rows: Tensor) -> None:
        for cache in self.each:
            cache.keep(n, free_rows, moved_rows)


class Ensemble:
    """Models with one vocabulary, as one that can be searched."""

    def __init__(self, models: Sequence[Decodable]) -> None:
        self.models = list(models)
        self.sizes = [model.config.d_model for model in models]
        self.config, self.n_pieces = models[0].config, models[0].n_pieces
        self.writes_unknown = models[0].writes_unknown
        self.n_vocab = max(model.n_vocab for model in models)
        learned = [model.config for model in models if model.config.positions == "learned"]
        if learned:  # the shortest table bounds them all
            shortest = min(config.max_positions for config in learned)
            self.config = replace(learned[0], max_positions=shortest)

    def make_cache(self, src: Packed, beam: int) -> EnsembleCache:
        return EnsembleCache([model.make_cache(src, beam) for model in self.models])

    def step(self, tokens: Tensor, cache: EnsembleCache) -> Tensor:
        """The models' hidden states side by side, (S * B, sum of D)."""
        pairs = zip(self.models, cache.each, strict=True)
        return torch.cat([model.step(tokens, each) for model, each in pairs], 1)

    def projection(self, hidden: Tensor) -> Tensor:
        """Logits whose softmax is the mean of the models' probabilities."""
        log_probs = []
        for model, x in zip(self.models, hidden.split(self.sizes, 1), strict=True):
            log_prob = model.projection(x).float().log_softmax(1)
            n_missing = self.n_vocab - log_prob.shape[1]  # unused rows that other models have
            if n_missing:
                log_prob = F.pad(log_prob, (0, n_missing), value=NEG_INF)
            log_probs.append(log_prob)
        return average_log_probs(log_probs)


def average_log_probs(log_probs: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the mean of several models' probabilities."""
    if len(log_probs) == 1:
        return log_probs[0]
    # taken without leaving log space, where small probabilities survive
    return torch.stack(list(log_probs)).logsumexp(0) - math.log(len(log_probs))
