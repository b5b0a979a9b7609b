"""What the model leaves to others to compute faster: attention, dropout, products with a bias, look-ups.

This is the plain form of each, in torch alone, on any device. A trainer or a translator may hand in
another backend (nmt/engines/), once for a whole model. A part of the model that computes something of
these is a `BackendModule`, and asks its backend for it.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.attention_mask import AttentionMask
from nmt.model.dropout_masks import draw_factors, drop
from nmt.model.packed_attention import attend, look_up_rows

# smoothed sum, NLL sum, and the smoothed sum's gradients of hidden and weight
LossAndGradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
# of hidden (T, d), weight (V, d), labels (T,), smoothing, needs_grad
ComputeLoss = Callable[[Tensor, Tensor, Tensor, float, bool], LossAndGradients]


class Backend:
    """Plain torch. Engines override what they do better, and nothing else."""

    # The loss, fused with the output projection; None is that of nmt/train/loss.py.
    compute_loss: ComputeLoss | None = None
    # A product of a decoding step with fewer multiplications stays in its own thread: waking others takes
    # longer.
    small_product = 1 << 16
    make_mask: type[AttentionMask] = AttentionMask

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        weights: list[Tensor] | None = None,
        dropout: float = 0.0,
        rotation: Tensor | None = None,
    ) -> Tensor:
        """As `attend` of packed_attention.py."""
        draw, look_up = self.draw_factors, self.look_up
        return attend(q, k, v, mask, weights, dropout, rotation, draw, look_up)

    def draw_factors(self, x: Tensor, rate: float) -> Tensor:
        """Draw what `attend` multiplies its weights by in dropout."""
        return draw_factors(x, rate)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Zero each element with probability `rate`, and scale the others by 1 / (1 - rate)."""
        return drop(x, rate)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute x weight^T + bias: (T, I), (O, I), (O,) -> (T, O)."""
        y = F.linear(x, weight)
        return y.add_(bias.to(y.dtype))

    def look_up(self, table: Tensor, numbers: Tensor) -> Tensor:
        """Return the rows of a table (rows, d) that have these numbers, (...) -> (..., d)."""
        return look_up_rows(table, numbers)


PLAIN = Backend()


class BackendModule(nn.Module):
    """A part of the model that its backend computes."""

    backend = PLAIN


def use_backend(model: nn.Module, backend: Backend) -> None:
    """Have all parts of a model computed by this backend."""
    for module in model.modules():
        if isinstance(module, BackendModule):
            module.backend = backend
