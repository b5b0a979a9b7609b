"""What an optimizer keeps for a weight: said once, for all who save, load, count or check it.

The optimizer itself is in nmt/train/optimizer.py. This is here, because a checkpoint is checked, and the
memory of a training is computed, without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nmt.config import OptimizerConfig

WEIGHT_BYTES = 4  # weights and moments are fp32


@dataclass(frozen=True)
class Moments:
    # Of tensors that have the weight's shape, beside the number of its steps. A rank that updates a
    # share of a weight keeps the same share of them. The first is a mean of the gradients.
    names: tuple[str, ...]
    needs_whole: bool = False  # an update reads the whole matrix, so ranks may not divide it


ADAM = Moments(("exp_avg", "exp_avg_sq"))
MOMENT_BYTES = WEIGHT_BYTES * len(ADAM.names)  # at least, for an element of a weight


def choose_moments(config: OptimizerConfig, name: str, shape: Sequence[int]) -> Moments:
    """Return what a run with this config keeps for the weight of this name and shape."""
    return ADAM
