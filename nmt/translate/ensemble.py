"""Several models that speak with one voice: the mean of their probabilities, piece by piece.

It is searched as a model is (`beam.Speaker`). Models may differ in everything but the vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nmt.data.batch import Packed
from nmt.model.cache import FLOAT
from nmt.translate.search import Speaker


@dataclass
class Caches:
    """One for each model."""

    each: list[Any]

    def reorder(self, parents: Tensor) -> None:
        for cache in self.each:
            cache.reorder(parents)

    def keep(self, n: int, holes: Tensor, movers: Tensor) -> None:
        for cache in self.each:
            cache.keep(n, holes, movers)


@dataclass
class StaticCaches:
    """Those of recorded steps, one for each model."""

    each: list[Any]

    @property
    def n_moves(self) -> int:
        return sum(cache.n_moves for cache in self.each)

    def resize(self, rows: Tensor | None, n: int, room: int) -> None:
        for cache in self.each:
            cache.resize(rows, n, room)

    def state(self) -> list[Tensor]:
        return [x for cache in self.each for x in cache.state()]

    def reorder(self, parents: Tensor) -> None:
        for cache in self.each:
            cache.reorder(parents)


class Ensemble:
    def __init__(self, models: Sequence[Speaker]) -> None:
        self.models = list(models)
        self.sizes = [model.config.d_model for model in models]
        learned = [model.config for model in models if model.config.positions == "learned"]
        self.config, self.n_vocab = models[0].config, models[0].n_vocab
        if learned:  # the shortest table bounds them all
            self.config = replace(
                learned[0], max_positions=min(config.max_positions for config in learned)
            )

    def start(self, src: Packed, beam: int) -> Caches:
        return Caches([model.start(src, beam) for model in self.models])

    def static_cache(self, beam: int) -> StaticCaches:
        return StaticCaches([model.static_cache(beam) for model in self.models])

    def restart(self, cache: StaticCaches, src: Packed, n: int, room: int, most_room: int) -> None:
        for model, each in zip(self.models, cache.each, strict=True):
            model.restart(each, src, n, room, most_room)

    def sentence_bytes(self, beam: int, longest: int, room: int) -> int:
        logits = 2 * len(self.models) * beam * self.n_vocab * FLOAT  # each model's and their stack
        return logits + sum(model.sentence_bytes(beam, longest, room) for model in self.models)

    def step(self, tokens: Tensor, cache: Caches | StaticCaches) -> Tensor:
        """What the models' projections take, side by side."""
        return torch.cat(
            [model.step(tokens, each) for model, each in zip(self.models, cache.each, strict=True)],
            1,
        )

    def projection(self, hidden: Tensor) -> Tensor:
        """Logits whose softmax is the mean of the models' probabilities."""
        parts = hidden.split(self.sizes, 1)
        each = [
            model.projection(x).float().log_softmax(1)
            for model, x in zip(self.models, parts, strict=True)
        ]
        return torch.stack(each).logsumexp(0) - math.log(len(each))
