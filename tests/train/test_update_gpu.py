"""Updates on a pretend GPU: nothing of an update waits for the device, mixes devices, or is lost in
the flat gradients.

Forward and backward of a micro-batch would run as one CUDA graph, which is not what is looked at
here: a forward pass and made gradients stand in for them. All around is real: the batch's way to
the device, the gradients, the optimizer, what is told of an update, and when. What is recorded is in
test_shares.py.
"""

from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch, approx, fixture, mark, raises
from support.capture import Capture, read_errors
from support.pretend_device import GPU, DeviceTensor, PretendDevice, pretend_device
from support.processor import ALONE
from test_fast_paths import POST, batch_of, draw, make
from torch import Tensor

from nmt.config import RunConfig
from nmt.data.batch import Batch, BatchShape
from nmt.data.loader import MicroBatch, Update
from nmt.data.plan import Cursor
from nmt.engines.cuda.backend import CudaBackend
from nmt.engines.cuda.recorded_replica import RecordedReplica
from nmt.model.backend import PLAIN
from nmt.system.ranks import World
from nmt.train.loss import Objective
from nmt.train.optimizer import make_optimizer
from nmt.train.update import Outcomes, run_update

SHAPE = BatchShape(192, 192, 16, 128)


@fixture(autouse=True)
def without_kernels_and_compilers(monkeypatch: MonkeyPatch) -> None:
    # Triton's kernels need a driver
    monkeypatch.setattr("nmt.engines.cuda.loss_triton.supports_fused_loss", lambda hidden: False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


class Made(RecordedReplica):
    """Its micro-batches give made gradients, which are those of all ranks and micro-batches alike."""

    def compute(self, objective: Any, batch: Batch, scale: Tensor | float) -> Any:
        with torch.no_grad():
            sums = torch.stack(self.objective(batch))
        size = 1e-3 * (batch.n_tokens % 7 + 1)
        return sums, [torch.full_like(used, size) for used in self.used.values()]


def trained(device: PretendDevice | None) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Weights and outcomes after four updates of two micro-batches."""
    config, objective, world = RunConfig(model=POST), Objective(make(POST), 0.1), ALONE
    if device:
        world = World(0, 1, GPU)
        device.to_device(objective)
    replica = Made(objective, world, is_bf16=False)
    optimizer = make_optimizer(objective.model, config.optimizer, shares=replica.own)
    outcomes, seen = Outcomes(world.device), []
    for step in range(1, 5):
        batches = [batch_of(draw(seed, n=3)).to(world.device) for seed in (step, step + 9)]
        n_tgt = sum(batch.n_tokens for batch in batches)
        micros = [MicroBatch(number, batch) for number, batch in enumerate(batches)]
        update = Update(micros, n_tgt, n_tgt, Cursor())
        outcomes.add(run_update(replica, optimizer, update, step, config))
        for outcome in outcomes.take_completed(step == 4):
            seen.append((outcome.pending.step, *outcome.stats, outcome.is_applied))
    weights = [
        p.on_host if isinstance(p, DeviceTensor) else p.detach()
        for p in objective.model.parameters()
    ]
    return weights, seen


def test_an_update_waits_for_nothing_and_equals_that_of_the_cpu() -> None:
    """An update's event completes with the next update's, so only the last outcome is waited for."""
    weights, seen = trained(None)
    with pretend_device() as device:
        there, seen_there = trained(device)
        assert device.waits == {"an event": 1}
    assert [one[0] for one in seen_there] == [1, 2, 3, 4]
    for a, b in zip(seen_there, seen, strict=True):
        assert a[1:4] == approx(b[1:4], rel=1e-5) and a[4]
    for there_one, one in zip(there, weights, strict=True):
        assert (there_one - one).norm() <= 1e-5 * one.norm()


def make_replicas() -> list[RecordedReplica]:
    """Without a shape, and with one."""
    return [
        RecordedReplica(Objective(make(POST), 0.1), ALONE, False, shape) for shape in (None, SHAPE)
    ]


class PTXASError(Exception):
    """As Triton's, which is no RuntimeError."""


@mark.parametrize(
    "error, place, told",
    [
        (PTXASError("ptxas: no such GPU"), "_compute_sums", "cannot be compiled"),
        (
            RuntimeError("operation not permitted when stream is capturing\nmore"),
            "capture",
            "CUDA graph cannot be recorded",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "capture", None),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "_compute_sums", None),
    ],
)
def test_what_cannot_be_compiled_or_recorded_runs_all_the_same(
    error: Exception,
    place: str,
    told: str | None,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(f"nmt.engines.cuda.recorded_replica.{place}", fail)
    batch, (plain, fixed) = batch_of(draw(1, n=3), 192), make_replicas()
    if told is None:  # it is for the caller to try a smaller one
        with raises(type(error)):
            fixed.run(batch, 1.0, 3)
        return
    for _ in range(2):
        assert torch.equal(fixed.run(batch, 1.0, 3), plain.run(batch, 1.0, 3))
    said = read_errors(capsys)
    assert len(said) == 1 and told in said[0] and type(error).__name__ in said[0]


@mark.parametrize("numbers", [[4, 4, 0, 9, 4], [7]])
def test_a_look_up_has_the_gradient_of_torchs(numbers: list[int]) -> None:
    ids, table = torch.tensor(numbers), torch.randn(10, 3)
    factor = torch.randn(len(numbers), 3)
    ours, theirs = (table.clone().requires_grad_() for _ in range(2))
    (CudaBackend().look_up(ours, ids) * factor).sum().backward()
    (PLAIN.look_up(theirs, ids) * factor).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad) and not ours.grad[1].any()
    torch.library.opcheck(torch.ops.nmt.embedding_gradient.default, (factor, ids, 10))


def test_a_batch_of_another_shape_runs_as_plain_code() -> None:
    usual, (plain, fixed) = batch_of(draw(1, n=3), 192), make_replicas()
    odd = replace(usual, src=replace(usual.src, longest=SHAPE.longest + 1))
    for batch, is_recorded in ((odd, False), (usual, True)):
        assert torch.equal(fixed.run(batch, 1.0, 3), plain.run(batch, 1.0, 3))
        assert bool(fixed.recording) == is_recorded
