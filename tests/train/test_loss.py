"""The fused loss against the definition written out, in float64 and fp32, values and gradients."""

from functools import partial
from typing import Any

import torch
from pytest import approx, mark
from torch import Tensor, nn

from nmt.model.backend import Backend
from nmt.train.loss import (
    Chunks,
    _softmax_in_place,
    add_bias_column,
    chunked_loss_forward,
    compute_loss_sums,
)

V, D, T = 37, 8, 50


def inputs(dtype: torch.dtype = torch.float64, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    labels = torch.randint(0, V, (T,))
    labels[::7] = -1
    hidden = (size * torch.randn(T, D, dtype=dtype)).requires_grad_()
    return hidden, torch.randn(V, D, dtype=dtype).requires_grad_(), labels


def written_out(
    hidden: Tensor, weight: Tensor, labels: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """1 - eps on the gold piece, eps / (V - 1) on each of the others."""
    live = labels >= 0
    log_p = (hidden[live] @ weight.T).log_softmax(-1)
    target = torch.full_like(log_p, eps / (V - 1)).scatter_(1, labels[live, None], 1 - eps)
    return -(target * log_p).sum(), -log_p.gather(1, labels[live, None]).sum()


@mark.parametrize("eps", [0.0, 0.1, 0.3])
@mark.parametrize(
    "chunk, per_column, block, rounds",
    [(7, 9, 3, (8, 22)), (16, 9, 1, (4, 50)), (T, 9, T, (1, 1)), (T, 1, T, (7, 7))],
)
def test_equals_the_definition(
    eps: float, chunk: int, per_column: int, block: int, rounds: tuple[int, int]
) -> None:
    """In so many rows at a time, and in so many chunks and blocks of all chunks."""
    places = []

    def count(logits: Tensor, *rest: Any) -> Any:
        places.append(logits.storage_offset())  # of a block in its chunk
        return _softmax_in_place(logits, *rest)

    chunks = Chunks(chunk * V, 1, per_column, block * V)
    backend = Backend()
    backend.compute_loss = partial(chunked_loss_forward, softmax_in_place=count, chunks=chunks)
    hidden, weight, labels = inputs()
    ours = compute_loss_sums(hidden, weight, labels, eps, backend)
    assert (places.count(0), len(places)) == rounds
    grads = torch.autograd.grad(3.0 * ours[0], (hidden, weight))
    theirs = written_out(hidden, weight, labels, eps)
    expected = torch.autograd.grad(3.0 * theirs[0], (hidden, weight))
    for a, b in zip((*ours, *grads), (*theirs, *expected), strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, float(b.detach().abs().max()))


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels = inputs(torch.float32, size=300.0)
    ours, theirs = (
        compute_loss_sums(hidden, weight, labels, 0.1),
        written_out(hidden, weight, labels, 0.1),
    )
    assert ours[0].isfinite() and ours[0].item() == approx(theirs[0].item(), rel=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(ours[0], (hidden, weight)))


def test_bf16_products_are_near() -> None:
    hidden, weight, labels = inputs(torch.float32)
    exact = torch.autograd.grad(compute_loss_sums(hidden, weight, labels, 0.1)[0], (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        fast = torch.autograd.grad(
            compute_loss_sums(hidden, weight, labels, 0.1)[0], (hidden, weight)
        )
    for a, b in zip(fast, exact, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() / b.norm() < 1e-2


def test_without_gradients_the_values_are_the_same() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad():
        quiet = compute_loss_sums(hidden, weight, labels, 0.1)
    assert [x.item() for x in quiet] == [
        x.item() for x in compute_loss_sums(hidden, weight, labels, 0.1)
    ]


def test_the_bias_of_a_projection_is_a_column() -> None:
    hidden, _, labels = inputs()
    projection = nn.Linear(D, V, dtype=torch.float64)
    ours = compute_loss_sums(*add_bias_column(hidden, projection), labels, 0.1)
    live = labels >= 0
    expected = nn.functional.cross_entropy(projection(hidden[live]), labels[live], reduction="sum")
    assert ours[1].item() == approx(expected.item())
    parameters = (hidden, projection.weight, projection.bias)
    plain = written_out(hidden + 0, projection.weight, labels, 0.1)
    assert plain[0] != ours[0]  # the bias counts
    nll = compute_loss_sums(*add_bias_column(hidden, projection), labels, 0.0)[0]
    found, wanted = torch.autograd.grad(nll, parameters), torch.autograd.grad(expected, parameters)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b)
