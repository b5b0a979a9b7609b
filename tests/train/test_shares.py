"""Ranks that share gradients, moments and weights, against one process: the same run, the same
folder.
"""

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.finished_run import read_tensors
from support.pretend_device import GPU, DeviceTensor, pretend_device
from support.soaking import IS_SOAK, Ground, Order, check_same, lines, make_ground
from torch import Tensor, nn

from nmt.checkpoint import list_steps
from nmt.config import TrainingConfig
from nmt.data.batch import BatchShape
from nmt.engines.cuda import recorded_replica as replica_module
from nmt.engines.cuda.backend import CudaBackend
from nmt.engines.cuda.cuda_graph import capture
from nmt.engines.cuda.recorded_replica import RecordedReplica, is_compiled
from nmt.engines.cuda.shares import Shares, SharingLayer
from nmt.engines.cuda.training import RecordedTraining
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder
from nmt.train.loss import Objective
from nmt.train.replica import ALONE, Phase

IS_DRY_RUN = IS_SOAK or os.environ.get("NMT_GPU_DRY") == "1"
# At a rate of 0.05 rounding alone grows to 1e-3 in 24 updates
CALM = ("training.log_every=1", "optimizer.scale=0.05")
EXTRAS = (
    "optimizer.weight_decay=0.5",
    "training.clip_norm=0.5",
    "training.ema=0.5",
    "training.freeze=[embeddings]",
)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return make_ground(tmp_path_factory.mktemp("shares"))


@pytest.fixture(scope="module")
def whole(ground: Ground) -> RunFolder:
    return ground.finish("whole", *CALM)


def tensors(run: RunFolder) -> dict[str, Tensor]:
    return read_tensors(run.path, max(list_steps(run)))


def check_close(run: RunFolder, whole: RunFolder, bound: float = 1e-5) -> None:
    ours, theirs = tensors(run), tensors(whole)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape
        assert (value - theirs[name]).norm() <= bound * theirs[name].norm(), name
    for line, other in zip(lines(run), lines(whole), strict=True):
        assert line["step"] == other["step"] and line["kind"] == other["kind"]
        for key, value in line.items():
            if key in ("loss", "nll"):
                # The log has five decimals, so rounding alone may part equal numbers by one.
                assert value == pytest.approx(other[key], abs=bound + 1e-5)
            elif key == "grad_norm":
                assert value == pytest.approx(other[key], rel=2e-3, abs=1e-12), key
        assert line.get("bleu") == other.get("bleu")


def test_two_and_four_ranks_train_like_one(ground: Ground, whole: RunFolder) -> None:
    check_close(ground.finish("two", *CALM, size=2), whole)
    settings = (*CALM, *EXTRAS, "training.steps=6")
    one = ground.finish("one-more", *settings)
    check_close(ground.finish("four-more", *settings, size=4), one)


def test_other_numbers_of_ranks_continue(ground: Ground, whole: RunFolder) -> None:
    ground.finish("mixed", *CALM, "training.steps=4", size=2)
    ground.finish("mixed", *CALM, "training.steps=8")
    check_close(ground.finish("mixed", *CALM, size=2), whole)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_kill_costs_no_bits(precision: str, ground: Ground) -> None:
    """In bf16 a rank computes with rounded weights of others; a checkpoint must hold exact ones."""
    settings = (*CALM, *EXTRAS, f"training.precision={precision}", "training.steps=8")
    straight = ground.finish(f"straight-{precision}", *settings, size=2)
    name = f"killed-{precision}"
    order = Order([], "", slow={"update": 0.05}, is_recorded=True)
    start = ground.start(name, *settings, size=2, order=order)
    run = ground.run(name)
    start.until(lambda: run.checkpoints.is_dir() and list_steps(run) == [3])
    start.signal(signal.SIGKILL)
    start.wait()
    assert max(list_steps(run)) < 8
    check_same(ground.finish(name, *settings, size=2), straight)


def test_bf16_weights_are_those_of_one_rank(ground: Ground) -> None:
    """What ranks collect in bf16 is what a product would make of the exact weights."""
    settings = (*CALM, "training.precision=bf16", "training.steps=2")
    one = ground.finish("bf16-one", *settings)
    check_close(ground.finish("bf16-two", *settings, size=2), one, 1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_after_micro_batches_end_in_the_bits_of_sums_within(
    precision: str, ground: Ground
) -> None:
    """Weights, moments and losses of a run, with updates of several micro-batches a rank."""
    settings = (*CALM, *EXTRAS, f"training.precision={precision}", "training.steps=5")
    within = ground.finish(f"within-{precision}", *settings, size=2)
    apart = (*settings, "training.compile=sums_apart")
    check_same(ground.finish(f"apart-{precision}", *apart, size=2), within)


@pytest.mark.soak  # takes ten seconds
def test_a_stop_and_a_validation_of_shares(ground: Ground) -> None:
    """One micro-batch for each update and three ranks, two of which run blank ones."""
    settings = (*CALM, *EXTRAS, "training.micro_tokens=300", "training.steps=4")
    one = ground.finish("single", *settings)
    check_close(ground.finish("blank", *settings, size=3), one)


# ---- within an update --------------------------------------------------------------------------------------------


class Done:
    def __init__(self, log: list[str], what: str) -> None:
        self.log, self.what = log, what

    def wait(self) -> None:
        self.log.append(f"wait for {self.what}")


class Twins(World):
    """Rank 1 of two that do the same: sums are doubled, and rank 0's weights are there already."""

    log: list[str] = []

    def start_sum(self, tensor: Tensor) -> Done:  # type: ignore[override]
        self.log.append(f"sum {tensor.numel()}")
        tensor.mul_(2)
        return Done(self.log, f"sum {tensor.numel()}")

    def start_gathering(self, tensor: Tensor) -> Done:  # type: ignore[override]
        self.log.append(f"gather {tensor.numel()}")
        return Done(self.log, f"gather {tensor.numel()}")


def watch_layers(objective: nn.Module, log: list[str]) -> None:
    """Write down when a layer computes, forward and backward."""

    def forward(name: str) -> object:
        return lambda *_: log.append(f"{name} forward")

    def backward(name: str) -> object:
        return lambda *_: log.append(f"{name} backward")

    for name, module in objective.named_modules():
        if name.endswith("feed_forward"):
            short = name.removeprefix("model.").removesuffix(".feed_forward")
            module.register_forward_pre_hook(forward(short))
            module.register_full_backward_hook(backward(short))


def make_objective(n_layers: int = 2) -> Objective:
    from test_fast_paths import POST, make

    return Objective(make(replace(POST, n_layers=n_layers)), 0.1)


def test_layers_wait_for_their_weights_and_sums_begin_in_the_backward_pass() -> None:
    from test_fast_paths import batch_of, draw

    log: list[str] = []
    Twins.log = log
    objective = make_objective()
    replica = RecordedReplica(objective, Twins(1, 2, torch.device("cpu")), is_bf16=True)
    assert replica.shares is not None
    encoder, decoder = (replica.shares.layers[at].size for at in (0, -1))
    rest = replica.shares.rest.size
    watch_layers(objective, log)
    batch = batch_of(draw(1))
    replica.run(batch, 0.1, 0, Phase(is_last=False))
    assert log[:6] == [
        *(f"gather {n}" for n in (rest, encoder, encoder, decoder, decoder)),
        f"wait for gather {rest}",
    ]
    assert log[6:10] == [
        f"wait for gather {encoder}",
        "encoder.0 forward",
        f"wait for gather {encoder}",
        "encoder.1 forward",
    ]
    assert not [line for line in log if line.startswith("sum")]
    log.clear()
    replica.run(batch, 0.1, 0, Phase(is_first=False))
    sums = [line for line in log if "backward" in line or line.startswith("sum")]
    assert not [line for line in log if "gather" in line]
    assert sums == [
        "decoder.1 backward",
        f"sum {decoder}",
        "decoder.0 backward",
        f"sum {decoder}",
        "encoder.1 backward",
        f"sum {encoder}",
        "encoder.0 backward",
        f"sum {encoder}",
        f"sum {rest}",
    ]
    assert log[-5:] == [f"wait for {line}" for line in sums if line.startswith("sum")]


# Without the compiler, test_a_recorded_micro_batch_includes_what_ranks_do computes the same.
@pytest.mark.gpu_dry
@pytest.mark.soak  # compiles for 20 seconds
def test_compiled_code_hands_over_the_gradients_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit by bit, by operations that the compiler leaves in the midst of the backward pass."""
    from test_fast_paths import batch_of, draw

    monkeypatch.setattr(replica_module, "BACKEND", "aot_eager")
    monkeypatch.setattr(World, "sum", lambda world, tensor: tensor)
    batch = batch_of([(s[-20:], t[:18]) for s, t in draw(7, n=4)], 64)
    cpu = torch.device("cpu")
    found = []
    for world in (World(0, 1, cpu), Twins(1, 2, cpu)):
        log: list[str] = []
        Twins.log = log
        objective = make_objective(1)
        replica = RecordedReplica(objective, world, True, BatchShape(64, 64, 16, 64))
        for bucket in replica.buckets:
            bucket.used.copy_(bucket.weights)  # what rank 0 would send
        replica.run(batch, 0.1, 0, Phase(is_last=False))
        assert list(replica.replays) == [(True, False)]
        found.append([p.grad for p in objective.model.parameters()])
    assert not [line for line in log if line.startswith("sum")]
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None
        assert theirs.any() and torch.equal(ours, theirs)
    log.clear()
    replica.run(batch, 0.1, 0, Phase(is_first=False))
    sums = [line for line in log if line.startswith("sum")]
    assert sums[-3:] == [f"sum {bucket.size}" for bucket in reversed(replica.buckets)]


@contextmanager
def without_collector() -> Iterator[None]:
    """Only the counts of references free anything, as always within a run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def numbers_of(shares: Shares) -> list[int]:
    layers = [part for part in shares.objective.modules() if isinstance(part, SharingLayer)]
    return [layer.number for layer in layers]


def test_numbers_of_layers_are_free_again_with_the_model() -> None:
    """Compiled code holds them as constants, so with the same ones it is found again."""
    cpu = torch.device("cpu")
    with without_collector():
        first = Shares(make_objective(), World(0, 1, cpu), False)
        numbers = numbers_of(first)
        second = Shares(make_objective(), World(0, 2, cpu), False)
        assert len(set(numbers) | set(numbers_of(second))) == 8
        del first
        third = Shares(make_objective(), World(1, 2, cpu), False)
        assert numbers_of(third) == numbers and not {*numbers} & {*numbers_of(second)}


@pytest.fixture
def uncompiled_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, no kernel runs, and a sum over two ranks is that of one."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(World, "sum", lambda world, tensor: tensor)
    monkeypatch.setattr("nmt.engines.cuda.loss_triton.supports_fused_loss", lambda hidden: False)


@pytest.mark.usefixtures("uncompiled_twins")
def test_a_recorded_micro_batch_includes_what_ranks_do() -> None:
    from test_fast_paths import batch_of, draw

    shape = BatchShape(192, 192, 16, 128)
    batches = [batch_of(draw(seed, n=3), 192) for seed in range(3)]
    plain = RecordedReplica(make_objective(), Twins(1, 2, torch.device("cpu")), is_bf16=False)
    with pretend_device() as device:
        objective = device.to_device(make_objective())
        replica = RecordedReplica(objective, Twins(1, 2, GPU), False, shape)
        for number, batch in enumerate(batches):
            there = batch.to(GPU)
            device.forget()
            replica.clear_gradients()
            plain.clear_gradients()
            expected, found = plain.run(batch, 0.1, number), replica.run(there, 0.1, number)
            assert isinstance(found, DeviceTensor)
            assert torch.allclose(found.on_host, expected, rtol=1e-5)
            if number > 0:
                assert (device.replays, device.n_waits) == (1, 0) and device.n_launches < 20
            for ours, theirs in zip(replica.buckets, plain.buckets, strict=True):
                gradients = ours.gradients
                assert isinstance(gradients, DeviceTensor)
                gap = (gradients.on_host - theirs.gradients).norm()
                assert gap <= 1e-5 * theirs.gradients.norm()


@pytest.mark.usefixtures("uncompiled_twins")
def test_sums_apart_are_not_recorded_and_change_no_bit() -> None:
    """From the setting to the graph, over updates of two micro-batches."""
    from test_fast_paths import batch_of, draw

    shape = BatchShape(192, 192, 16, 128)
    batches = [batch_of(draw(seed, n=3), 192) for seed in range(6)]
    within = TrainingConfig(precision="fp32")
    apart = replace(within, compile="sums_apart")
    assert [is_compiled(apart, kind) for kind in ("cuda", "cpu")] == [True, False]
    found: dict[str, list[Tensor]] = {}
    with pretend_device() as device:
        there = [batch.to(GPU) for batch in batches]
        for training in (within, apart):
            objective = device.to_device(make_objective())
            engine = RecordedTraining(CudaBackend())
            replica = engine.make_replica(objective, Twins(1, 2, GPU), training, shape)
            assert isinstance(replica, RecordedReplica)
            found[training.compile] = gradients = []
            for number, batch in enumerate(there):
                if number == 4:  # all is recorded
                    Twins.log = []
                    device.forget()
                is_first = number % 2 == 0
                replica.run(batch, 0.1, number, Phase(is_first, not is_first))
                if not is_first:
                    gradients += [bucket.gradients.clone() for bucket in replica.buckets]
            assert (device.replays, device.n_waits) == (2, 0)
            collected = [f"gather {bucket.size}" for bucket in replica.buckets]
            summed = [f"sum {bucket.size}" for bucket in reversed(replica.buckets)]
            sent = [*collected, *waits_for(collected), *summed, *waits_for(summed)]
            assert Twins.log == ([] if training is within else sent)
    for ours, theirs in zip(found["sums_apart"], found["auto"], strict=True):
        assert isinstance(ours, DeviceTensor) and isinstance(theirs, DeviceTensor)
        assert theirs.on_host.any() and torch.equal(ours.on_host, theirs.on_host)


def waits_for(lines: list[str]) -> list[str]:
    return [f"wait for {line}" for line in lines]


@pytest.mark.parametrize("n_refused", [1, 2])
def test_what_another_rank_cannot_do_no_rank_does(
    n_refused: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank cannot compile, or it cannot record."""
    from test_fast_paths import batch_of, draw

    votes = iter([0.0, 1.0][2 - n_refused :])
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(World, "sum", lambda world, tensor: tensor + next(votes))  # of the other
    monkeypatch.setattr("nmt.engines.cuda.loss_triton.supports_fused_loss", lambda hidden: False)
    batch, shape = batch_of(draw(1, n=3), 192), BatchShape(192, 192, 16, 128)
    plain = RecordedReplica(make_objective(), Twins(1, 2, torch.device("cpu")), is_bf16=False)
    expected = plain.run(batch, 0.1, 0)
    with pretend_device() as device:
        objective = device.to_device(make_objective())
        replica = RecordedReplica(objective, Twins(1, 2, GPU), False, shape)
        replica.run(batch.to(GPU), 0.1, 0)
        Twins.log = []
        for bucket in replica.buckets:
            bucket.gradients.zero_()
        found = replica.run(batch.to(GPU), 0.1, 0)
        assert device.replays == 0
        assert isinstance(found, DeviceTensor)
        assert torch.allclose(found.on_host, expected, rtol=1e-5)
    assert (replica.compiled is None) == (not replica.replays) == (n_refused == 1)
    what = {1: "the model cannot be compiled", 2: "the CUDA graph cannot be recorded"}[n_refused]
    (told,) = capsys.readouterr().err.splitlines()
    assert what in told and "it fails on another rank" in told
    assert len([line for line in Twins.log if line.startswith("sum")]) == 5  # of one micro-batch


@pytest.mark.usefixtures("uncompiled_twins")
@pytest.mark.parametrize("is_recorded", [True, False])
def test_nothing_recorded_outlives_the_replica(
    is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for ever, where ranks part, for recorded sums that something still holds."""
    from test_fast_paths import batch_of, draw

    with pretend_device() as device, without_collector():
        if not is_recorded:
            monkeypatch.setattr(torch.cuda, "CUDAGraph", None)  # which cannot be called
        batch = batch_of(draw(1, n=3), 192).to(GPU)
        replicas = []
        for _ in range(2):
            objective = device.to_device(make_objective(1))
            replica = RecordedReplica(
                objective, Twins(1, 2, GPU), False, BatchShape(192, 192, 16, 128)
            )
            for phase in (ALONE, Phase(is_last=False)):
                replica.run(batch, 0.1, 0, phase)
            assert len(replica.replays) == 2
            replicas.append(replica)
        del replica, objective
        gc.disable()  # recording has left it on
        graphs = [weakref.ref(replay) for one in replicas for replay in one.replays.values()]
        replicas[0].close()
        assert [graph() is None for graph in graphs] == [True] * 2 + [False] * 2
        kept = [weakref.ref(one) for one in replicas]
        replicas.clear()
        assert [one() for one in kept] == [None, None]
        assert not [graph for graph in graphs if graph() is not None]


def test_no_garbage_is_collected_while_a_graph_is_recorded() -> None:
    seen = []

    def work() -> None:
        seen.append(gc.isenabled())
        if len(seen) > 3:
            raise ValueError

    with pretend_device():
        capture(work, GPU)
        assert seen == [True, True, False] and gc.isenabled()
        seen[:] = [True]
        with pytest.raises(ValueError):
            capture(work, GPU)
        assert seen == [True, True, True, False] and gc.isenabled()


def test_shares_are_even_and_whole_again() -> None:
    """What is gathered of all ranks' shares is what was divided, whatever their number."""
    for size in (2, 3, 5):
        whole: dict[str, Tensor] = {}
        sizes = []
        for rank in range(size):
            objective = make_objective()
            shares = Shares(objective, World(rank, size, torch.device("cpu")), False)
            sizes.append(sum(share.weight.numel() for share in shares.own.values()))
            model = dict(objective.model.named_parameters())
            for name, share in shares.own.items():
                if name not in whole:
                    whole[name] = torch.full_like(model[name], torch.nan)
                part = share.cut_from(whole[name])
                assert part.isnan().all()  # no other rank has it
                part.copy_(share.weight.detach())
        theirs = dict(make_objective().model.named_parameters())
        assert whole.keys() == theirs.keys()
        assert all(torch.equal(whole[name], theirs[name]) for name in theirs)
        assert max(sizes) <= 1.2 * sum(sizes) / size
