"""R-Drop against its definition written with torch's own functions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_fast_paths import POST, V, batch_of, draw
from torch import Tensor

import nmt.train.rdrop as rdrop
from nmt.model.transformer import Transformer
from nmt.train.objective import Objective
from nmt.train.rdrop import compute_rdrop_sums

N_PIECES, D, T = 37, 8, 50


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    labels = torch.randint(0, N_PIECES, (T,))
    labels[::7] = -1
    first = torch.randn(T, D, dtype=dtype)
    second = first + 0.3 * torch.randn(T, D, dtype=dtype)
    weight = torch.randn(N_PIECES, D, dtype=dtype)
    return first.requires_grad_(), second.requires_grad_(), weight.requires_grad_(), labels


def write_out(
    first: Tensor, second: Tensor, weight: Tensor, labels: Tensor, smoothing: float, alpha: float
) -> tuple[Tensor, Tensor]:
    counts = labels >= 0
    logits = [x[counts] @ weight.T for x in (first, second)]
    # torch spreads smoothing over all pieces, the gold piece too
    spread = smoothing * N_PIECES / (N_PIECES - 1)
    loss, nll = torch.zeros(()), torch.zeros(())
    for x in logits:
        loss = loss + F.cross_entropy(x, labels[counts], reduction="sum", label_smoothing=spread)
        nll = nll + F.cross_entropy(x, labels[counts], reduction="sum")
    p, q = (x.log_softmax(-1) for x in logits)
    kl_qp = F.kl_div(p, q, reduction="sum", log_target=True)
    kl_pq = F.kl_div(q, p, reduction="sum", log_target=True)
    return loss / 2 + alpha / 4 * (kl_pq + kl_qp), nll / 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("chunk_rows", "block_rows"), [(512, 50), (7, 3), (7, 1)])
def test_equals_the_definition(
    smoothing: float, chunk_rows: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdrop, "MIN_CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(rdrop, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(rdrop, "PAIR_BLOCK_LOGITS", block_rows * N_PIECES)
    first, second, weight, labels = make_inputs()
    ours = compute_rdrop_sums(first, second, weight, labels, smoothing, 5.0)
    theirs = write_out(first, second, weight, labels, smoothing, 5.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(3.0 * ours[0], (first, second, weight))
    expected = torch.autograd.grad(3.0 * theirs[0], (first, second, weight))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_bf16_products_are_near() -> None:
    first, second, weight, labels = make_inputs(torch.float32)

    def find() -> tuple[Tensor, ...]:
        loss = compute_rdrop_sums(first, second, weight, labels, 0.1, 5.0)[0]
        return torch.autograd.grad(loss, (first, second, weight))

    exact = find()
    with torch.autocast("cpu", torch.bfloat16):
        fast = find()
    for a, b in zip(fast, exact, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() / b.norm() < 2e-2


def test_passes_differ_by_dropout_alone() -> None:
    """Without dropout the loss is that of one pass; with it, the passes cost some divergence."""
    batch = batch_of(draw(7))
    torch.manual_seed(1)
    model = Transformer(replace(POST, dropout=0.3), V).train()
    model.eval()
    torch.testing.assert_close(Objective(model, 0.1, 5.0)(batch), Objective(model, 0.1)(batch))
    model.train()
    losses = []
    for alpha in (1e-9, 5.0):
        torch.manual_seed(2)
        losses.append(Objective(model, 0.1, alpha)(batch)[0].item())
    assert losses[1] > 1.01 * losses[0]
