"""Threads of one process that train on micro-batches of their own: a run's bits do not depend on how many."""

import threading
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch, mark, raises
from support.capture import Capture, read_errors, read_stderr
from support.finished_run import list_differing, read_losses, read_tensors
from support.in_process import succeed
from support.processor import ALONE
from torch import Tensor

from nmt.commands.train import main
from nmt.config import ModelConfig, TrainingConfig
from nmt.data.batch import Batch, pack
from nmt.engines.cpu import training
from nmt.engines.cpu.backend import CpuBackend
from nmt.engines.cpu.training import SharedReplica, count_workers
from nmt.model.backend import use_backend
from nmt.model.transformer import Transformer
from nmt.system.tensor_files import Tensors
from nmt.train.loss import Objective
from nmt.train.replica import Replica

SHAPE = ModelConfig(d_model=32, d_ff=48, n_heads=2, n_layers=2, dropout=0.2, attention_dropout=0.1)
SEEDS = [11, 7, 5, 3, 2]


def make_objective() -> Objective:
    torch.manual_seed(1)
    model = Transformer(SHAPE, 50)
    use_backend(model, CpuBackend())
    return Objective(model, 0.1)


def draw_batches() -> list[Batch]:
    torch.manual_seed(2)
    batches = []
    for n in (3, 1, 4, 2, 5):
        src = [torch.randint(4, 50, (5 + i,)).tolist() for i in range(n)]
        tgt = [torch.randint(4, 50, (9 - i,)).tolist() for i in range(n)]
        packed = pack(tgt)
        batches.append(Batch(pack(src), packed, packed.tokens.roll(-1), packed.n_live))
    return batches


def run_update(runner: Replica) -> tuple[Tensor, Tensors, Tensor]:
    sums = runner.run_micros(draw_batches(), 0.01, SEEDS)
    gradients = {name: p.grad for name, p in runner.objective.named_parameters()}
    assert None not in gradients.values()
    return (
        sums,
        {n: g.clone() for n, g in gradients.items() if g is not None},
        runner.gradient_norm(),
    )


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@mark.parametrize("is_bf16", [False, True])
def test_any_number_of_workers_gives_the_bits_of_plain_torch(is_bf16: bool) -> None:
    sums, gradients, norm = run_update(Replica(make_objective(), ALONE, is_bf16))
    for n in (1, 2, 3, 8):
        shared = SharedReplica(make_objective(), ALONE, is_bf16, n, 1)
        for _ in range(2):  # the second time with gradients that were cleared
            own_sums, own, own_norm = run_update(shared)
            assert torch.equal(own_sums, sums) and same(own, gradients), n
            assert torch.equal(own_norm, norm)
            shared.clear_gradients()


def test_gradients_are_added_in_the_order_of_micro_batches(
    monkeypatch: MonkeyPatch,
) -> None:
    """Even if the first is done last."""
    _, gradients, _ = run_update(Replica(make_objective(), ALONE, False))
    batches = draw_batches()
    others_done = threading.Semaphore(0)
    whole = Replica.run

    def run_first_last(learner: Replica, batch: Batch, *rest: Any) -> Tensor:
        if batch.n_tokens == batches[0].n_tokens:
            for _ in range(2):
                assert others_done.acquire(timeout=60)
        result = whole(learner, batch, *rest)
        others_done.release()
        return result

    monkeypatch.setattr(Replica, "run", run_first_last)
    assert len({batch.n_tokens for batch in batches}) == len(batches)
    shared = SharedReplica(make_objective(), ALONE, False, 3, 1)
    _, own, _ = run_update(shared)
    assert same(own, gradients)


def test_what_fails_in_a_worker_fails_the_update(monkeypatch: MonkeyPatch) -> None:
    whole = Replica.run

    def fail_once(learner: Replica, batch: Batch, *rest: Any) -> Tensor:
        if batch.n_tokens == draw_batches()[1].n_tokens:
            raise RuntimeError("out of memory")
        return whole(learner, batch, *rest)

    shared = SharedReplica(make_objective(), ALONE, False, 2, 1)
    with monkeypatch.context() as context:
        context.setattr(Replica, "run", fail_once)
        with raises(RuntimeError, match="out of memory"):
            run_update(shared)
    shared.clear_gradients()
    run_update(shared)  # no thread and no worker was lost


def test_weights_are_shared_and_threads_are_left_to_others() -> None:
    n = torch.get_num_threads()
    objective = make_objective()
    shared = SharedReplica(objective, ALONE, False, 2, 1)
    before, _, _ = run_update(shared)
    with torch.no_grad():
        for p in objective.parameters():
            p.mul_(0.5)
    shared.clear_gradients()
    after, _, _ = run_update(shared)
    assert not torch.equal(before, after) and torch.get_num_threads() == n
    assert torch.equal(
        after, Replica(objective, ALONE, False).run_micros(draw_batches(), 0.01, SEEDS)
    )


def test_going_on_with_another_attention_is_said(
    toy: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    settings = ["--config", str(toy), "training.checkpoint_every=2"]
    succeed(main, *settings, "training.steps=2")
    succeed(main, *settings, "training.steps=3")
    assert "attention" not in read_stderr(capsys)
    monkeypatch.setattr("nmt.engines.cpu.backend.load_compiled", lambda dtype: None)
    monkeypatch.setattr(training, "load_compiled", lambda dtype: None)  # as without numba
    succeed(main, *settings, "training.steps=4")
    said = [line for line in read_errors(capsys) if "attention" in line]
    assert len(said) == 1 and "step-0000003 was trained with attention by numba" in said[0]
    assert "goes on with torch" in said[0]


@mark.parametrize("n_cores", range(1, 65))
def test_workers_follow_from_cores_the_update_and_memory(n_cores: int) -> None:
    gib = 1 << 30

    def count(update: int, micro: int, gradients: int = gib // 4, memory: int = 1024 * gib) -> int:
        given = TrainingConfig(src_tokens=update, tgt_tokens=update, micro_tokens=micro)
        return count_workers(given, n_cores, gradients, memory)

    assert count(25_000, 1_956) == min(n_cores, 13)
    assert count(25_000, 500) == min(n_cores, 16)  # of 1,500 target tokens at least
    assert count(25_000, 25_000) == 1
    assert count(4_096, 2_100) == min(n_cores, 2)
    assert count(1_000, 500) == 1
    # gradients of all workers take a quarter of the memory
    assert count(100_000, 2_000, memory=8 * gib) == min(n_cores, 8)
    assert count(100_000, 2_000, 4 * gib, 8 * gib) == 1


@mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_is_stopped_goes_on_with_any_number(
    toy: Path, tmp_path: Path, monkeypatch: MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(training, "MIN_WORKER_TOKENS", 10)
    settings = ["--config", str(toy), "training.micro_tokens=40", "training.checkpoint_every=3"]
    settings.append(f"training.precision={precision}")
    counted: list[int] = []
    make = training.SharedReplica.__init__

    def count(self: SharedReplica, *args: Any) -> None:
        counted.append(args[3])
        make(self, *args)

    monkeypatch.setattr(training.SharedReplica, "__init__", count)
    runs = []
    for numbers in ((1, 1), (2, 2), (3, 1), (1, 8)):
        runs.append(tmp_path / "{}-{}".format(*numbers))
        for n, steps in zip(numbers, (3, 6), strict=True):
            torch.set_num_threads(n)
            succeed(main, *settings, f"out={runs[-1]}", f"training.steps={steps}")
    assert counted == [1, 1, 2, 2, 3, 1, 1, 8]
    for run in runs[1:]:
        assert list_differing(read_tensors(run, 6), read_tensors(runs[0], 6)) == []
        assert read_losses(run) == read_losses(runs[0])
