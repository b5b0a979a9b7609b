"""The loss kernels against float64 written out, values and gradients: on a GPU, else interpreted.

Without a GPU the process that tests/engines/test_interpreted.py starts runs this file.
"""

import torch
from pytest import MonkeyPatch, mark
from support.interpreted import (
    BOUNDS,
    TAKES_ALL,
    error,
    kernel_device,  # noqa: F401 (the fixture `device`)
)
from torch import Tensor

from nmt.engines.cuda import loss_triton
from nmt.engines.cuda.loss_triton import (
    choose_chunk,
    fused_loss_forward,
    rows_in_place,
    supports_fused_loss,
)

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")
VOCABULARIES = [(37, 64), (37, 37), (64, 64), (150, 768), (9000, 9024), (49_160, 49_160)]
SMOOTHING = [(0.0, 1.0), (0.1, 1.0), (0.1, 100.0)]
ROWS = [
    (FP32, 37, 64, 0.1, 1.0),
    (BF16, 37, 37, 0.1, 100.0),
    (FP32, 150, 768, 0.0, 1.0),
    (BF16, 9000, 9024, 0.1, 1.0),  # in many parts
    (FP32, 49_160, 49_160, 0.1, 1.0),
]
if TAKES_ALL:
    ROWS = [
        (dtype, *sizes, *eps) for dtype in BOUNDS for sizes in VOCABULARIES for eps in SMOOTHING
    ]
CHUNKS = [4096, 128, 64]  # rows, at most


def losses(logits: Tensor, labels: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of each row, smoothed and not: 1 - eps on the gold piece, eps / (V - 1) on each other."""
    log_p, at_label = logits.log_softmax(-1), labels.clamp(min=0)[:, None]
    target = torch.full_like(log_p, eps / (logits.shape[1] - 1)).scatter_(1, at_label, 1 - eps)
    smoothed, nll = -(target * log_p).sum(1), -log_p.gather(1, at_label).squeeze(1)
    return smoothed.where(labels >= 0, 0.0), nll.where(labels >= 0, 0.0)


@mark.parametrize("dtype, n_vocab, n_columns, eps, size", ROWS)
def test_rows_equal_the_definition(
    dtype: torch.dtype, n_vocab: int, n_columns: int, eps: float, size: float, device: torch.device
) -> None:
    torch.manual_seed(5)
    others = eps / (n_vocab - 1)
    labels = torch.tensor([0, n_vocab - 1, -1, 17, -1], device=device)
    logits = (size * torch.randn(5, n_columns, device=device)).to(dtype)
    logits[:, n_vocab:] = NAN
    logits[2] = NAN
    exact = logits[:, :n_vocab].double().requires_grad_()
    expected, live, before = losses(exact, labels, eps), labels >= 0, logits.clone()
    (grad,) = torch.autograd.grad(expected[0][live].sum(), exact)
    quiet = rows_in_place(logits, labels, 1 - eps - others, others, n_vocab, False)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    loud = rows_in_place(logits, labels, 1 - eps - others, others, n_vocab, True)
    for a, b, c in zip(quiet, loud, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == torch.float32 and error(a, c.detach()) < 1e-6
        assert (a[labels < 0] == 0).all()
    assert error(logits[live, :n_vocab], grad[live]) < BOUNDS[dtype]
    assert (logits[:, n_vocab:] == 0).all() and (logits[labels < 0] == 0).all()


@mark.parametrize("n_rows", [64, 448, 1_600, 3_200, 6_336, 12_544, 25_024, 100_032])
def test_chunks_are_few_and_none_is_a_small_rest(n_rows: int) -> None:
    rows = choose_chunk(n_rows)
    n_chunks, rest = -(-n_rows // rows), n_rows % rows or rows
    assert rows <= loss_triton.CHUNK_ROWS and rows % 64 == 0
    assert n_chunks == -(-n_rows // loss_triton.CHUNK_ROWS)
    assert rows - rest < 64 * n_chunks


def test_chunks_of_an_update_of_the_paper_are_six() -> None:
    assert [choose_chunk(n) for n in (25_024, 3_200, 0)] == [4_224, 3_200, 64]


@mark.parametrize("most", CHUNKS if TAKES_ALL else [64])
@mark.parametrize("is_mixed", [False, True])
def test_fused_loss_equals_the_definition(
    most: int, is_mixed: bool, device: torch.device, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_triton, "CHUNK_ROWS", most)
    torch.manual_seed(6)
    hidden, weight = torch.randn(130, 16, device=device), torch.randn(37, 16, device=device)
    labels = torch.randint(-1, 37, (130,), device=device)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    sums = [x.sum() for x in losses(exact[0] @ exact[1].T, labels, 0.1)]
    expected = (*sums, *torch.autograd.grad(sums[0], exact))
    with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
        ours = fused_loss_forward(hidden, weight, labels, 0.1, True)
        quiet = fused_loss_forward(hidden, weight, labels, 0.1, False)
    assert [x.item() for x in ours[:2] if x is not None] == [
        x.item() for x in quiet[:2] if x is not None
    ]
    assert quiet[2] is None and quiet[3] is None
    for a, b in zip(ours, expected, strict=True):
        assert a is not None and a.dtype == torch.float32
        assert error(a, b.detach()) < (1e-2 if is_mixed else 1e-6)


@mark.on_gpu
@mark.soak  # the compiler takes seconds to load
def test_the_op_follows_the_rules_of_torch(device: torch.device) -> None:
    torch.manual_seed(4)
    logits, labels = torch.randn(3, 40, device=device), torch.tensor([4, -1, 39], device=device)
    torch.library.opcheck(rows_in_place, (logits, labels, 0.9, 0.001, 40, True))


def test_float64_is_not_supported(device: torch.device) -> None:
    for dtype in (*BOUNDS, torch.float64):
        logits = torch.zeros(3, 16, dtype=dtype, device=device)
        assert supports_fused_loss(logits) == (dtype != torch.float64)
