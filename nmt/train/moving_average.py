"""The exponential moving average of the weights, with which a run is validated and translates.

After update n it is d * average + (1 - d) * weights, with d = min(decay, (n + 1) / (n + 10)), so
that it follows the weights closely at the start; TensorFlow and Marian do the same. It is fp32 as
the weights are, and in as many shares. Checkpoints store it in place of the weights, which are saved with
Adam's moments: so translation reads the average without any change.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class MovingAverage:
    def __init__(self, weights: dict[str, nn.Parameter], decay: float) -> None:
        self.weights, self.decay = weights, decay
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the present weights, such as those that were just loaded."""
        for name, weight in self.weights.items():
            self.averages[name].copy_(weight)

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take in the weights after this update."""
        decay = min(self.decay, (step + 1) / (step + 10))
        weights = [weight.detach() for weight in self.weights.values()]
        torch._foreach_lerp_(list(self.averages.values()), weights, 1 - decay)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Exchange the weights of the model for their averages, and back."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # Values are copied, not tensors exchanged: compiled code knows the weights by their address.
        for name, weight in self.weights.items():
            kept = weight.detach().clone()
            weight.copy_(self.averages[name])
            self.averages[name].copy_(kept)
