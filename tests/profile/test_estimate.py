"""The estimate of a toy run adds up, leaves nothing, and explains what does not fit."""

import re
from dataclasses import replace
from pathlib import Path

import torch
from pytest import MonkeyPatch, approx, fixture, mark, raises
from support.capture import Capture
from support.golden import check_golden
from support.processor import ALONE, CPU

from nmt.config import RunConfig
from nmt.config_files import override_config
from nmt.engines.cuda.shares import Shares
from nmt.extras.profile import dry_run, estimate
from nmt.extras.profile.dry_run import DryRun, Timing, format_rows, open_dry_run
from nmt.extras.profile.estimate import describe_network, estimate_run
from nmt.system.errors import UserError
from nmt.system.ranks import World
from nmt.train.setup import open_setup


@fixture
def config(prepared: RunConfig, monkeypatch: MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(estimate, "TIMED_S", 0.1)
    return prepared


def test_it_adds_up_and_leaves_nothing(config: RunConfig, capsys: Capture) -> None:
    before = set(Path(config.data.root).rglob("*"))
    config = replace(config, training=replace(config.training, steps=500_000))
    dry_run = open_dry_run(config, ALONE)
    rows = estimate_run(dry_run, price=4.5)
    assert set(Path(config.data.root).rglob("*")) == before
    assert format_rows(rows) in capsys.readouterr().out
    # what test_golden_plans adds up is measured here
    assert not rows["peak memory"].startswith("0.0 MB")
    assert float(rows["price"].split()[0]) > 0
    epochs, tokens = re.findall(r"([0-9.,]+) epochs, ([0-9.]+)M target tokens", rows["recipe"])[0]
    assert 100 < float(tokens) <= 150
    n_tokens = dry_run.setup.store.tgt.n_tokens
    assert float(epochs.replace(",", "")) == approx(1e6 * float(tokens) / n_tokens, rel=1e-3)


def test_golden_plans(config: RunConfig, monkeypatch: MonkeyPatch) -> None:
    """Of a machine on which everything takes its time."""

    def run(dry_run: DryRun, updates: object, n: float, what: str) -> Timing:
        is_typical = "typical" in what
        return Timing([0.5] * int(n), 0.0, 0, 250 * int(n), 10**9 if is_typical else 2 * 10**9)

    monkeypatch.setattr(DryRun, "run", run)
    monkeypatch.setattr(World, "broadcast", lambda _, value: value)
    monkeypatch.setattr(DryRun, "dev_seconds", lambda _: 10.0)
    monkeypatch.setattr(DryRun, "decoding_seconds", lambda _: 30.0)
    monkeypatch.setattr(estimate, "describe_machine", lambda _: "this machine")

    def plan(world: World, price: float | None, *changes: str) -> str:
        large = ("training.steps=5000", "model.d_model=128", "model.d_ff=512")
        changed = override_config(config, [*large, *changes])
        return format_rows(estimate_run(DryRun(open_setup(changed, world)), price))

    plans = {
        "toy": plan(ALONE, None),
        "toy: with a price": plan(ALONE, 4.5),
        "toy: on two ranks": plan(replace(ALONE, size=2), None),
    }
    for change in (
        "training.ema=0.9",
        "training.validate_every=300",
        "data.train=[{src: train.en, tgt: train.de, weight: 0.5}]",
    ):
        plans[f"toy: {change}"] = plan(ALONE, None, change)
    check_golden("plan.txt", plans)


@mark.parametrize(
    "error, is_memory",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), False),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublas"), True),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            True,
        ),
    ],
)
def test_a_micro_batch_that_does_not_fit(
    error: Exception, is_memory: bool, config: RunConfig, monkeypatch: MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(dry_run, "run_update", fail)
    with raises(UserError if is_memory else RuntimeError) as raised:
        estimate_run(open_dry_run(config, ALONE))
    assert ("training.micro_tokens=75" in str(raised.value)) == is_memory


def test_what_an_update_costs_the_network(config: RunConfig) -> None:
    """Of two ranks in bf16: half of all gradients in fp32, of matrices of layers in bf16, of the rest
    in fp32. On CPUs: half of all gradients, twice.
    """
    world = World(1, 2, CPU)
    setup = open_setup(config, world)
    matrices = sum(p.numel() for name, p in setup.model.named_parameters() if is_of_layer(name, p))
    n = sum(p.numel() for p in setup.model.parameters())
    expected = (8 * n - 2 * matrices) / 2
    assert setup.replica.network_bytes == 4 * n
    found = Shares(setup.model, world, is_bf16=True).network_bytes
    assert expected <= found < 1.2 * expected  # some room lies between tensors
    assert "sends and receives 1.10 GB in an update: 3.0 ms over NVLink" in describe_network(1.1e9)
    assert "100.0 ms over 100 Gb/s Ethernet" in describe_network(1.1e9)


def is_of_layer(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith(("encoder.", "decoder.")) and parameter.dim() > 1


def test_without_a_dev_set_validation_takes_no_time(config: RunConfig) -> None:
    setup = open_setup(config, ALONE)
    assert DryRun(setup).dev_seconds() > 0 and setup.model.training
    assert DryRun(setup).decoding_seconds() > 0 and setup.model.training
    without = open_setup(replace(config, data=replace(config.data, valid=None)), ALONE)
    assert DryRun(without).dev_seconds() == 0.0
    assert DryRun(without).decoding_seconds() == 0.0
