"""R-Drop (Liang et al. 2021): each pair passes through the model twice, and what dropout makes of
the two is drawn together.

The loss of a token is the mean of its two smoothed losses plus alpha / 4 of (KL(p, q) + KL(q, p)),
where p and q are what the two passes predict. That is half the sum in the paper, so the loss
compares with that of other runs and alpha means the same. As in `loss.py`, rows are processed in
chunks, with their gradients, so the logits of a whole batch never exist.
"""

from typing import Any

import torch
from torch import Tensor

from nmt.train.loss import CHUNK_LOGITS, MIN_CHUNK_ROWS

# Some fifteen operations read a block, so it must fit the caches.
PAIR_BLOCK_LOGITS = 500_000


class _PairLoss(torch.autograd.Function):
    """(two hidden (T, d), weight (V, d), labels (T,)) -> (loss sum, NLL sum); labels below 0 do not
    count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        weight: Tensor,
        labels: Tensor,
        smoothing: float,
        alpha: float,
    ) -> tuple[Tensor, Tensor]:
        loss, nll, *gradients = pair_loss_forward(first, second, weight, labels, smoothing, alpha)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        first, second, weight = (gradient * grad for gradient in ctx.saved_tensors)
        return first, second, weight, None, None, None


def pair_loss_forward(
    first: Tensor, second: Tensor, weight: Tensor, labels: Tensor, smoothing: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss and the NLL, summed over the labels that count, and the loss's gradients of
    `first`, `second` and `weight`.
    """
    n_rows, n_vocab, device = first.shape[0], weight.shape[0], first.device.type
    others = smoothing / (n_vocab - 1)  # what each piece gets
    gold = 1.0 - smoothing - others  # what the gold piece gets beyond that
    label = labels.clamp(min=0)[:, None]  # (T, 1)

    # two precisions: of the products, and of everything else
    exact = torch.promote_types(first.dtype, torch.float32)
    fast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else exact
    counts = (labels >= 0).to(exact)[:, None]  # (T, 1)
    hidden = [first.to(exact) * counts, second.to(exact) * counts]
    hidden_fast = [x.to(fast) for x in hidden]
    weight_fast, weight = weight.to(fast), weight.to(exact)
    grad_hidden = [torch.empty_like(x) for x in hidden]
    grad_weight = torch.zeros_like(weight)
    loss, nll = weight.new_zeros(()), weight.new_zeros(())

    chunk = max(MIN_CHUNK_ROWS, CHUNK_LOGITS // 2 // n_vocab)
    block = max(1, PAIR_BLOCK_LOGITS // n_vocab)
    with torch.autocast(device, enabled=False):
        vocab_sum = weight.sum(0)  # its product with a hidden row is the sum of the row's logits
        all_logits = [x @ vocab_sum[:, None] for x in hidden]  # each (T, 1)
        for begin in range(0, n_rows, chunk):
            rows = slice(begin, min(begin + chunk, n_rows))
            logits = [x[rows] @ weight_fast.T for x in hidden_fast]  # each (C, V)

            # losses, and in place of the logits what the softmax adds to the gradients
            for start in range(begin, rows.stop, block):
                part = slice(start, min(start + block, rows.stop))
                places = slice(start - begin, part.stop - begin)
                exact_logits = [x[places].to(exact) for x in logits]
                (p, total_p), (q, total_q) = map(_softmax, exact_logits)
                for x, total, sums in zip(
                    exact_logits, (total_p, total_q), all_logits, strict=True
                ):
                    gold_logit = x.gather(1, label[part])
                    own = total - gold * gold_logit - others * sums[part]
                    loss += (own * counts[part]).sum() / 2
                    nll += ((total - gold_logit) * counts[part]).sum() / 2
                log_p, log_q = exact_logits[0].sub_(total_p), exact_logits[1].sub_(total_q)
                ratio = log_p.sub_(log_q)
                kl_pq = (p * ratio).sum(1, keepdim=True)
                kl_qp = -(q * ratio).sum(1, keepdim=True)
                loss += alpha / 4 * ((kl_pq + kl_qp) * counts[part]).sum()
                # of the two divergences: p (log p - log q - KL(p, q)) + p - q; and half of p
                grad_p = (ratio - (kl_pq - 1)).mul_(alpha / 4).add_(0.5).mul_(p)
                grad_q = (ratio + (kl_qp - 1)).mul_(-alpha / 4).add_(0.5).mul_(q)
                logits[0][places] = grad_p.sub_(q, alpha=alpha / 4)
                logits[1][places] = grad_q.sub_(p, alpha=alpha / 4)

            for number, shares in enumerate(logits):
                grad_hidden[number][rows] = shares @ weight_fast
                grad_weight.add_(shares.T @ hidden_fast[number][rows])

        # what the gold piece and smoothing add, half from each pass, for all rows at once
        for x, gradient in zip(hidden, grad_hidden, strict=True):
            gradient.sub_(weight[label[:, 0]], alpha=gold / 2).sub_(vocab_sum, alpha=others / 2)
            gradient.mul_(counts)
            grad_weight.index_add_(0, label[:, 0], x, alpha=-gold / 2)
            grad_weight.sub_(others / 2 * x.sum(0))
    return loss, nll, grad_hidden[0], grad_hidden[1], grad_weight


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax of logits (B, V), and their log sum exp, (B, 1)."""
    p = torch.softmax(logits, 1)
    # The largest probability is at least 1 / V, so its logarithm is exact enough.
    return p, logits.amax(1, keepdim=True) - p.amax(1, keepdim=True).log()


def compute_rdrop_sums(
    first: Tensor, second: Tensor, weight: Tensor, labels: Tensor, smoothing: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """Compute the loss of two passes and the mean of their plain NLL, each summed over the labels
    that count.
    """
    return _PairLoss.apply(first, second, weight, labels, smoothing, alpha)
