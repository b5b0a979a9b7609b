"""Label-smoothed cross-entropy, summed over tokens and fused with the output projection; plain NLL beside it.

The authors' rule: 1 - eps on the gold piece, eps / (V - 1) on each other. Rows go through in chunks that stay in the
cache, and gradients are made on the way, so the full (T, V) logits never exist. Smoothing costs nothing: it enters the
gradients as one vector per chunk, not as a pass over the logits. Statistics are fp32 (fp64 for fp64 input) whatever the
products' precision.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nmt.batch import Batch
from nmt.model.transformer import Transformer

CHUNK = 2_560_000  # logits held at a time: 10 MB, about what a core's caches hold


class _FusedLoss(torch.autograd.Function):
    """(hidden (T, d), weight (V, d), labels (T,)) -> (smoothed sum, NLL sum); labels below 0 do not count."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float,
                needs_grad: bool) -> tuple[Tensor, Tensor]:
        n_vocab = weight.shape[0]
        others = smoothing / (n_vocab - 1)
        gold = 1.0 - smoothing - others  # beyond what every piece gets
        exact = torch.promote_types(hidden.dtype, torch.float32)
        fast = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else exact
        hidden, weight_fast = hidden.to(fast), weight.to(fast)
        counts = (labels >= 0).to(exact)
        smoothed, nll = weight.new_zeros((), dtype=exact), weight.new_zeros((), dtype=exact)
        grad_hidden = torch.empty_like(hidden, dtype=exact) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_grad else None
        rows = max(1, CHUNK // n_vocab)
        room = hidden.new_empty(min(rows, hidden.shape[0]), n_vocab, dtype=exact)  # one for all chunks
        with torch.autocast(hidden.device.type, enabled=False):
            all_logits = hidden.to(exact) @ weight.to(exact).sum(0)  # each row's logits, summed over the vocabulary
            for first in range(0, hidden.shape[0], rows):
                part = slice(first, first + rows)
                h, count, label = hidden[part], counts[part], labels[part].clamp(min=0)[:, None]
                logits = _product(h, weight_fast.T, room[:len(h)])  # (C, V)
                gold_logit = logits.gather(1, label).squeeze(1)
                top = logits.amax(1)
                shares = logits.sub_(top[:, None]).exp_()
                total = shares.sum(1)
                log_total = top + total.log()
                nll += ((log_total - gold_logit) * count).sum()
                smoothed += ((log_total - gold * gold_logit - others * all_logits[part]) * count).sum()
                if grad_hidden is None or grad_weight is None:
                    continue
                shares = shares.to(fast)
                scale = count / total
                grad_hidden[part] = (shares @ weight_fast).to(exact) * scale[:, None]
                scaled = (h.to(exact) * scale[:, None]).to(fast)
                if fast == exact:
                    grad_weight.addmm_(shares.T, scaled)
                else:
                    grad_weight += (shares.T @ scaled).to(exact)
        if grad_hidden is not None and grad_weight is not None:
            label, weighted = labels.clamp(min=0), hidden.to(exact) * counts[:, None]
            grad_hidden.addcmul_(weight.to(exact)[label], counts[:, None], value=-gold)
            grad_hidden.sub_(counts[:, None] * (others * weight.to(exact).sum(0)))
            grad_weight.index_add_(0, label, weighted, alpha=-gold)
            grad_weight.sub_(others * weighted.sum(0))
            ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(a @ b)


def loss_sums(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The label-smoothed loss and the plain NLL, each summed over the labels that count."""
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _FusedLoss.apply(hidden, weight, labels, smoothing, needs_grad)


class Objective(nn.Module):
    """The model with its loss, as one module: what DDP wraps, so that every gradient passes under its eyes."""

    def __init__(self, model: Transformer, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.model(batch.src, batch.tgt)
        return loss_sums(hidden, self.model.projection.weight, batch.labels, self.smoothing)
