"""Dropout (section 5.4), whose masks the backend draws."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from nmt.model.backend import BackendModule


class Dropout(BackendModule):
    """Zero each element with probability `rate` in training and scale the others by 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        return self.backend.drop(x, self.rate)


@contextmanager
def suspend_dropout(model: nn.Module) -> Iterator[None]:
    """Turn dropout off for now: the model may be in training."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
