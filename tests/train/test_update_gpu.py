"""Updates on a pretend GPU: nothing of an update waits for the device, mixes devices, or is lost in
the flat gradients.

Forward and backward of a micro-batch would run as one CUDA graph, which is not what is looked at
here: a forward pass and made gradients stand in for them. All around is real: the batch's way to
the device, the gradients, the optimizer, what is told of an update, and when.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.pretend_device import GPU, DeviceTensor, PretendDevice, pretend_device
from torch import Tensor

from nmt.config import ModelConfig, RunConfig, TrainingConfig
from nmt.data.batch import Batch
from nmt.data.loader import Update, make_micro_batches
from nmt.data.plan import Cursor, choose_shape, plan_epoch
from nmt.data.store import Side, TokenStore
from nmt.engines.cuda.backend import CudaBackend
from nmt.engines.cuda.recorded_replica import RecordedReplica
from nmt.model.backend import PLAIN
from nmt.model.transformer import Transformer
from nmt.system.ranks import World
from nmt.train.loss import Objective
from nmt.train.optimizer import make_optimizer
from nmt.train.update import Outcomes, run_update

N_VOCAB = 97
CONFIG = RunConfig(
    model=ModelConfig(d_model=32, d_ff=64, n_heads=2, n_layers=2, dropout=0.0),
    training=TrainingConfig(src_tokens=300, tgt_tokens=300, precision="fp32"),
)
ALONE = World(0, 1, GPU)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's kernels need a driver
    monkeypatch.setattr("nmt.engines.cuda.loss_triton.supports_fused_loss", lambda hidden: False)


def make_store() -> TokenStore:
    random = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        offsets = np.concatenate(([0], np.cumsum(random.integers(1, 20, 200))))
        sides.append(Side(random.integers(4, N_VOCAB, int(offsets[-1])).astype(np.uint16), offsets))
    return TokenStore(sides[0], sides[1])


def make_model() -> Transformer:
    torch.manual_seed(1)
    return Transformer(CONFIG.model, N_VOCAB)


def updates(store: TokenStore, world: World) -> list[Update]:
    shape = choose_shape(store.src.lengths, store.tgt.lengths, 150)
    plan = plan_epoch(store.src.lengths, store.tgt.lengths, 1, 0, CONFIG.training, 150, shape)
    return [
        Update(make_micro_batches(store, plan.micros(n), world, shape), *plan.n_tokens(n), Cursor())
        for n in range(len(plan))
    ]


class Made(RecordedReplica):
    """Its micro-batches give made gradients, which are those of all ranks and micro-batches alike."""

    def compute(self, objective: Any, batch: Batch, scale: Tensor | float) -> Any:
        with torch.no_grad():
            loss, nll = self.objective(batch)
        made = [
            torch.full_like(used, 1e-3 * (batch.n_tokens % 7 + 1)) for used in self.used.values()
        ]
        return torch.stack((loss, nll)), made


def trained(device: PretendDevice | None, n: int) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Weights and outcomes after `n` updates."""
    store = make_store()
    model = make_model()
    world = ALONE if device else World(0, 1, torch.device("cpu"))
    if device:
        device.to_device(model)
    replica = Made(Objective(model, 0.1), world, is_bf16=False)
    optimizer = make_optimizer(model, CONFIG.optimizer, shares=replica.own)
    outcomes, seen = Outcomes(world.device), []
    given = updates(store, world)
    if device:
        device.forget()
    for step in range(1, n + 1):
        outcomes.add(run_update(replica, optimizer, given[step - 1], step, CONFIG, world))
        for outcome in outcomes.take_completed(False):
            seen.append((outcome.pending.step, *outcome.stats, outcome.is_applied))
    seen += [(o.pending.step, *o.stats, o.is_applied) for o in outcomes.take_completed(True)]
    weights = [p.on_host if isinstance(p, DeviceTensor) else p.detach() for p in model.parameters()]
    return weights, seen


def test_an_update_waits_for_nothing_and_equals_that_of_the_cpu() -> None:
    weights, seen = trained(None, 4)
    with pretend_device() as device:
        there, seen_there = trained(device, 4)
        assert device.waits == {}, device.waits
    assert [one[0] for one in seen_there] == [1, 2, 3, 4]
    for a, b in zip(seen_there, seen, strict=True):
        assert a[1:4] == pytest.approx(b[1:4], rel=1e-5) and a[4]
    for there_one, one in zip(there, weights, strict=True):
        assert (there_one - one).norm() <= 1e-5 * one.norm()


def test_the_newest_outcome_is_left_alone() -> None:
    # The event of an update completes with the next update's, so only the last one is waited for.
    with pretend_device(event_lag=1) as device:
        _, seen = trained(device, 4)
        assert len(seen) == 4 and device.n_waits == 1


def test_a_recorded_micro_batch_gives_the_gradients_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward recorded once and replayed over batches of other lengths, with nothing
    that waits.
    """
    # Only the recording is looked at here
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    store, cpu = make_store(), World(0, 1, torch.device("cpu"))
    shape = choose_shape(store.src.lengths, store.tgt.lengths, 150)
    alone, model = make_model(), make_model()
    plain = RecordedReplica(Objective(alone, 0.1), cpu, False)
    given = [micro.batch for update in updates(store, cpu)[:4] for micro in update.micros]
    with pretend_device() as device:
        device.to_device(model)
        replica = RecordedReplica(Objective(model, 0.1), ALONE, False, shape)
        batches = [batch.to(GPU) for batch in given]
        for number, (batch, there) in enumerate(zip(given, batches, strict=True)):
            device.forget()
            expected = plain.run(batch, 0.01, number)
            found = replica.run(there, 0.01, number).clone()
            if number > 0:
                assert (device.replays, device.n_waits) == (1, 0)
                assert device.n_launches < 20
            assert isinstance(found, DeviceTensor)
            assert torch.allclose(found.on_host, expected, rtol=1e-5)
        check_gradients(model, alone)
        for one, given_batch in ((plain, batch), (replica, there)):
            one.clear_gradients()
            one.run(given_batch, 0.01, number)  # begins another update
        check_gradients(model, alone)


def check_gradients(there: Transformer, here: Transformer) -> None:
    for p, q in zip(there.parameters(), here.parameters(), strict=True):
        assert isinstance(p.grad, DeviceTensor) and q.grad is not None
        assert q.grad.any() and (p.grad.on_host - q.grad).norm() <= 1e-5 * q.grad.norm()


class PTXASError(Exception):
    """As Triton's, which is no RuntimeError."""


@pytest.mark.parametrize(
    ("make_error", "place", "told"),
    [
        # made by the test, because torch._dynamo takes a second to load
        (
            lambda: torch._dynamo.exc.BackendCompilerFailed(print, ValueError("no register"), None),
            "_compute_sums",
            "cannot be compiled",
        ),
        (lambda: PTXASError("ptxas: no such GPU"), "_compute_sums", "cannot be compiled"),
        (
            lambda: RuntimeError("operation not permitted when stream is capturing\nmore"),
            "capture",
            "CUDA graph cannot be recorded",
        ),
        (lambda: torch.OutOfMemoryError("CUDA out of memory"), "capture", None),
        (lambda: RuntimeError("Triton Error [CUDA]: out of memory"), "_compute_sums", None),
    ],
)
def test_what_cannot_be_compiled_or_recorded_runs_all_the_same(
    make_error: Callable[[], Exception],
    place: str,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    error = make_error()

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(f"nmt.engines.cuda.recorded_replica.{place}", fail)
    store, world = make_store(), World(0, 1, torch.device("cpu"))
    shape = choose_shape(store.src.lengths, store.tgt.lengths, 150)
    batch = updates(store, world)[0].micros[0].batch
    plain, fixed = (
        RecordedReplica(Objective(make_model(), 0.1), world, False, given)
        for given in (None, shape)
    )
    if told is None:  # it is for the caller to try a smaller one
        with pytest.raises(type(error)):
            fixed.run(batch, 1.0, 3)
        return
    for _ in range(2):
        assert torch.equal(fixed.run(batch, 1.0, 3), plain.run(batch, 1.0, 3))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and told in said[0] and type(error).__name__ in said[0]


@pytest.mark.parametrize("numbers", [[4, 4, 0, 9, 4], [7]])
def test_a_look_up_has_the_gradient_of_torchs(numbers: list[int]) -> None:
    ids, table = torch.tensor(numbers), torch.randn(10, 3)
    factor = torch.randn(len(numbers), 3)
    ours, theirs = (table.clone().requires_grad_() for _ in range(2))
    (CudaBackend().look_up(ours, ids) * factor).sum().backward()
    (PLAIN.look_up(theirs, ids) * factor).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad) and not ours.grad[1].any()
    torch.library.opcheck(torch.ops.nmt.embedding_gradient.default, (factor, ids, 10))


def test_a_batch_of_another_shape_runs_as_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    store, world = make_store(), World(0, 1, torch.device("cpu"))
    shape = choose_shape(store.src.lengths, store.tgt.lengths, 150)
    usual = updates(store, world)[0].micros[0].batch
    odd = replace(usual, src=replace(usual.src, longest=shape.longest + 1))
    model = make_model()
    plain, fixed = (
        RecordedReplica(Objective(model, 0.1), world, False, given) for given in (None, shape)
    )
    assert torch.equal(fixed.run(odd, 1.0, 3), plain.run(odd, 1.0, 3)) and not fixed.recording
    assert torch.equal(fixed.run(usual, 1.0, 3), plain.run(usual, 1.0, 3)) and fixed.recording
