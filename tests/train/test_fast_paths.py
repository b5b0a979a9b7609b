"""The path that trains - grouped attention, fused loss, constant shapes, compiled code - against
one sentence at a time in float64, with the loss written out.

A sentence alone is held to torch's own modules in tests/model/test_retellings.py, its windows and
sizes of heads to their formulas in tests/model/test_packed_attention.py, and sentences together to
each alone, for every option of a model, in tests/model/test_transformer.py. What is compiled is traced
here without a GPU: the grids of the CPU with breaks, the GPU's path as one graph with its kernels
interpreted, in a process of its own since Triton decides that at its import (interpreted.py).
"""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from pytest import MonkeyPatch, fixture, mark
from support.capture import Capture, read_stderr
from support.interpreted import IS_INTERPRETED
from torch import Tensor

from nmt.config import ModelConfig, TrainingConfig
from nmt.data.batch import Batch, BatchShape, pack
from nmt.data.loader import make_batch
from nmt.data.store import Side, TokenStore
from nmt.data.vocab import BOS, EOS
from nmt.engines.cpu.backend import CpuBackend
from nmt.engines.cuda import recorded_replica
from nmt.engines.cuda.backend import CudaBackend
from nmt.engines.cuda.recorded_replica import CompiledObjective
from nmt.model.backend import Backend, use_backend
from nmt.model.transformer import Transformer
from nmt.system import runtime as process
from nmt.system.ranks import World
from nmt.system.tensor_files import Tensors
from nmt.train.loss import Objective
from nmt.train.replica import forward_backward

V, EPS, SCALE = 61, 0.1, 0.01
POST = ModelConfig(d_model=32, d_ff=48, n_heads=4, n_layers=2, dropout=0.0)
UNLIKE = replace(POST, tied=False, norm="pre", window=3, d_k=5, d_v=12)
LENGTHS = [0, 0, 1, 6, 14, 15, 16, 30, 32, 47, 64, 69]
Pairs = list[tuple[list[int], list[int]]]


def make(config: ModelConfig, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(config, V)
    for p in model.parameters():  # biases and norms too must matter
        p.data += 0.05 * torch.randn_like(p)
    return model


def draw(seed: int, n: int = 7) -> Pairs:
    """The longest first, one without a piece, the others at random; without marks, as a store holds them."""
    rng = np.random.default_rng(seed)
    sizes = [(69, 65), (0, 0), *rng.choice(LENGTHS, (n - 2, 2))]
    return [(rng.integers(4, V, a).tolist(), rng.integers(4, V, b).tolist()) for a, b in sizes]


def batch_of(pairs: Pairs, room: int = 0) -> Batch:
    """With room: dead tails of any pieces, and empty sentences."""
    src, tgt = (
        Side(np.array(sum(rows, []), np.uint16), np.cumsum([0, *map(len, rows)]))
        for rows in zip(*pairs, strict=True)
    )
    shape = BatchShape(room, room, 16, min(room, 128)) if room else None
    batch = make_batch(TokenStore(src, tgt), np.arange(len(pairs)), shape)
    for packed in (batch.src, batch.tgt):
        assert packed.tokens.numel() == (room or -(-packed.n_live // 64) * 64)
        packed.tokens[packed.n_live :].random_(4, V)
    return batch


def expected(model: Transformer, pairs: Pairs) -> Tensors:
    """The sums of loss and NLL, and the gradient of SCALE times the first."""
    model, sums = deepcopy(model).double(), torch.zeros(2)
    for src, tgt in pairs:
        hidden = model(pack([[*src, EOS]]), pack([[BOS, *tgt]]))
        log_p = F.log_softmax(model.projection(hidden), 1)
        gold = log_p.gather(1, torch.tensor([*tgt, EOS])[:, None]).sum()
        sums = sums + torch.stack(((EPS - 1) * gold - EPS / (V - 1) * (log_p.sum() - gold), -gold))
    (SCALE * sums[0]).backward()
    return {"sums": sums.detach()} | gradients(model)


def gradients(module: torch.nn.Module) -> Tensors:
    return {
        name.removeprefix("objective.").removeprefix("model."): p.grad.clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def found(objective: torch.nn.Module, batch: Batch, is_fast: bool = False) -> Tensors:
    objective.zero_grad()
    sums = forward_backward(objective, batch, SCALE, is_fast)
    return {"sums": sums} | gradients(objective)


def errors(ours: Tensors, exact: Tensors) -> dict[str, float]:
    """Of each gradient, and of all taken as one."""
    assert ours.keys() == exact.keys()
    both = {name: (ours[name].double(), x.double()) for name, x in exact.items()}
    flat = [[pair[i].flatten() for name, pair in both.items() if name != "sums"] for i in (0, 1)]
    both["all"] = torch.cat(flat[0]), torch.cat(flat[1])
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in both.items()}


@mark.parametrize("config", [POST, UNLIKE])
def test_a_training_step_equals_its_sentences_alone(config: ModelConfig) -> None:
    coarse = []
    for seed in range(2):
        model, pairs = make(config, seed), draw(seed, n=7 + seed)
        plain, roomy, objective = batch_of(pairs), batch_of(pairs, 512), Objective(model, EPS)
        exact, ours = expected(model, pairs), found(objective, plain)
        assert max(errors(ours, exact).values()) < 1e-6
        assert max(errors(found(objective, roomy), ours).values()) < 1e-6
        for batch in (plain, roomy):
            fast = errors(found(objective, batch, is_fast=True), exact)
            assert fast["sums"] < 1e-3
            coarse.append(fast["all"])
    assert max(coarse) < 6e-2 and np.mean(coarse) < 4.2e-2  # as coarse as bf16 is, and no coarser


class CompiledAlone(CompiledObjective):
    """It reads its own weights."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(batch, {})


def draw_short(n: int) -> Pairs:
    return [(s[-19:], t[:17]) for s, t in draw(7, n)]


def check_compiled(is_whole: bool, backend: Backend, room: int = 64) -> None:
    torch._dynamo.utils.counters.clear()
    pairs = draw_short(2 if IS_INTERPRETED else 4)
    objective = Objective(make(replace(POST, n_layers=1, n_heads=2)), EPS)
    use_backend(objective, backend)
    compiled = CompiledAlone(objective, BatchShape(room, room, 16, 64), is_whole)
    exact, ours = found(objective, batch_of(pairs)), found(compiled, batch_of(pairs, room))
    assert max(errors(ours, exact).values()) < 1e-6
    if is_whole:
        check_one_compilation(compiled)


def check_one_compilation(compiled: CompiledAlone) -> None:
    """Batches of other numbers and lengths of sentences need no second compilation: every shape is
    constant.
    """
    rng = np.random.default_rng(0)
    for n, longest in ((1, 3), (3, 20)):
        src, tgt = rng.integers(4, V, longest).tolist(), rng.integers(4, V, 18).tolist()
        compiled(batch_of([(src, tgt)] * n, 64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_equals_eager_whatever_was_compiled_before(
    monkeypatch: MonkeyPatch,
) -> None:
    """A notebook trains many models in one process, and dynamo compiles one function a few times only."""
    made = []
    for room, compiler in ((64, "aot_eager"), (80, "eager")):
        monkeypatch.setattr(recorded_replica, "BACKEND", compiler)
        with torch._dynamo.config.patch(recompile_limit=1):
            check_compiled(False, Backend(), room)
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert made[0] == made[1] > 0


class OnPretendedGpu(CudaBackend):
    """Its tensors are on the CPU, where our dropout is the only one that repeats."""

    drop = CpuBackend.drop


@fixture
def with_kernels(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_replica, "BACKEND", "aot_eager")
    # Asked of an environment that is not traced
    monkeypatch.setattr("nmt.engines.cuda.loss_triton.supports_fused_loss", lambda hidden: True)


@mark.interpreted
@mark.usefixtures("with_kernels")
def test_what_a_gpu_runs_is_one_graph() -> None:
    check_compiled(True, OnPretendedGpu())


@mark.interpreted
@mark.usefixtures("with_kernels")
def test_a_graph_drops_other_attention_weights_at_each_call() -> None:
    model = make(replace(POST, n_layers=1, n_heads=2, attention_dropout=0.3))
    objective = Objective(model, EPS)
    use_backend(objective, OnPretendedGpu())
    compiled = CompiledAlone(objective, BatchShape(64, 64, 16, 64), is_one_graph=True)
    batch = batch_of(draw_short(2), 64)
    torch.manual_seed(1)
    ours, others = found(compiled, batch), found(compiled, batch)
    torch.manual_seed(1)
    exact = found(objective, batch)
    assert max(errors(ours, exact).values()) < 1e-6
    assert min(errors(others, exact).values()) > 1e-4


@mark.parametrize("maker", ["AuthenticAMD", "GenuineIntel"])
@mark.parametrize("before", ["highest", "high"])
def test_quickened_products_stay_fp32(maker: str, before: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(process, "read_cpu_info", lambda: f"vendor_id : {maker}")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(before)
    process.choose_matmul_library()
    if (maker, before) != ("AuthenticAMD", "highest"):
        assert torch.get_float32_matmul_precision() == before
    for rows, inner, columns in ((1, 512, 40), (513, 64, 257)):
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        exact = a.double() @ b.double()
        for ours in (a @ b, (b.T @ a.T).T, torch.bmm(a[None], b[None])[0]):
            assert before == "high" or (ours - exact).norm() / exact.norm() < 1e-6


@mark.parametrize("is_able", [True, False])
def test_a_gpu_runs_compiled_code_where_its_kernels_can(
    is_able: bool, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    """Both of them: without attention's the loss's need not be tried."""
    tried: list[tuple[object, ...]] = []

    def can(*given: object) -> bool:
        tried.append(given)
        return is_able or len(tried) == 1  # the loss fails, not attention

    for name, value in (("triton", object()), ("can_attend", can), ("can_compute_loss", can)):
        monkeypatch.setattr(recorded_replica, name, value)
    gpu, training = World(0, 1, torch.device("cuda")), TrainingConfig(precision="fp32")
    model = replace(POST, d_k=24, attention_dropout=0.1)
    assert recorded_replica.has_fixed_shape(model, training, gpu) == is_able
    exact = gpu.device, torch.float32
    assert tried == [(*exact, 24, POST.value_size), exact]
    assert read_stderr(capsys) == ""
    assert not recorded_replica.has_fixed_shape(replace(POST, d_k=129), training, gpu)
    assert "at most 128" in read_stderr(capsys) and len(tried) == 2
