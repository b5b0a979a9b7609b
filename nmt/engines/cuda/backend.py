"""Parts of a model on a GPU: attention by a kernel of ours, torch's own dropout and products with a
bias, and gradients of embeddings that repeat bit by bit. Nothing waits for the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.engines.cuda.attention_triton import supports_triton, triton_attention
from nmt.engines.cuda.embedding_gradient import LookUp
from nmt.engines.cuda.loss_triton import compute_loss
from nmt.model.attention_mask import AttentionMask
from nmt.model.backend import Backend
from nmt.model.packed_attention import rotate


class DeviceMask(AttentionMask):
    """A mask of which the host reads nothing: one group of all sentences, which may be empty."""

    host_reads = False


class CudaBackend(Backend):
    compute_loss = staticmethod(compute_loss)
    small_product = 0  # every product is one launch
    make_mask = DeviceMask

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
        if weights is None and supports_triton(q, v):  # the kernel keeps no weights
            q, k = rotate(q, rotation), rotate(k, rotation)
            return triton_attention(q, k, v, mask.key_intervals, mask.query_intervals, dropout)
        return super().attend(q, k, v, mask, weights, dropout, rotation)

    def draw_factors(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(torch.ones_like(x), rate, True)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(x, rate, True)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if (
            torch.is_grad_enabled()
        ):  # the compiler adds the bias in a kernel that is launched anyway
            return super().multiply(x, weight, bias)
        return F.linear(x, weight, bias)  # one launch

    def look_up(self, table: Tensor, numbers: Tensor) -> Tensor:
        rows: Tensor = LookUp.apply(table, numbers)
        return rows
