"""Muon (Jordan et al. 2024), which updates the matrices of layers; all else stays with Adam.

A step is the average of past gradients with all its singular values made about equal, so that rare
directions are learned as fast as common ones. It is scaled to the size of Adam's steps (Liu et al.
2025), so both take the same learning rate. The average is Adam's first moment: checkpoints and
shares need nothing new for Muon, and Adam's second moment of these matrices is not used.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nmt.system.ranks import Share
from nmt.train.shares import Bucket

MOMENTUM = 0.95  # Jordan's; Adam's beta1 plays no part here
ADAM_STEP = 0.2  # the root mean square of Adam's steps at a rate of 1, by Liu et al.
# The polynomial a x + b x^3 + c x^5, of a matrix, brings singular values near 1 quickly, not exactly.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
ROUNDS = 5


class Muon:
    """Finds the steps of this rank's `shares` of matrices; several ranks have them in `layers`."""

    def __init__(
        self, shares: dict[str, Share], layers: Sequence[Bucket], dtype: torch.dtype
    ) -> None:
        self.shares, self.layers, self.dtype = shares, layers, dtype

    def find_steps(self, states: dict[Tensor, dict[str, Tensor]]) -> dict[Tensor, Tensor]:
        """Return what a rate of 1 subtracts from each weight. All ranks must call this."""
        averages = {
            name: states[share.weight]["exp_avg"].to(self.dtype)
            for name, share in self.shares.items()
        }
        by_shape: dict[torch.Size, dict[str, Tensor]] = {}  # all of a shape at once are faster
        for name, whole in (self.collect(averages) if self.layers else averages).items():
            by_shape.setdefault(whole.shape, {})[name] = whole
        steps: dict[Tensor, Tensor] = {}
        for shape, matrices in by_shape.items():
            stacked = orthogonalize(torch.stack(list(matrices.values())))
            stacked = stacked * (ADAM_STEP * max(shape) ** 0.5)
            for name, step in zip(matrices, stacked, strict=True):
                if name in self.shares:
                    share = self.shares[name]
                    steps[share.weight] = share.cut_from(step)
        return steps

    def collect(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make whole matrices, on every rank, of what each has one of for each of its shares."""
        whole: dict[str, Tensor] = {}
        for bucket in self.layers:
            flat = torch.zeros_like(bucket.gradients, dtype=self.dtype)
            cut = dict(zip(bucket.parameters, bucket.cut(flat), strict=True))
            for name in cut.keys() & parts.keys():
                self.shares[name].cut_from(cut[name]).copy_(parts[name])
            bucket.world.start_gathering(flat).wait()
            whole |= cut
        return whole


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of each matrix near 1, by Newton-Schulz iterations: (n, rows, columns)."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices  # the smaller product with itself
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
