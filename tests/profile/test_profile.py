"""Costs against counts made otherwise; profile and plan on a toy run, with parts that are made slow on purpose."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.utils.flop_counter import FlopCounterMode

import nmt.profile.profile
from nmt.config import ModelConfig, RunConfig, load_config, override_config
from nmt.corpus.prepare import prepare
from nmt.data.batch import pack
from nmt.data.loader import Loader, Update
from nmt.data.store import open_store
from nmt.model.transformer import FeedForward, MemoryAttention, SelfAttention, Transformer
from nmt.profile import cost
from nmt.profile import dry_run as rehearsal
from nmt.profile.cost import Ticks, ceiling, flop_per_token, footprint
from nmt.profile.dry_run import Rehearsal
from nmt.profile.parts import PARTS, seconds_of_kernels, seconds_of_parts
from nmt.profile.profile import plan, profile
from nmt.system.errors import UserError
from nmt.system.ranks import World
from nmt.train.loss import Objective

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture
def config(toy: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A prepared toy, and little patience."""
    monkeypatch.setattr(cost, "MEASURED_S", 0.1)
    monkeypatch.setattr(nmt.profile.profile, "PLANNED_S", 0.3)
    config = load_config(str(toy))
    prepare(config.data, config.vocab, config.seed)
    return config


@pytest.mark.parametrize(
    "model, src, tgt",
    [  # worked out by hand from section 3, with 37,000 pieces
        (ModelConfig(), 133.2e6, 247.4e6),
        (ModelConfig(d_model=1024, d_ff=4096, n_heads=16), 530.6e6, 759.1e6),
    ],
)
def test_operations_of_the_papers_models(model: ModelConfig, src: float, tgt: float) -> None:
    flop = flop_per_token(model, 37_000, 30, 30)
    assert flop.src == pytest.approx(src, rel=5e-4) and flop.tgt == pytest.approx(tgt, rel=5e-4)


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(d_model=128, d_ff=256, n_heads=4, n_layers=2),
        ModelConfig(d_model=128, d_ff=512, n_heads=2, n_layers=3, d_k=32, d_v=96, norm="pre"),
        ModelConfig(d_model=64, d_ff=256, n_heads=4, n_layers=1, tied=False, dropout=0.0),
    ],
)
def test_operations_are_those_that_torch_counts(model: ModelConfig) -> None:
    transformer = Transformer(model, 500)
    src, tgt = pack([[5] * 32] * 10), pack([[6] * 16] * 10)  # lengths that no grid pads
    with FlopCounterMode(display=False) as counter:
        (transformer(src, tgt) @ transformer.projection.weight.T).sum().backward()
    flop = flop_per_token(model, 500, 32, 16)
    assert flop.src * 320 + flop.tgt * 160 == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("window", [None, 4, 100])
def test_operations_of_attention_follow_the_pieces_seen(window: int | None) -> None:
    model = ModelConfig(d_model=64, n_heads=4, n_layers=3, d_k=8, d_v=24, window=window)
    n, reach = 80, window or 80
    near = [(q, k) for q in range(n) for k in range(n) if abs(q - k) <= reach]
    behind = [(q, k) for q, k in near if k <= q]
    per_pair = 6 * 3 * 4 * (8 + 24)
    empty, full = flop_per_token(model, 100, 0, 0), flop_per_token(model, 100, n, n)
    base = ModelConfig(
        d_model=64, n_heads=4, n_layers=3, d_k=8, d_v=24
    )  # an empty sentence sees nothing
    assert empty == flop_per_token(base, 100, 0, 0)
    assert (full.src - empty.src) * n == pytest.approx(per_pair * len(near), rel=0.04)
    assert (full.tgt - empty.tgt) * n == pytest.approx(per_pair * (len(behind) + n * n), rel=0.04)


@pytest.mark.parametrize("is_tied", [True, False])
def test_bytes_are_those_of_the_tensors(is_tied: bool) -> None:
    model = Transformer(ModelConfig(d_model=16, d_ff=32, n_heads=2, n_layers=1, tied=is_tied), 50)
    adam = torch.optim.Adam(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    adam.step()
    state = footprint(model)
    moments = [m for s in adam.state.values() for name, m in s.items() if name != "step"]
    sizes = [sum(t.numel() * 4 for t in kind) for kind in (model.parameters(), moments)]
    assert [4 * state.parameters, state.weights, state.gradients, state.adam] == [sizes[0]] * 3 + [
        sizes[1]
    ]


def test_the_ceiling_is_a_speed_of_products(config: RunConfig) -> None:
    model = ModelConfig(d_model=256, d_ff=512, n_heads=4)
    a, b = torch.randn(1000, 256), torch.randn(256, 512)
    took = []
    for _ in range(20):
        began = time.perf_counter()
        a @ b
        took.append(time.perf_counter() - began)
    reached = ceiling(model, 1000, torch.float32, torch.device("cpu"))
    assert 0.2 < reached / (2 * 1000 * 256 * 512 / min(took)) < 5


def test_ticks_tell_time() -> None:
    ticks = Ticks(torch.device("cpu"))
    for pause in (0.02, 0.05, 0.0):
        ticks.mark()
        time.sleep(pause)
    first, second = ticks.seconds()
    assert first >= 0.02 and second >= 0.05


def test_a_profile_accounts_for_the_whole_update_and_leaves_only_its_trace(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(tmp_path.rglob("*"))
    result = profile(config, ALONE, seconds=1.0, trace=tmp_path / "trace.json")
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "trace.json"}
    assert tuple(result.parts) == PARTS and min(result.parts.values()) > 0
    assert sum(result.parts.values()) == pytest.approx(result.update_ms, rel=1e-9)
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert {"attention", "feed-forward", "softmax and loss", "aten::mm"} <= names

    assert result.updates >= 3
    store = open_store(Path(config.data.store), "train")
    tokens = result.tgt_tokens_per_s * result.update_ms / 1000
    assert 200 < tokens <= config.training.tgt_tokens  # of an update
    assert result.src_tokens_per_s / result.tgt_tokens_per_s == pytest.approx(
        store.src.n_tokens / store.tgt.n_tokens, rel=0.05
    )
    assert 0.5 < result.grid_fill < 1 and result.row_fill <= 1
    assert 0 < result.flop_per_s < result.ceiling
    out = capsys.readouterr().out
    assert (
        all(part in out for part in PARTS)
        and f"{result.tgt_tokens_per_s:,.0f}" in out
        and "fp32" in out
    )


class _Slow(torch.autograd.Function):
    """Nothing but a pause on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: float) -> Tensor:
        ctx.pause = pause
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.pause)
        return grad.clone(), None


@pytest.mark.parametrize(
    "owner, part",
    [
        (SelfAttention, "attention"),
        (MemoryAttention, "attention"),
        (FeedForward, "feed-forward"),
        (Transformer, "embedding, norm, dropout"),
        (Objective, "softmax and loss"),
    ],
)
def test_a_slow_backward_pass_is_told_of_the_right_part(
    owner: Any, part: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Callable[..., Any] = owner.forward

    def slowed(*args: Any) -> Any:
        result = forward(*args)
        return (
            (_Slow.apply(result[0], 0.06), result[1])
            if owner is Objective
            else _Slow.apply(result, 0.06)
        )

    monkeypatch.setattr(owner, "forward", slowed)
    small = override_config(config, ["model.n_layers=1", "training.micro_tokens=300"])
    result = profile(small, ALONE, seconds=0.0)
    assert result.parts[part] > 0.6 * result.update_ms


def test_operations_belong_to_the_part_that_called_them() -> None:
    def event(
        name: str, parent: FunctionEvent | None = None, own_us: int = 0, sequence: int = -1
    ) -> FunctionEvent:
        made = FunctionEvent(0, name, 1, 0, own_us, sequence_nr=sequence)
        if parent:
            made.set_cpu_parent(parent)
        return made

    engine = "autograd::engine::evaluate_function: "
    update = event("update")
    model, step = (
        event("embedding, norm, dropout", update),
        event("Optimizer.step#Adam.step", update),
    )
    attention, inner = event("attention", model), event("feed-forward", model)
    product, sums = (
        event(engine + "MmBackward0", sequence=5),
        event(engine + "torch::autograd::AccumulateGrad"),
    )
    events = [
        update,
        model,
        event("aten::empty", model, sequence=5),
        attention,
        event("aten::mm", attention, 30, 5),
        event("aten::add", model, 2, 6),
        inner,
        event("aten::relu", inner, 4, 7),
        product,
        event("aten::mm", product, 60),
        event(engine + "ReluBackward0", None, 8, 7),
        sums,
        event("aten::add_", sums, 16),
        step,
        event("aten::_fused_adam_", step, 32),
        event("aten::zeros", update, 1),
        event("aten::copy_", None, 1000),
    ]  # of another thread
    parts = {part: 1e6 * took for part, took in seconds_of_parts(events).items() if took}
    assert parts == pytest.approx(
        {
            "attention": 90,
            "feed-forward": 12,
            "embedding, norm, dropout": 2,
            "optimizer": 32,
            "other": 17,
        }
    )


def test_kernels_of_a_graph_belong_to_the_part_that_they_are_named_after() -> None:
    """Names as CUPTI gives them on Hopper; a graph's kernels have no operation above them."""
    took_us = {
        "attention_backward": 8,
        "loss_rows_once": 4,
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTN": 100,
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": 10,
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevK": 7,
        "triton_per_fused_add_native_dropout_native_layer_norm_packed_attention_3": 20,
        "Memcpy DtoD": 1,
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>": 5,
    }
    events = [
        FunctionEvent(0, name, 1, 0, took, device_type=DeviceType.CUDA)
        for name, took in took_us.items()
    ]
    events += [
        FunctionEvent(0, "update", 1, 0, 999, device_type=DeviceType.CUDA),
        FunctionEvent(0, "mm", 1, 0, 999),
        FunctionEvent(
            0,
            "Optimizer.step#Adam.step",
            1,
            0,
            999,
            device_type=DeviceType.CUDA,
            is_user_annotation=True,
        ),
    ]
    parts = {part: round(1e6 * took) for part, took in seconds_of_kernels(events).items()}
    assert parts == {
        "attention": 8,
        "softmax and loss": 4,
        "matrix products": 110,
        "sum over ranks": 7,
        "other": 1,
        "embedding, norm, dropout": 20,
        "optimizer": 5,
    }


def test_waiting_for_data_is_told(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Loader.__next__

    def late(self: Loader) -> Update:
        time.sleep(0.1)
        return ready(self)

    monkeypatch.setattr(Loader, "__next__", late)
    result = profile(override_config(config, ["training.micro_tokens=300"]), ALONE, seconds=0.0)
    assert 100 <= result.parts["data waited"] < result.update_ms


def test_a_trace_that_cannot_be_written_is_refused_before_the_work(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nmt.profile.profile, "Rehearsal", None)  # what would begin it
    with pytest.raises(UserError, match="nowhere/t.json"):
        profile(config, ALONE, trace=tmp_path / "nowhere" / "t.json")


def test_a_plan_adds_up_and_leaves_nothing(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(tmp_path.rglob("*"))
    result = plan(
        override_config(config, ["training.steps=5000", "training.checkpoint_every=400"]),
        ALONE,
        price=4.5,
    )
    assert set(tmp_path.rglob("*")) == before
    assert result.cost == pytest.approx(4.5 * result.hours) and result.hours > 0
    assert f"{4.5 * result.hours:,.2f} at 4.50" in capsys.readouterr().out
    assert (result.validations, result.checkpoints) == (50, 12)
    assert (
        0 < result.median_s <= result.p90_s
    )  # how these compare with the mean is up to the machine
    assert result.validations_h > 0 and result.hours == result.updates_h + result.validations_h
    store = open_store(Path(config.data.store), "train")
    assert 200 * 5000 < result.tgt_tokens <= 300 * 5000
    assert result.epochs == pytest.approx(result.tgt_tokens / store.tgt.n_tokens)


def test_the_worst_micro_batches_are_found(config: RunConfig) -> None:
    result = plan(config, ALONE)
    store, room = open_store(Path(config.data.store), "train"), 90  # tokens, as in the toy config
    pairs = [(int(s), int(t)) for s, t in zip(store.src.lengths, store.tgt.lengths, strict=True)]
    longest, most = result.worst
    assert result.cost is None
    for worst, order in (
        (longest, sorted(pairs, key=lambda p: -sum(p))),
        (most, sorted(pairs, key=max)),
    ):
        assert max(worst.n_src, worst.n_tgt) <= room < max(np.sum(order[: worst.pairs + 1], axis=0))
        assert (worst.n_src, worst.n_tgt) == tuple(np.sum(order[: worst.pairs], axis=0))
    assert most.pairs > longest.pairs > 1


@pytest.mark.parametrize(
    "error, is_room",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), False),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            True,
        ),
    ],
)
def test_a_micro_batch_that_does_not_fit(
    error: Exception, is_room: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(rehearsal, "run_update", full)
    with pytest.raises(UserError if is_room else RuntimeError) as raised:
        plan(config, ALONE)
    assert ("training.micro_tokens=45" in str(raised.value)) == is_room


def test_no_dev_set_takes_no_time(config: RunConfig) -> None:
    made = Rehearsal(config, 90, ALONE)
    assert made.dev_seconds() > 0 and made.model.training
    assert Rehearsal(override_config(config, ["data.valid=null"]), 90, ALONE).dev_seconds() == 0.0
