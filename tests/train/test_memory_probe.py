"""The size of a micro-batch: an equal share for each rank, halved until it fits, and kept by a run
that goes on.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pytest import MonkeyPatch, approx, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.in_process import refuse, succeed
from support.pretend_device import GPU, pretend_device
from support.processor import ALONE, CPU

from nmt.commands.train import main
from nmt.config import OptimizerConfig, RunConfig, TrainingConfig
from nmt.config_files import override_config
from nmt.data.batch import Batch, BatchShape
from nmt.data.store import Side, TokenStore, open_store
from nmt.engines.cuda import memory_trial, training
from nmt.engines.cuda.memory_trial import choose_micro_tokens, fits
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import read_json
from nmt.system.ranks import World
from nmt.train import engine, memory_probe
from nmt.train import resolve as resolving
from nmt.train import setup as train_setup
from nmt.train.engine import TrainingEngine, TrySize
from nmt.train.loss import Objective
from nmt.train.memory_probe import probe_peak_memory, try_update
from nmt.train.optimizer import make_optimizer
from nmt.train.replica import Replica
from nmt.train.resolve import resolve_micro_tokens, useful_share
from nmt.train.setup import Setup, open_setup
from nmt.train.shutdown import StopRequest
from nmt.train.validate import compute_dev_nll

ON_GPU = World(0, 1, GPU)
PAPER = RunConfig()
AUTO = override_config(PAPER, ["training.micro_tokens=auto"])
CARD = 80 << 30  # bytes of a pretended GPU


def not_tried(*_: object) -> None:
    raise AssertionError("memory is not tried here")


Found = TypeVar("Found")


class Unconnected(World):
    """One of many ranks, without the others: what the main rank finds is what all are told."""

    def on_main(self, work: Callable[[], Found]) -> Found:
        return work()

    def collect(self, data: bytes) -> list[bytes]:
        """The other ranks have cards of half the size."""
        return [data, *[str(int(data) // 2).encode()] * (self.size - 1)]

    def broadcast(self, value: float) -> float:
        return value


@mark.parametrize(
    "n_ranks, limit, tried",
    [
        (1, 10**9, [25_000]),
        (1, 7_000, [25_000, 12_532, 6_282]),
        (8, 10**9, [3_157]),
        (8, 3_000, [3_157, 1_595]),
        (16, 10**9, [1_595]),
    ],
)
def test_on_a_gpu_an_equal_share_is_halved_until_it_fits(
    n_ranks: int, limit: int, tried: list[int], monkeypatch: MonkeyPatch
) -> None:
    seen: list[int] = []

    def fits_below(_: TrySize, micro_tokens: int, world: World, least_memory: int) -> bool:
        seen.append(micro_tokens)
        return micro_tokens <= limit

    monkeypatch.setattr(memory_trial, "fits", fits_below)
    world = World(0, n_ranks, GPU)
    assert choose_micro_tokens(PAPER.training, world, CARD, not_tried) == tried[-1]
    assert seen == tried


def test_where_nothing_fits_it_is_said_what_to_lower(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trial, "fits", lambda *_: False)
    with raises(
        UserError, match=r"training.micro_tokens: auto tried down to .* none fit into memory; lower"
    ):
        choose_micro_tokens(PAPER.training, ON_GPU, CARD, not_tried)


@mark.parametrize("n_ranks", [1, 2, 3, 8])
def test_on_a_cpu_shares_are_what_caches_like_and_all_ranks_work(n_ranks: int) -> None:
    world = World(0, n_ranks, CPU)
    size = engine.TrainingEngine().choose_micro_tokens(PAPER.training, world, 0, not_tried)
    assert 1_500 < size <= engine.CPU_MICRO_TOKENS
    assert useful_share(PAPER.training, size, n_ranks) == 1.0


def with_size(config: RunConfig, micro_tokens: int) -> RunConfig:
    return override_config(config, [f"training.micro_tokens={micro_tokens}"])


@mark.parametrize(
    "began_with, n_ranks, goes_on_with",
    [
        (3_157, 8, 3_157),
        (3_157, 4, 3_157),
        (3_157, 1, 3_157),
        (25_000, 1, 25_000),
        (25_000, 8, 3_157),
        (3_157, 16, 1_595),
    ],
)
def test_a_run_goes_on_with_its_size_unless_ranks_would_idle(
    began_with: int,
    n_ranks: int,
    goes_on_with: int,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(memory_trial, "fits", lambda *_: True)
    monkeypatch.setattr(training, "measure_memory", lambda device: CARD)
    recorded, world = with_size(PAPER, began_with), Unconnected(0, n_ranks, GPU)
    assert resolve_micro_tokens(AUTO, recorded, world) == goes_on_with
    told = read_stderr(capsys)
    assert (f"micro-batches of {began_with} tokens" in told) == (began_with != goes_on_with)


@mark.parametrize("n_ranks, share", [(1, 0.92), (4, 0.46)])
def test_the_smallest_card_limits_the_trial(
    n_ranks: int, share: float, monkeypatch: MonkeyPatch
) -> None:
    shares: list[float] = []
    monkeypatch.setattr(training, "measure_memory", lambda device: CARD)
    monkeypatch.setattr(memory_trial, "measure_memory", lambda device: CARD)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share)
    )
    monkeypatch.setattr(resolving, "try_update", lambda setup: None)
    monkeypatch.setattr(resolving, "open_setup", lambda *_: None)
    assert resolve_micro_tokens(AUTO, AUTO, Unconnected(0, n_ranks, GPU)) > 0
    assert shares == [approx(share), 1.0]


def test_a_number_that_is_given_stays() -> None:
    given, recorded = with_size(PAPER, 777), with_size(PAPER, 3_157)
    assert resolve_micro_tokens(given, recorded, Unconnected(0, 8, GPU)) == 777


@fixture
def without_limit(monkeypatch: MonkeyPatch) -> None:
    """A trial sets a limit on the GPU's memory, and there is none."""
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    monkeypatch.setattr(memory_trial, "measure_memory", lambda device: CARD)


@mark.usefixtures("without_limit")
@mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_what_was_tried_in_vain_is_gone_before_the_next_try(
    error: type[Exception], prepared: RunConfig, monkeypatch: MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    def noted(micro_tokens: int, world: World) -> None:
        assert [one for one in made if one() is not None] == []
        setup = open_setup(with_size(prepared, micro_tokens), world)
        made.append(weakref.ref(setup.model))
        try_update(setup)

    def full(*_: object) -> None:
        raise error("out of memory")

    world = ALONE
    with monkeypatch.context() as context:
        context.setattr(memory_probe, "probe_peak_memory", full)
        gc.disable()  # what is left to chance otherwise
        try:
            assert not fits(noted, 300, world, CARD)
            assert not fits(noted, 150, world, CARD)
        finally:
            gc.enable()
    assert fits(noted, 75, world, CARD)
    assert len(made) == 3


@mark.usefixtures("without_limit")
def test_another_error_is_not_taken_for_want_of_memory() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("shapes differ")

    with raises(RuntimeError, match="shapes differ"):
        fits(broken, 300, ALONE, CARD)


def test_trying_the_worst_first_changes_nothing(
    prepared: RunConfig, monkeypatch: MonkeyPatch
) -> None:
    """A GPU tries the longest sentences and then the most before its first update; here a CPU does."""
    tried: list[tuple[int, int]] = []
    run = Replica.run

    def note(replica: Replica, batch: Batch, *rest: Any) -> torch.Tensor:
        tried.append((batch.src.longest, batch.src.n_sentences))
        return run(replica, batch, *rest)

    monkeypatch.setattr(Replica, "run", note)
    setup = open_setup(prepared, ALONE)
    before = {name: p.detach().clone() for name, p in setup.model.named_parameters()}
    probe_peak_memory(setup)
    for name, p in setup.model.named_parameters():
        assert p.grad is None and torch.equal(p, before[name])
    assert not setup.optimizer.state
    (longest, n_long), (shorter, n_short) = tried
    assert longest == setup.store.src.lengths.max() > shorter
    assert n_short > n_long


class Chosen(Exception):
    """Carries the shape for which a replica would be made; nothing is put on a device."""


class Reporting(TrainingEngine):
    def has_fixed_shape(self, *_: object) -> bool:
        return True

    def make_replica(
        self,
        objective: Objective,
        world: World,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        shape: BatchShape | None,
    ) -> Replica:
        raise Chosen(shape)


class Stationary(Transformer):
    def to(self, *_: object, **__: object) -> Any:
        return self


def test_a_gpu_drops_rows_that_no_update_fills_and_always_the_same(
    prepared: RunConfig, monkeypatch: MonkeyPatch
) -> None:
    """BPE-dropout keeps them, which draws other lengths for each epoch."""

    def open_store_of_short_targets(*given: Any) -> TokenStore:
        store = open_store(*given)
        return TokenStore(store.src, Side(store.tgt.ids, store.tgt.offsets // 2))

    monkeypatch.setattr(train_setup, "open_store", open_store_of_short_targets)
    monkeypatch.setattr(train_setup, "choose_training_engine", lambda device: Reporting())
    monkeypatch.setattr(train_setup, "Transformer", Stationary)

    def choose(bpe_dropout: float) -> BatchShape:
        training = replace(prepared.training, src_tokens=600, tgt_tokens=600)
        vocab = replace(prepared.vocab, bpe_dropout=bpe_dropout)
        config = replace(prepared, training=training, vocab=vocab)
        with raises(Chosen) as chosen:
            open_setup(with_size(config, 600), ON_GPU)
        shape: BatchShape = chosen.value.args[0]
        return shape

    full, fitted = choose(0.1), choose(0.0)
    assert full.src_tokens == full.tgt_tokens == fitted.src_tokens == 640
    assert fitted == choose(0.0)
    assert fitted.tgt_tokens < 0.9 * full.tgt_tokens


def test_an_out_of_memory_error_names_the_setting_to_lower(
    toy: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Replica, "run", full)
    error = refuse(capsys, main, "--config", toy)
    assert "training.micro_tokens 150" in error and "training.micro_tokens=75" in error
    assert read_json(tmp_path / "run" / "status.json")["exit_code"] == 2

    # nothing has come of it, so the next command may have any other settings
    monkeypatch.undo()
    succeed(main, "--config", toy, "seed=9", "training.steps=1")


# ---- validation beside training ------------------------------------------------------------------------------------

ROOM = 1 << 40  # more than any test takes


@fixture
def without_kernels(monkeypatch: MonkeyPatch) -> None:
    # Triton's kernels need a driver
    monkeypatch.setattr("nmt.engines.cuda.loss_triton.supports_fused_loss", lambda hidden: False)


def score_dev(setup: Setup, world: World) -> float:
    """The NLL of the dev set, in batches of 600 tokens."""
    assert setup.dev is not None
    nll = compute_dev_nll(setup.model, setup.dev.store, 600, world, StopRequest())
    assert nll is not None
    return nll


@mark.usefixtures("without_kernels")
def test_the_dev_set_is_scored_in_what_memory_training_leaves(prepared: RunConfig) -> None:
    """A batch that does not fit is halved as often as necessary, and the NLL is the same."""
    setup = open_setup(with_size(prepared, 600), ALONE)
    expected = score_dev(setup, setup.world)
    with pretend_device(budget=ROOM) as device:
        device.to_device(setup.model)
        weights = device.n_bytes
        assert score_dev(setup, ON_GPU) == approx(expected, rel=1e-6)
        assert device.n_bytes == weights
        needed = device.peak - weights
        for share in (0.9, 0.4, 0.2):
            device.budget, device.peak = weights + int(share * needed), 0
            assert score_dev(setup, ON_GPU) == approx(expected, rel=1e-6)
            assert weights < device.peak <= device.budget
        device.budget = weights + needed // 1_000
        with raises(torch.OutOfMemoryError):
            score_dev(setup, ON_GPU)


class Graph(Replica):
    """Keeps as much memory for each token of a micro-batch as a recorded graph would."""

    held = torch.empty(0)

    def run(self, batch: Batch, scale: float, seed: int) -> torch.Tensor:
        if not len(self.held):
            self.held = torch.zeros(4_000 * batch.n_tokens, device=GPU)
        for p in self.objective.parameters():
            p.grad = torch.zeros_like(p)
        return torch.zeros(2, device=GPU)


@mark.usefixtures("without_kernels", "without_limit")
def test_a_size_that_leaves_no_room_to_validate_is_not_chosen(
    prepared: RunConfig, monkeypatch: MonkeyPatch
) -> None:
    made: list[Setup] = []

    with pretend_device(budget=ROOM) as device:

        def try_size(micro_tokens: int, _: World) -> None:
            made.clear()  # what was tried before is gone
            setup = open_setup(with_size(prepared, micro_tokens), ALONE)
            device.to_device(setup.model)
            replica = Graph(setup.replica.objective, ON_GPU, False)
            optimizer = make_optimizer(setup.model, prepared.optimizer)
            setup = replace(setup, world=ON_GPU, replica=replica, optimizer=optimizer)
            made.append(setup)
            try_update(setup)

        with monkeypatch.context() as context:
            context.setattr(memory_probe, "compute_dev_nll", lambda *_: None)
            try_size(300, ON_GPU)  # the whole update, as before a trial validated
            device.budget = device.peak + 1_000
            assert choose_micro_tokens(prepared.training, ON_GPU, CARD, try_size) == 300
            with raises(torch.OutOfMemoryError):
                score_dev(made[0], ON_GPU)  # the first validation ends the run
        assert choose_micro_tokens(prepared.training, ON_GPU, CARD, try_size) == 182
        score_dev(made[0], ON_GPU)
