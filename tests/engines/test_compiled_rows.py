"""The compiled softmax of logits against torch's; and what does not change its bits."""

import torch
from pytest import MonkeyPatch, importorskip, mark
from torch import Tensor

importorskip("numba")

from nmt.engines.cpu.backend import CpuBackend, load_compiled
from nmt.model.backend import Backend
from nmt.train import loss
from nmt.train.loss import compute_loss_sums

pytestmark = mark.timeout(300)  # numba compiles, unless it did so before
V, D, T = 150, 24, 90  # neither is a whole number of vectors
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def draw(dtype: torch.dtype, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    labels = torch.randint(0, V, (T,))
    labels[::7] = -1
    hidden = (size * torch.randn(T, D)).to(dtype)
    return hidden, torch.randn(V, D), labels


def compute(backend: Backend, *inputs: Tensor) -> list[Tensor]:
    hidden, weight, labels = inputs
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=hidden.dtype == torch.bfloat16):
        sums = compute_loss_sums(hidden, weight, labels, 0.1, backend)
    return [*sums, *torch.autograd.grad(sums[0], (hidden, weight))]


@mark.parametrize("dtype", BOUNDS)
@mark.parametrize("size", [1.0, 300.0])
def test_the_loss_is_that_of_exact_numbers(
    dtype: torch.dtype, size: float, monkeypatch: MonkeyPatch
) -> None:
    hidden, weight, labels = draw(dtype, size)
    if dtype == torch.bfloat16:
        weight = weight.bfloat16().float()  # so that only results are rounded
    compiled = load_compiled(dtype)
    assert compiled is not None
    monkeypatch.setattr(loss, "_softmax_in_place", None)  # it is not called
    found = compute(CpuBackend(), hidden, weight, labels)
    monkeypatch.undo()
    exact = compute(Backend(), hidden.double(), weight.double(), labels)
    for mine, right in zip(found, exact, strict=True):
        error = (mine.double() - right).norm() / right.norm()
        assert error < BOUNDS[dtype]


@mark.parametrize("dtype", BOUNDS)
def test_softmax_does_not_depend_on_threads_or_company(dtype: torch.dtype) -> None:
    compiled = load_compiled(dtype)
    assert compiled is not None
    logits, labels = torch.randn(T, V).to(dtype), torch.randint(0, V, (T, 1))

    def run(rows: slice, n_threads: int) -> list[Tensor]:
        before, copy = torch.get_num_threads(), logits[rows].clone()
        torch.set_num_threads(n_threads)
        sums = compiled.softmax_in_place(copy, labels[rows], torch.float32)
        torch.set_num_threads(before)
        return [copy, *sums]

    whole = run(slice(None), 1)
    for n in (2, 5, 200):
        assert all(torch.equal(a, b) for a, b in zip(run(slice(None), n), whole, strict=True))
    part = run(slice(11, 12), 1)
    assert all(torch.equal(a, b[11:12]) for a, b in zip(part, whole, strict=True))


@mark.parametrize("dtype", BOUNDS)
def test_nan_is_not_hidden(dtype: torch.dtype) -> None:
    compiled = load_compiled(dtype)
    assert compiled is not None
    for place in (0, 70, V - 1):
        logits = torch.randn(3, V).to(dtype)
        logits[1, place] = float("nan")
        totals, _ = compiled.softmax_in_place(logits, torch.tensor([[4]] * 3), torch.float32)
        assert totals[1].isnan() and logits[1].isnan().any()
        assert totals[[0, 2]].isfinite().all() and logits[[0, 2]].isfinite().all()


def test_nothing_is_compiled_without_gradients(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.engines.cpu.backend.load_compiled", None)  # it is not called
    hidden, weight, labels = draw(torch.float32)
    with torch.no_grad():
        sums = compute_loss_sums(hidden, weight, labels, 0.1, CpuBackend())
    assert sums[0].isfinite()
