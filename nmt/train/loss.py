"""Label-smoothed cross-entropy, summed over tokens and fused with the output projection; and the
plain NLL.

The authors' rule: 1 - eps on the gold piece, eps / (V - 1) on every other piece. Rows are processed
in chunks, and gradients are computed along with the loss, so the full (T, V) logits never exist.
Smoothing costs nothing: it enters the gradients once for all rows, not as a pass over the logits.
Statistics are fp32 (fp64 for fp64 input) whatever the products' precision. A backend may compute the same
in another way (nmt/engines/cuda/loss_triton.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.data.batch import Batch
from nmt.model.backend import PLAIN, Backend, ComputeLoss, LossAndGradients
from nmt.model.transformer import Transformer

# (logits (B, V), labels (B, 1), the type of the results) -> log sum exp and the gold piece's logit, each (B, 1); the
# logits become their softmax
SoftmaxInPlace = Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]


class Chunks(NamedTuple):
    """How many rows are processed at a time."""

    most_logits: int = 48_000_000  # held at a time
    least_rows: int = 512  # because each chunk reads all weights
    # A chunk has at most d_model times as many rows, so that its logits stay in the caches.
    rows_per_column: int = 4
    block_logits: int = 2_000_000  # in full precision, few enough for the caches


CHUNKS = Chunks()


class _FusedLoss(torch.autograd.Function):
    """(hidden (T, d), weight (V, d), labels (T,)) -> (smoothed sum, NLL sum); labels below 0 do not
    count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        smoothing: float,
        needs_grad: bool,
        compute: ComputeLoss,
    ) -> tuple[Tensor, Tensor]:
        smoothed, nll, grad_hidden, grad_weight = compute(
            hidden, weight, labels, smoothing, needs_grad
        )
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None, None


def chunked_loss_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float,
    needs_grad: bool,
    softmax_in_place: SoftmaxInPlace | None = None,
    chunks: Chunks = CHUNKS,
) -> LossAndGradients:
    """(T, d), (V, d), (T,) -> smoothed sum, NLL sum, and the smoothed sum's gradients of `hidden`
    and `weight`.
    """
    softmax_in_place = softmax_in_place or _softmax_in_place
    n_rows, n_vocab, device = hidden.shape[0], weight.shape[0], hidden.device.type
    others = smoothing / (n_vocab - 1)  # what each piece gets
    gold = 1.0 - smoothing - others  # what the gold piece gets beyond that
    counts = labels >= 0
    label = labels.clamp(min=0)[:, None]  # (T, 1)

    # two precisions: of the products, and of everything else
    exact = torch.promote_types(hidden.dtype, torch.float32)
    fast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else exact
    counts = counts.to(exact)[:, None]  # (T, 1)
    hidden_fast, weight_fast = hidden.to(fast), weight.to(fast)
    hidden, weight = hidden.to(exact), weight.to(exact)
    counted = hidden * counts
    counted_fast = counted.to(fast)

    # Not summed in place: code compiled by torch 2.11 would then return gradients of zero.
    smoothed, nll = weight.new_zeros(()), weight.new_zeros(())
    grad_hidden = torch.empty_like(hidden) if needs_grad else None
    grad_weight = torch.zeros_like(weight) if needs_grad and not n_rows else None
    most_rows = min(chunks.most_logits // n_vocab, chunks.rows_per_column * hidden.shape[1])
    n_chunks = max(1, -(-n_rows // max(chunks.least_rows, most_rows)))
    chunk = max(1, -(-n_rows // n_chunks))
    block = max(1, chunks.block_logits // n_vocab)
    columns = weight_fast.T.contiguous()  # (d, V), which multiplies faster
    buffer = hidden_fast.new_empty(min(chunk, n_rows), n_vocab)  # one for all chunks
    with torch.autocast(device, enabled=False):
        vocab_sum = weight.sum(0)  # its product with a hidden row is the sum of the row's logits
        all_logits = hidden @ vocab_sum[:, None]  # (T, 1)
        for first in range(0, n_rows, chunk):
            rows = slice(first, min(first + chunk, n_rows))
            shares = buffer[: rows.stop - first]  # (C, V), at first logits, then probabilities
            torch.mm(hidden_fast[rows], columns, out=shares)

            # losses, block by block
            for start in range(first, rows.stop, block):
                part = slice(start, min(start + block, rows.stop))
                block_shares = shares[start - first : part.stop - first]
                log_total, gold_logit = softmax_in_place(block_shares, label[part], exact)
                nll = nll + ((log_total - gold_logit) * counts[part]).sum()
                loss = log_total - gold * gold_logit - others * all_logits[part]
                smoothed = smoothed + (loss * counts[part]).sum()

            # what the softmax adds to the gradients
            if grad_hidden is not None:
                grad_hidden[rows] = shares @ weight_fast
                product = (shares.T @ counted_fast[rows]).to(exact)
                grad_weight = product if grad_weight is None else grad_weight.add_(product)

    # what the gold piece and smoothing add, for all rows at once
    if grad_hidden is not None and grad_weight is not None:
        grad_hidden.sub_(weight[label[:, 0]], alpha=gold).sub_(vocab_sum, alpha=others).mul_(counts)
        grad_weight.index_add_(0, label[:, 0], counted, alpha=-gold).sub_(others * counted.sum(0))
    return smoothed, nll, grad_hidden, grad_weight


def _softmax_in_place(logits: Tensor, label: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Replace logits (B, V) by their softmax; return log sum exp and the gold piece's logit, each
    (B, 1).
    """
    exact_logits = logits.to(exact)
    gold_logit = exact_logits.gather(1, label)
    top = exact_logits.amax(1, keepdim=True)
    probabilities = torch.softmax(exact_logits, 1, out=exact_logits)
    logits.copy_(probabilities)
    # The largest probability is at least 1 / V, so its logarithm is exact enough.
    log_total = top - probabilities.amax(1, keepdim=True).log()
    return log_total, gold_logit


def compute_loss_sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, backend: Backend = PLAIN
) -> tuple[Tensor, Tensor]:
    """Compute the label-smoothed loss and the plain NLL, each summed over the labels that count."""
    compute = backend.compute_loss or chunked_loss_forward
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _FusedLoss.apply(hidden, weight, labels, smoothing, needs_grad, compute)


def add_bias_column(hidden: Tensor, projection: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return hidden states and a matrix whose product has the bias of the projection, if it has one: a
    further column of ones meets the bias. Zeros fill up to a multiple of eight, which is fast.
    """
    weight = projection.weight
    bias: Tensor | None = projection.bias
    if bias is None:
        return hidden, weight
    ones = hidden.new_zeros(len(hidden), 8)
    ones[:, 0] = 1
    biases = torch.nn.functional.pad(bias[:, None].to(weight.dtype), (0, 7))
    return torch.cat((hidden, ones), 1), torch.cat((weight, biases), 1)


class Objective(nn.Module):
    """The model with its loss as one module, which is what gets compiled."""

    def __init__(self, model: Transformer, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.model(batch.src, batch.tgt)
        hidden, weight = add_bias_column(hidden, self.model.projection)
        return compute_loss_sums(hidden, weight, batch.labels, self.smoothing, self.model.backend)
