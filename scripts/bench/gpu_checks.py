"""Is what a GPU computes right? The checks of first_gpu.py, each a function of a bench and a sheet.

A check writes what it measures onto its sheet, beside what is asked of it, and goes on: so a page
shows all that does not hold. Its docstring opens its section of the page. Truth is float64 written
out, the CPU's path with the same weights, or the same work done another way. Data are made: random
ids, of which low ones are frequent, in sentences as long as those of news.
"""

import inspect
import json
import math
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from machine import describe_machine
from safetensors.torch import load_file
from torch import Tensor

from nmt.commands import train as train_command
from nmt.config import Grouping, ModelConfig, TrainingConfig
from nmt.data.batch import Batch, BatchShape
from nmt.data.loader import make_batch
from nmt.data.plan import choose_shape, plan_epoch
from nmt.data.store import Side, TokenStore
from nmt.engines.choice import choose_backend
from nmt.engines.cuda import recorded_replica
from nmt.engines.cuda.recorded_replica import RecordedReplica
from nmt.model.backend import use_backend
from nmt.model.transformer import Transformer
from nmt.system.device import choose_device, name_machine, read_driver_version
from nmt.system.ranks import World
from nmt.system.run_folder import MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, RunFolder
from nmt.train.events import TrainEvent, read_events
from nmt.train.loss import Objective
from nmt.train.replica import Replica

Precision = Literal["fp32", "bf16"]
ROOT = Path(__file__).resolve().parents[2]
NAN = float("nan")
CPU = torch.device("cpu")
MOST_NAMED = 3  # faults in a verdict
LEARNED = 0.98  # of the first loss

# Bounds. A relative error is that of the 2-norm. fp32 without TF32 stays below 1e-5 by far, TF32
# would give 1e-3; bf16 keeps 8 bits, so one rounding is up to 4e-3. The gradients of whole models
# are coarser: where the input of a ReLU is nearly 0, the last bit decides its sign, and one such
# element among a million was seen to make 3e-5 in fp32.
EXACT, ROUNDED_SUMS = 1e-5, 3e-3
GRADIENT_BOUNDS: dict[Precision, float] = {"fp32": 2e-4, "bf16": 6e-2}
WORST_GRADIENT_BOUNDS: dict[Precision, float] = {"fp32": 3e-3, "bf16": 0.25}


class Skip(Exception):
    """The check cannot be carried out here; the text says why."""


@dataclass
class Sheet:
    """What a check has found: rows of what was asked, further tables, and notes."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def bound(self, what: str, value: float, most: float) -> None:
        """`value` must be at most so much; NaN is not."""
        self._judge(what, f"{value:.2g}", f"at most {most:.2g}", bool(value <= most))

    def require(self, what: str, found: object, asked: object) -> None:
        self._judge(what, str(found), str(asked), bool(found == asked))

    def _judge(self, what: str, found: str, asked: str, holds: bool) -> None:
        self.rows.append({"what": what, "found": found, "asked": asked, "holds": holds})
        if not holds:
            tell("DOES NOT HOLD", what, found, asked)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        self.tables.append({"header": header, "rows": rows})

    def add_row(self, *cells: str) -> None:
        """Give the last table another row."""
        self.tables[-1]["rows"].append(list(cells))
        tell(*cells)

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def faults(self) -> list[str]:
        return [row["what"] for row in self.rows if not row["holds"]]


def tell(*cells: str) -> None:
    """At once, so that a check that hangs later has told what it found."""
    print(" | ".join(cells), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bench:
    """On what, and how large."""

    device: torch.device
    is_rehearsal: bool
    model: ModelConfig  # of the correctness checks
    n_vocab: int
    n_pairs: int
    longest: int  # pieces
    micro_tokens: int
    n_updates: int
    data: Path | None = None

    @property
    def world(self) -> World:
        return World(0, 1, self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def make_bench(is_rehearsal: bool, data: Path | None = None) -> Bench:
    if is_rehearsal:
        model = ModelConfig(d_model=32, d_ff=64, n_heads=2, n_layers=1)
        return Bench(
            CPU, True, model, n_vocab=200, n_pairs=80, longest=40, micro_tokens=256, n_updates=20
        )
    return Bench(
        choose_device("auto"),
        False,
        ModelConfig(d_model=256, d_ff=1024, n_heads=4, n_layers=2),
        n_vocab=2_000,
        n_pairs=600,
        longest=200,
        micro_tokens=1_024,
        n_updates=50,
        data=data,
    )


def describe_gpu(bench: Bench) -> dict[str, Any]:
    """What must be known of a machine before anything is checked."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = name_machine(bench.device, max(1, n_gpus))
    packages = [name for name in ("torch", "triton") if find_spec(name)]
    versions = describe_machine(*packages)
    if n_gpus:
        versions += f"; CUDA {torch.version.cuda}, {read_driver_version()}"
    return {
        "name": f"Rehearsal on {name}" if bench.is_rehearsal else name,
        "n_gpus": n_gpus,
        "versions": versions,
    }


def perform(check: Callable[[Bench, Sheet], None], bench: Bench) -> dict[str, Any]:
    """Carry out one check; whatever it raises is its own end and no other's."""
    sheet = Sheet()
    opening = inspect.getdoc(check) or ""
    tell(opening)
    try:
        with compiler_of(bench):
            check(bench, sheet)
    except Skip as skip:
        verdict, reason = "skipped", str(skip)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        verdict, reason = "crashed", f"{type(error).__name__}: {first_line}"
    else:
        verdict, reason = "passed", ""
        if sheet.faults:
            verdict, reason = "failed", shortened(sheet.faults)
    return {
        "verdict": verdict,
        "reason": reason,
        "opening": opening,
        "rows": sheet.rows,
        "tables": sheet.tables,
        "notes": sheet.notes,
    }


def shortened(faults: list[str]) -> str:
    """The first few; the check's own section shows all."""
    more = f"; and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
    return "; ".join(faults[:MOST_NAMED]) + more


@contextmanager
def compiler_of(bench: Bench) -> Iterator[None]:
    """A rehearsal compiles nothing, which for a CPU takes a minute and is not what is asked."""
    if not bench.is_rehearsal:
        yield
        return
    before = recorded_replica.BACKEND
    recorded_replica.BACKEND = "eager"
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        recorded_replica.BACKEND = before


@contextmanager
def traced_at_least(bench: Bench) -> Iterator[None]:
    """Where compilations are counted a rehearsal must have some: it traces code."""
    if not bench.is_rehearsal:
        yield
        return
    with torch.compiler.set_stance("default"):
        yield


# ---- made data ---------------------------------------------------------------------------------------------------


def news_lengths(n: int, longest: int, random: np.random.Generator) -> list[np.ndarray]:
    """Pieces of sources and targets: log-normal, 28 in the mean, targets 1.15 times as long."""
    spread = 0.6
    src = np.exp(random.normal(math.log(28) - spread**2 / 2, spread, n))
    tgt = src * random.normal(1.15, 0.12, n)
    return [side.round().clip(1, longest).astype(np.int64) for side in (src, tgt)]


def make_side(lengths: np.ndarray, n_vocab: int, random: np.random.Generator) -> Side:
    """Sentences of random ids; how frequent one is falls with its number, so that there is
    something to learn.
    """
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    rank = np.exp(random.random(int(offsets[-1])) * math.log(n_vocab - 4)).astype(np.int64)
    return Side((3 + rank).astype(np.uint16), offsets)


def make_store(n_pairs: int, n_vocab: int, longest: int) -> TokenStore:
    random = np.random.default_rng(1)
    src, tgt = news_lengths(n_pairs, longest, random)
    return TokenStore(make_side(src, n_vocab, random), make_side(tgt, n_vocab, random))


def bench_store(bench: Bench) -> TokenStore:
    return make_store(bench.n_pairs, bench.n_vocab, bench.longest)


def shape_for(store: TokenStore, micro_tokens: int, grouping: Grouping = "random") -> BatchShape:
    """The shape that nmt-train chooses. The grouping must be that of the updates: those of short
    sentences alone need room for more of them, and would be cut in two without it.
    """
    return choose_shape(store.src.lengths, store.tgt.lengths, micro_tokens, grouping=grouping)


def one_batch(bench: Bench) -> tuple[Batch, BatchShape]:
    """A micro-batch on the CPU, in the one shape, so with a dead tail and empty sentences."""
    store = bench_store(bench)
    shape = shape_for(store, bench.micro_tokens)
    plan = plan_epoch(
        store.src.lengths,
        store.tgt.lengths,
        1,
        0,
        TrainingConfig(src_tokens=bench.micro_tokens, tgt_tokens=bench.micro_tokens),
        bench.micro_tokens,
        shape,
    )
    return make_batch(store, plan.micros(0)[0], shape), shape


# ---- models ------------------------------------------------------------------------------------------------------


def make_objective(config: ModelConfig, n_vocab: int) -> Objective:
    """The same weights each time; biases and the scales of norms, which begin at 0 and 1, are moved
    to matter.
    """
    torch.manual_seed(0)
    model = Transformer(config, n_vocab)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return Objective(model, 0.1)


def make_replica(
    bench: Bench, precision: Precision, dropout: float, shape: BatchShape | None
) -> RecordedReplica:
    """The bench's model on its device; with a shape as compiled code, on a GPU as a CUDA graph."""
    torch.compiler.reset()  # each new model counts against the limit of recompilations
    objective = make_objective(replace(bench.model, dropout=dropout), bench.n_vocab).to(
        bench.device
    )
    if bench.is_cuda:  # what computes on a CPU cannot be compiled in one piece
        use_backend(objective, choose_backend("cuda"))
    return RecordedReplica(objective, bench.world, precision == "bf16", shape)


def has_graph(replica: Replica) -> bool:
    """Whether a CUDA graph was recorded. Where that fails, training goes on without and only says
    so.
    """
    recording = replica.recording if isinstance(replica, RecordedReplica) else None
    return recording is not None and recording.launch.__module__ == "nmt.engines.cuda.cuda_graph"


@dataclass
class Pass:
    """What a forward and backward pass gives, in float64 on the CPU."""

    sums: Tensor  # smoothed loss, NLL
    gradients: dict[str, Tensor]


def run_pass(replica: Replica, batch: Batch, seed: int = 0) -> Pass:
    replica.clear_gradients()
    device = next(replica.objective.parameters()).device
    sums = replica.run(batch.to(device), 1.0 / batch.n_tokens, seed)
    return Pass(sums.double().cpu(), gradients_of(replica))


def gradients_of(replica: Replica) -> dict[str, Tensor]:
    found = {}
    for name, p in replica.objective.named_parameters():
        if p.grad is not None:
            found[name] = p.grad.detach().to(CPU, torch.float64, copy=True)
    return found


def relative_error(ours: Tensor, exact: Tensor) -> float:
    difference = (ours.double() - exact.double()).norm()
    return (difference / exact.double().norm().clamp(min=1e-300)).item()


def gradient_error(ours: Pass, exact: Pass) -> float:
    """The error of all gradients taken as one."""
    if ours.gradients.keys() != exact.gradients.keys():
        return NAN
    both = []
    for gradients in (ours.gradients, exact.gradients):
        both.append(torch.cat([gradient.flatten() for gradient in gradients.values()]))
    return relative_error(both[0], both[1])


def worst_gradient(ours: Pass, exact: Pass) -> tuple[str, float]:
    """The tensor whose gradient is worst, and its error; NaN is worse than any number."""
    worst_name, worst = "", 0.0
    for name, gradient in exact.gradients.items():
        error = relative_error(ours.gradients[name], gradient)
        if not error <= worst:
            worst_name, worst = name, error
            if math.isnan(error):
                break
    return worst_name, worst


# ---- kernels -----------------------------------------------------------------------------------------------------

KERNEL_TESTS = ("tests/kernels/test_attention_triton.py", "tests/kernels/test_loss_triton.py")


def check_kernels(bench: Bench, sheet: Sheet) -> None:
    """The kernels' own tests, which compare with float64 written out: on a GPU, else interpreted."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rf", *KERNEL_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (done.stderr + done.stdout).splitlines()
    sheet.require("pytest's exit code", done.returncode, 0)
    for line in lines:
        if line.startswith("FAILED"):
            sheet.note(line)
    sheet.note(f"{' '.join(KERNEL_TESTS)}: {lines[-1]}")


# ---- one micro-batch ---------------------------------------------------------------------------------------------


def check_micro_batch(bench: Bench, sheet: Sheet) -> None:
    """The path that trains, and the plain one, against the CPU in float64 with the same weights."""
    batch, shape = one_batch(bench)
    config = replace(bench.model, dropout=0.0)
    exact = cpu_pass(config, bench.n_vocab, batch, torch.float64)
    on_cpu = cpu_pass(config, bench.n_vocab, batch, torch.float32)
    sheet.bound(
        "the CPU's own fp32: all gradients", gradient_error(on_cpu, exact), GRADIENT_BOUNDS["fp32"]
    )
    precisions: list[Precision] = ["fp32", "bf16"]
    for precision in precisions:
        replica = make_replica(bench, precision, 0.0, shape)
        compare_passes(sheet, f"compiled, {precision}", run_pass(replica, batch), exact, precision)
        if bench.is_cuda:
            sheet.require(f"compiled, {precision}: as a CUDA graph", has_graph(replica), True)
    other = replace(config, norm="pre", window=5, d_k=24, d_v=40, tied=False)
    exact_other = cpu_pass(other, bench.n_vocab, batch, torch.float64)
    for precision in precisions:
        found = plain_pass(bench, other, batch, precision)
        name = f"plain, pre-norm, window 5, keys of 24, values of 40, untied, {precision}"
        compare_passes(sheet, name, found, exact_other, precision)


def cpu_pass(config: ModelConfig, n_vocab: int, batch: Batch, dtype: torch.dtype) -> Pass:
    objective = make_objective(config, n_vocab).to(dtype)
    return run_pass(Replica(objective, World(0, 1, CPU), is_bf16=False), batch)


def plain_pass(bench: Bench, config: ModelConfig, batch: Batch, precision: Precision) -> Pass:
    objective = make_objective(config, bench.n_vocab).to(bench.device)
    return run_pass(RecordedReplica(objective, bench.world, precision == "bf16"), batch)


def compare_passes(sheet: Sheet, name: str, ours: Pass, exact: Pass, precision: Precision) -> None:
    is_rounded = precision == "bf16"
    sheet.bound(
        f"{name}: loss",
        relative_error(ours.sums, exact.sums),
        ROUNDED_SUMS if is_rounded else EXACT,
    )
    error = gradient_error(ours, exact)
    sheet.bound(f"{name}: all gradients", error, GRADIENT_BOUNDS[precision])
    worst_name, worst = worst_gradient(ours, exact)
    sheet.bound(f"{name}: worst, {worst_name}", worst, WORST_GRADIENT_BOUNDS[precision])


# ---- graph and dropout -------------------------------------------------------------------------------------------


def check_graph(bench: Bench, sheet: Sheet) -> None:
    """What is recorded once must do what the same code does when it is called, and draw dropout
    from the seed.
    """
    batch, shape = one_batch(bench)

    replica = make_replica(bench, "bf16", 0.0, shape)
    replayed = run_pass(replica, batch)
    zeros = [name for name, gradient in replayed.gradients.items() if not gradient.any()]
    sheet.require("gradients that are zero", len(zeros), 0)  # which would equal whatever is below
    compare_runs(sheet, "no dropout, a replay and a call", replayed, called_pass(replica, batch, 0))
    replica.clear_gradients()
    for _ in range(2):
        replica.run(batch.to(bench.device), 1.0 / batch.n_tokens, 0)
    halves = {name: gradient / 2 for name, gradient in gradients_of(replica).items()}
    sheet.bound(
        "two replays add up: error of half of it",
        gradient_error(Pass(replayed.sums, halves), replayed),
        EXACT,
    )

    replica = make_replica(bench, "bf16", 0.1, shape)
    first = run_pass(replica, batch, 1)
    if bench.is_cuda:
        sheet.require("a CUDA graph was recorded", has_graph(replica), True)
    compare_runs(sheet, "dropout, the same seed twice", run_pass(replica, batch, 1), first)
    other = run_pass(replica, batch, 2)
    sheet.require(
        "dropout, another seed: the same sums", torch.equal(first.sums, other.sums), False
    )
    anew = run_pass(make_replica(bench, "bf16", 0.1, shape), batch, 1)
    compare_runs(sheet, "dropout, a graph recorded anew", anew, first)


def compare_runs(sheet: Sheet, name: str, ours: Pass, other: Pass) -> None:
    """Sums must have the same bits. Gradients need not here: whether training repeats to the bit is
    asked of a whole run."""
    sheet.require(f"{name}: the same sums", torch.equal(ours.sums, other.sums), True)
    sheet.bound(f"{name}: error of gradients", gradient_error(ours, other), EXACT)


def called_pass(replica: RecordedReplica, batch: Batch, seed: int) -> Pass:
    """The compiled code, called and not replayed."""
    assert replica.compiled is not None
    replica.clear_gradients()
    scale = torch.full((), 1.0 / batch.n_tokens, device=next(replica.objective.parameters()).device)
    torch.manual_seed(seed)
    sums, gradients = replica.compute(replica.compiled, batch.to(scale.device), scale)
    replica.shares.add_gradients(gradients, is_first=True)
    return Pass(sums.double().cpu(), gradients_of(replica))


# ---- compilations ------------------------------------------------------------------------------------------------

N_LENGTHS = 20


def check_compilations(bench: Bench, sheet: Sheet) -> None:
    """Micro-batches of very short and of very long sentences have one shape, so one compilation
    serves all.
    """
    lengths = np.linspace(1, bench.longest, N_LENGTHS).round().astype(np.int64)
    n_of_each = [max(1, bench.micro_tokens // (int(length) + 1)) for length in lengths]
    random = np.random.default_rng(6)
    each = np.repeat(lengths, n_of_each)
    store = TokenStore(
        make_side(each, bench.n_vocab, random), make_side(each, bench.n_vocab, random)
    )
    shape = shape_for(store, bench.micro_tokens)
    replica = make_replica(bench, "bf16", 0.1, shape)
    before = n_graphs()
    after_first = before
    bounds = np.concatenate(([0], np.cumsum(n_of_each)))
    has_one_shape = True
    is_finite = True
    for number in range(N_LENGTHS):
        ids = np.arange(bounds[number], min(bounds[number + 1], bounds[number] + shape.sentences))
        batch = make_batch(store, ids, shape)
        has_one_shape = has_one_shape and batch.has_shape(shape)
        with traced_at_least(bench):
            sums = replica.run(batch.to(bench.device), 1.0, number)
        is_finite = is_finite and bool(sums.isfinite().all())
        if number == 0:
            after_first = n_graphs()
    sheet.require(f"sentences of 1 to {bench.longest} pieces: one shape", has_one_shape, True)
    sheet.require("all losses are finite", is_finite, True)
    sheet.require(
        f"compilations after the first of {N_LENGTHS} micro-batches", n_graphs() - after_first, 0
    )
    if bench.is_cuda:
        sheet.require("compilations in all", n_graphs() - before, 1)
        sheet.require("as one CUDA graph", has_graph(replica), True)


def n_graphs() -> int:
    from torch._dynamo.utils import counters  # a second of import

    return counters["stats"]["unique_graphs"]


# ---- whole runs of nmt-train -------------------------------------------------------------------------------------

# How far the loss of a token may be from the CPU's: rounding grows with each update.
LOSS_BOUNDS: dict[Precision, float] = {"fp32": 1e-3, "bf16": 3e-2}


def check_updates(bench: Bench, sheet: Sheet) -> None:
    """The losses that nmt-train logs on the embedded corpus, without dropout, whose masks differ on a GPU."""
    with tempfile.TemporaryDirectory() as name:
        expected = train_losses(bench, Path(name), "cpu", "fp32")
        rows = [["CPU, fp32", *ends(expected)]]
        for precision, most in LOSS_BOUNDS.items():
            found = train_losses(bench, Path(name), "auto", precision)
            rows.append([precision, *ends(found)])
            gap = (torch.tensor(found) - torch.tensor(expected)).abs().max().item()
            sheet.bound(f"{precision}: largest difference of a token's loss", gap, most)
    sheet.bound("the CPU's last loss over its first", expected[-1] / expected[0], LEARNED)
    sheet.table(["loss of a token", "first update", f"update {bench.n_updates}"], rows)


def train_losses(bench: Bench, folder: Path, device: str, precision: Precision) -> list[float]:
    """NLL a token of each update."""
    name = f"{device}-{precision}"
    more = {"device": device, "training.precision": precision, "model.dropout": 0}
    more |= {"optimizer.warmup_steps": 4 * bench.n_updates}
    train_demo(bench, folder, name, bench.n_updates, more)
    events, _ = read_events(RunFolder(folder / name).metrics)
    return [event.nll for event in events if isinstance(event, TrainEvent)]


def ends(losses: list[float]) -> list[str]:
    return [f"{losses[0]:.4f}", f"{losses[-1]:.4f}"]


def check_continuation(bench: Bench, sheet: Sheet) -> None:
    """Through nmt-train, on the embedded corpus: every tensor of the two checkpoints must have the
    same bits.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts, whole = (RunFolder(folder / run).checkpoints / "last" for run in ("parts", "whole"))
        train_demo(bench, folder, "parts", 10)
        before = load_file(parts / MODEL_FILE)
        train_demo(bench, folder, "parts", 20)
        train_demo(bench, folder, "whole", 20)
        after = load_file(whole / MODEL_FILE)
        n_moved = sum(not torch.equal(before[name], after[name]) for name in before)
        sheet.require("tensors of the model that updates 11 to 20 moved", n_moved, len(before))
        for file in (MODEL_FILE, OPTIMIZER_FILE):
            error = compare_files(parts / file, whole / file)
            sheet.bound(f"{file}: error of the worst tensor", error, 0.0)
        states = [json.loads((run / STATE_FILE).read_text()) for run in (parts, whole)]
        for key in ("step", "tokens_seen", "cursor"):
            sheet.require(f"state: {key}", states[0][key], states[1][key])


def compare_files(ours: Path, theirs: Path) -> float:
    """The error of the worst tensor: 0 if all have the same bits, NaN if the files have other
    tensors, or one is missing.
    """
    if not (ours.exists() and theirs.exists()):
        return NAN
    found, exact = load_file(ours), load_file(theirs)
    if found.keys() != exact.keys():
        return NAN
    errors = [relative_error(found[name], tensor) for name, tensor in exact.items()]
    return torch.tensor(errors).max().item()  # NaN is worse than any number


def list_demo_settings(bench: Bench, folder: Path, name: str, steps: int) -> dict[str, object]:
    """A run of `nmt-train --config demo.yaml` that scores nothing."""
    size = {"d_model": 128, "d_ff": 256, "n_heads": 2, "n_layers": 2}
    tokens = 4_096
    if bench.is_rehearsal:
        size = {"d_model": 32, "d_ff": 64, "n_heads": 2, "n_layers": 1}
        tokens = 512
    precision = "bf16" if bench.is_cuda else "fp32"
    settings: dict[str, object] = {
        "data.store": folder / "store",
        "out": folder / name,
        "data.workers": 1,
        "data.valid": "null",
        "data.test": "null",
        "vocab.size": 300,
        "training.steps": steps,
        "training.src_tokens": tokens,
        "training.tgt_tokens": tokens,
        "training.micro_tokens": tokens // 2,
        "training.precision": precision,
        "training.checkpoint_every": "null",
        "training.log_every": 1,
    }
    return settings | {f"model.{key}": value for key, value in size.items()}


def train_demo(
    bench: Bench, folder: Path, name: str, steps: int, more: dict[str, object] | None = None
) -> None:
    torch.compiler.reset()
    settings = list_demo_settings(bench, folder, name, steps) | (more or {})
    arguments = [f"{key}={value}" for key, value in settings.items()]
    code = train_command.main(["--config", "demo.yaml", *arguments])
    if code != 0:
        raise RuntimeError(f"nmt-train left with exit code {code}; it says why above")
