"""Ranks that sum gradients and share moments and weights, against one process: the same run, the same
folder. This is the replica of GPUs, which runs here uncompiled over gloo; the core's is compared in
tests/promises/test_many_ranks.py.
"""

import gc
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pytest import MonkeyPatch, approx, fixture, mark, raises
from support.capture import Capture, read_errors
from support.finished_run import read_tensors
from support.ground import Ground, check_same, make_ground, untime
from support.pretend_device import GPU, DeviceTensor, pretend_device
from support.processor import ALONE, CPU
from test_fast_paths import POST, batch_of, draw, draw_short, make
from torch import Tensor

from nmt.checkpoint.run_checkpoints import list_steps
from nmt.config import ModelConfig, OptimizerConfig, TrainingConfig
from nmt.data.batch import Batch, BatchShape
from nmt.engines.cuda import recorded_replica as replica_module
from nmt.engines.cuda import training
from nmt.engines.cuda.cuda_graph import capture, warm_up
from nmt.engines.cuda.recorded_replica import RecordedReplica
from nmt.engines.cuda.shares import Shares
from nmt.model.moments import ADAM, Moments
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder
from nmt.train.loss import Objective

# At a rate of 0.05 rounding alone grows to 1e-3 in 24 updates
CALM = ("training.log_every=1", "optimizer.scale=0.05")
EXTRAS = (
    "optimizer.weight_decay=0.5",
    "training.clip_norm=0.5",
    "training.ema=0.5",
    "training.freeze=[embeddings]",
)
# nmt-train with the replica of GPUs
ENGINE = """
import sys
from nmt.commands.train import main
from nmt.engines import choice
from nmt.engines.cuda.recorded_replica import RecordedReplica
from nmt.train.engine import TrainingEngine

WHOLE = "decoder.0.feed_forward.inner.weight"

class OnCpus(TrainingEngine):
    def make_replica(self, objective, world, training, optimizer, shape):
        whole = [WHOLE] if world.size == 4 else []  # as for an update of whole matrices
        return RecordedReplica(objective, world, training.precision == "bf16", shape, whole)

choice.choose_for_training = lambda device: OnCpus(choice.choose_backend(device.type))
sys.exit(main(sys.argv[1:]))
"""


@fixture(scope="module")
def ground(module_path: Path) -> Ground:
    ground = make_ground(module_path)
    script = ground.folder / "engine.py"
    script.write_text(ENGINE)
    return replace(ground, command=str(script))


@fixture(scope="module")
def whole(ground: Ground) -> RunFolder:
    """The run of one process without the engine."""
    return replace(ground, command="train").finish("whole", *CALM)


def check_close(run: RunFolder, whole: RunFolder, bound: float = 1e-5) -> None:
    step = max(list_steps(whole))
    ours, theirs = read_tensors(run.path, step), read_tensors(whole.path, step)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        assert (ours[name] - value).norm() <= bound * value.norm(), name
    for line, other in zip(untime(run), untime(whole), strict=True):
        for key in ("step", "kind", "bleu"):
            assert line.get(key) == other.get(key)
        # The log has five decimals, so rounding alone may part equal numbers by one.
        for key in {"loss", "nll"} & line.keys():
            assert line[key] == approx(other[key], abs=bound + 1e-5)
        if "grad_norm" in line:
            assert line["grad_norm"] == approx(other["grad_norm"], rel=2e-3, abs=1e-12)


def test_two_and_four_ranks_train_like_one(ground: Ground, whole: RunFolder) -> None:
    check_close(ground.finish("two", *CALM, size=2), whole)
    settings = (*CALM, *EXTRAS, "training.steps=6")
    one = ground.finish("one-more", *settings)
    check_close(ground.finish("four-more", *settings, size=4), one)


def test_other_numbers_of_ranks_continue(ground: Ground, whole: RunFolder) -> None:
    ground.finish("mixed", *CALM, "training.steps=4", size=2)
    ground.finish("mixed", *CALM, "training.steps=8")
    check_close(ground.finish("mixed", *CALM, size=2), whole)


def test_a_kill_costs_no_bits(ground: Ground) -> None:
    """In bf16 a rank computes with rounded weights of others; a checkpoint must hold exact ones."""
    settings = (*CALM, *EXTRAS, "training.precision=bf16", "training.steps=8")
    straight = ground.finish("straight", *settings, size=2)
    start = ground.start("killed", *settings, size=2, slow={"update": 0.05}, is_recorded=True)
    run = ground.run("killed")
    start.until(lambda: run.checkpoints.is_dir() and list_steps(run) == [3])
    start.signal(signal.SIGKILL)
    start.wait()
    assert max(list_steps(run)) < 8
    check_same(ground.finish("killed", *settings, size=2), straight)


def test_bf16_weights_are_those_of_one_rank(ground: Ground) -> None:
    """What ranks collect in bf16 is what a product would make of the exact weights, as the core's does."""
    settings = (*CALM, "training.precision=bf16", "training.steps=2")
    one = Ground(ground.folder, ground.config).finish("bf16-one", *settings)
    check_close(ground.finish("bf16-two", *settings, size=2), one, 1e-4)


@mark.soak  # takes ten seconds
def test_a_stop_and_a_validation_of_shares(ground: Ground) -> None:
    """One micro-batch for each update and three ranks, two of which run blank ones."""
    settings = (*CALM, *EXTRAS, "training.micro_tokens=300", "training.steps=4")
    one = ground.finish("single", *settings)
    check_close(ground.finish("blank", *settings, size=3), one)


# ---- within an update --------------------------------------------------------------------------------------------

SHAPE = BatchShape(192, 192, 16, 128)


class Twins(World):
    """Rank 1 of two that do the same: sums are doubled, and rank 0's weights are there already."""

    log: list[str] = []

    def sum_parts(self, tensor: Tensor) -> None:
        self.log.append(f"sum {tensor.numel()}")
        tensor.mul_(2)

    def gather_parts(self, tensor: Tensor) -> None:
        self.log.append(f"gather {tensor.numel()}")


def make_objective(config: ModelConfig = POST) -> Objective:
    return Objective(make(config), 0.1)


def draw_batch(seed: int) -> Batch:
    return batch_of(draw(seed, n=3), SHAPE.src_tokens)


def check_near(there: Tensor, here: Tensor) -> None:
    assert isinstance(there, DeviceTensor)
    assert here.any() and (there.on_host - here).norm() <= 1e-5 * here.norm()


@fixture
def uncompiled_twins(monkeypatch: MonkeyPatch) -> None:
    """Nothing is compiled, no kernel runs, and a sum over two ranks is that of one."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(World, "sum", lambda world, tensor: tensor)
    monkeypatch.setattr("nmt.engines.cuda.loss_triton.supports_fused_loss", lambda hidden: False)


@mark.usefixtures("uncompiled_twins")
def test_what_ranks_exchange_is_not_recorded() -> None:
    """Weights are collected before the first micro-batch of an update, and gradients summed after the
    last; the one graph of all micro-batches has neither, and nothing that waits.
    """
    plain = RecordedReplica(make_objective(), Twins(1, 2, CPU), False)
    with pretend_device() as device:
        objective = device.to_device(make_objective())
        replica = RecordedReplica(objective, Twins(1, 2, GPU), False, SHAPE)
        collected = [f"gather {bucket.size}" for bucket in replica.shares.buckets]
        summed = [f"sum {bucket.size}" for bucket in replica.shares.buckets]
        for number in range(6):
            batch = draw_batch(number)
            there = batch.to(GPU)
            Twins.log = []
            device.forget()
            expected, found = plain.run(batch, 0.1, number), replica.run(there, 0.1, number)
            if number > 0:
                assert (device.replays, device.n_waits) == (1, 0) and device.n_launches < 20
            is_last = number % 2 == 1
            assert Twins.log == ([] if is_last else 2 * collected)
            check_near(found, expected)
            if not is_last:
                continue
            Twins.log = []
            for one in (plain, replica):
                one.sum_gradients()
                one.clear_gradients()
            assert Twins.log == 2 * summed
            for ours, theirs in zip(replica.shares.buckets, plain.shares.buckets, strict=True):
                check_near(ours.gradients, theirs.gradients)


# Without the compiler, test_what_ranks_exchange_is_not_recorded computes the same.
@mark.gpu_dry
@mark.soak  # compiles for 20 seconds
def test_compiled_code_gives_the_gradients_of_eager_code(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BACKEND", "aot_eager")
    found = []
    for shape in (None, BatchShape(64, 64, 16, 64)):
        objective = make_objective(replace(POST, n_layers=1))
        replica = RecordedReplica(objective, ALONE, True, shape)
        replica.run(batch_of(draw_short(4), 64), 0.1, 0)
        assert (replica.recording is None) == (shape is None)
        found.append([bucket.gradients for bucket in replica.shares.buckets])
    for ours, theirs in zip(*found, strict=True):
        assert theirs.any() and torch.equal(ours, theirs)


@mark.usefixtures("uncompiled_twins")
def test_a_graph_takes_three_passes(monkeypatch: MonkeyPatch) -> None:
    """Two that warm up and one that is recorded, however many micro-batches an update has. What warms up
    has been freed when the graph takes its own memory.
    """
    held = []
    compute = RecordedReplica.compute

    def count(*given: object) -> object:
        held.append(device.n_bytes)
        return compute(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordedReplica, "compute", count)
    with pretend_device(budget=1 << 30) as device:
        objective = device.to_device(make_objective())
        replica = RecordedReplica(objective, World(0, 1, GPU), False, SHAPE)
        for number in range(6):
            replica.run(draw_batch(number).to(GPU), 0.1, number)
            if number % 2:
                replica.clear_gradients()
    assert len(held) == 3 and len(set(held)) == 1


@mark.usefixtures("uncompiled_twins")
@mark.parametrize(
    "votes, told",
    [
        ([1.0], "the model cannot be compiled"),
        ([0.0, 1.0], "the CUDA graph cannot be recorded"),
    ],
)
def test_what_another_rank_cannot_do_no_rank_does(
    votes: list[float],
    told: str,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    batch, left = draw_batch(1), iter(votes)
    expected = RecordedReplica(make_objective(), Twins(1, 2, CPU), False).run(batch, 0.1, 0)
    monkeypatch.setattr(World, "sum", lambda world, tensor: tensor + next(left))  # of the other
    with pretend_device() as device:
        objective = device.to_device(make_objective())
        replica = RecordedReplica(objective, Twins(1, 2, GPU), False, SHAPE)
        for _ in range(2):
            found = replica.run(batch.to(GPU), 0.1, 0)
        assert device.replays == 0
        check_near(found, expected)
    assert (replica.compiled is None) == (replica.recording is None) == (len(votes) == 1)
    (line,) = read_errors(capsys)
    assert told in line and "it fails on another rank" in line


def test_no_garbage_is_collected_while_a_graph_is_recorded() -> None:
    seen = []

    def work() -> None:
        seen.append(gc.isenabled())
        if len(seen) > 3:
            raise ValueError

    with pretend_device():
        warm_up(work, GPU)
        capture(work, GPU)
        with raises(ValueError):
            capture(work, GPU)
    assert seen == [True, True, False, False] and gc.isenabled()


def test_what_an_update_reads_whole_is_not_divided(monkeypatch: MonkeyPatch) -> None:
    model = dict(make_objective().model.named_parameters())
    matrices = {name for name, p in model.items() if p.dim() > 1 and "embedding" not in name}

    def choose(config: OptimizerConfig, name: str, shape: Sequence[int]) -> Moments:
        return replace(ADAM, needs_whole=name in matrices)

    monkeypatch.setattr(training, "choose_moments", choose)
    given = TrainingConfig(), OptimizerConfig(), None
    owned = []
    for rank in range(3):
        world = World(rank, 3, CPU)
        replica = training.RecordedTraining().make_replica(make_objective(), world, *given)
        for name in matrices & replica.own.keys():
            assert replica.own[name].weight.equal(model[name])
            owned.append(name)
    assert sorted(owned) == sorted(matrices)


@mark.parametrize("size", [2, 3, 5])
def test_shares_are_even_and_whole_again(size: int) -> None:
    """What is gathered of all ranks' shares is what was divided, whatever their number."""
    model = dict(make_objective().model.named_parameters())
    whole = {name: torch.full_like(p, torch.nan) for name, p in model.items()}
    sizes = []
    for rank in range(size):
        shares = Shares(make_objective().model, World(rank, size, CPU), False)
        sizes.append(sum(share.weight.numel() for share in shares.own.values()))
        for name, share in shares.own.items():
            part = share.cut_from(whole[name])
            assert part.isnan().all()  # no other rank has it
            part.copy_(share.weight.detach())
    assert all(torch.equal(whole[name], model[name]) for name in model)
    assert max(sizes) <= 1.2 * sum(sizes) / size
