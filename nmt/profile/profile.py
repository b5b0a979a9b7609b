"""Where the time of an update goes, and what a whole recipe will take: `nmt-train --profile` and `--plan`.

Speeds come from updates without a profiler, after those that compile; only their division into parts comes from a few
more with it, on CPU by the time of operations and on a GPU by that of kernels. What belongs to no part is `other`, so
the parts always sum to the update. A plan is made of what was measured; what could not be is named as not included.
"""

import contextlib
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from nmt.config import RunConfig
from nmt.data.loader import Loader
from nmt.model.attention_choice import cache_file, measure
from nmt.profile.cost import Footprint, ceiling, flop_per_token, footprint
from nmt.profile.dry_run import Rehearsal, Timing
from nmt.profile.parts import (
    IDLE,
    OTHER,
    PARTS,
    WAITED,
    seconds_of_kernels,
    seconds_of_parts,
    told_apart,
)
from nmt.system.errors import UserError
from nmt.system.files import check_writable, sync_to_disk
from nmt.system.progress import format_duration, say
from nmt.system.ranks import World
from nmt.train.memory_probe import load_excerpt, order_by_memory, resolve_micro_tokens

PROFILED_MICROS = 12  # of some 10,000 events, each of which must be read
PLANNED_S = 35.0


@dataclass(frozen=True)
class Profile:
    where: str  # device, ranks, threads, precision, version
    updates: int
    update_ms: float
    parts: dict[str, float]  # ms of an update
    slowdown: float  # by the profiler, which only the parts have seen
    src_tokens_per_s: float  # without padding, over all ranks
    tgt_tokens_per_s: float
    row_fill: float  # share of the rows of tokens that hold one
    grid_fill: float  # share that would, were each micro-batch padded to its longest sentence
    flop_per_s: float  # of the model, over all ranks
    ceiling: float  # operations per second of all ranks' matrix products
    peak: int  # bytes
    state: Footprint

    def table(self) -> str:
        state = self.state
        figures = {
            "on": self.where,
            "model": f"{state.parameters / 1e6:.1f}M parameters: weights {_bytes(state.weights)}, gradients "
            f"{_bytes(state.gradients)}, Adam {_bytes(state.adam)}",
            "target tokens/s": f"{self.tgt_tokens_per_s:,.0f}",
            "source tokens/s": f"{self.src_tokens_per_s:,.0f}",
            "updates/s": f"{1000 / self.update_ms:.3f}, mean of {self.updates} updates",
            "fill": f"{self.row_fill:.1%} as packed, {self.grid_fill:.1%} were each micro-batch padded to its longest",
            "model speed": f"{_speed(self.flop_per_s)}, {self.flop_per_s / self.ceiling:.1%} of the "
            f"{_speed(self.ceiling)} that products of these shapes reach here",
            "peak memory": _bytes(self.peak),
        }
        lines = [f"{name:<16} {text}" for name, text in figures.items()]
        lines += ["", f"{'part of an update':<26} {'ms':>9} {'%':>6}"]
        rows = [*self.parts.items(), ("update", self.update_ms)]
        lines += [f"{name:<26} {ms:>9,.1f} {100 * ms / self.update_ms:>6.1f}" for name, ms in rows]
        return "\n".join(
            [*lines, f"(parts from updates under a profiler, {self.slowdown:.2f} times as long)"]
        )


def profile(
    config: RunConfig, world: World, seconds: float = 30.0, trace: Path | None = None
) -> Profile:
    """Time updates for about so long and print where the time went; `trace` is for chrome://tracing or Perfetto."""
    if trace is not None:
        world.on_main(lambda: check_writable(trace))
    micro_tokens = resolve_micro_tokens(config, world)
    if world.device.type == "cuda" and config.training.precision == "bf16":
        world.on_main(lambda: _choose_attention(config, micro_tokens, world))
    rehearsal = Rehearsal(config, micro_tokens, world)
    with rehearsal.updates() as updates:
        timing = rehearsal.run_for(updates, seconds, "timing")
        parts, slowdown = _divide(rehearsal, updates, timing, trace)
    src_lengths, tgt_lengths = rehearsal.store.src.lengths, rehearsal.store.tgt.lengths
    flop = flop_per_token(
        config.model, rehearsal.vocab.size, float(src_lengths.mean()), float(tgt_lengths.mean())
    )
    took = sum(timing.seconds)
    rows = min(micro_tokens, timing.n_tgt // len(timing.seconds))
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    reached = torch.tensor(ceiling(config.model, rows, dtype, world.device), dtype=torch.float64)
    result = Profile(
        _where(config, world),
        len(timing.seconds),
        1000 * timing.mean_s,
        parts,
        slowdown,
        timing.n_src / took,
        timing.n_tgt / took,
        timing.live / timing.rows,
        timing.live / timing.cells,
        (flop.src * timing.n_src + flop.tgt * timing.n_tgt) / took,
        world.sum(reached).item(),
        timing.peak,
        footprint(rehearsal.model),
    )
    if world.is_main:
        print(result.table())
    return result


def _choose_attention(config: RunConfig, micro_tokens: int, world: World) -> None:
    """Find out which attention is faster on this GPU; training goes by that from now on."""
    model = config.model
    path = measure(world.device, micro_tokens, model.n_heads, model.key_size, model.value_size)
    say(f"attention: {path} is the fastest here, which is remembered in {cache_file()}")


def _divide(
    rehearsal: Rehearsal, updates: Loader, timing: Timing, trace: Path | None
) -> tuple[dict[str, float], float]:
    """The ms of each part of a plain update, and how many times as long one takes under the profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell of its own start and end
    training, world = rehearsal.config.training, rehearsal.world
    is_cuda = world.device.type == "cuda"
    tokens = PROFILED_MICROS * rehearsal.micro_tokens * world.size
    n = min(3, max(1, tokens // training.tgt_tokens))
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda]
    ranges = contextlib.nullcontext() if is_cuda else told_apart(rehearsal.objective)
    with ranges, torch.profiler.profile(activities=activities) as profiler:
        profiled = rehearsal.run(updates, n, "profiling")
    if trace is not None and world.is_main:
        _export(profiler, trace)
    events, whole = list(profiler.events()), timing.mean_s
    if is_cuda:
        parts = _shares_of_gpu(seconds_of_kernels(events), n, whole)
    else:
        parts = _shares_of_cpu(
            seconds_of_parts(events), n, whole, timing.waited_s / len(timing.seconds)
        )
    return {part: 1000 * took for part, took in parts.items()}, profiled.mean_s / whole


def _shares_of_gpu(spent: dict[str, float], n: int, whole: float) -> dict[str, float]:
    """Seconds of each part of an update: kernels take under a profiler what they always take, and the rest is idle."""
    busy = sum(spent.values()) / n
    scale = min(1.0, whole / max(busy, 1e-9))
    parts = {part: scale * took / n for part, took in spent.items()}
    return parts | {IDLE: whole - sum(parts.values())}


def _shares_of_cpu(
    spent: dict[str, float], n: int, whole: float, waited: float
) -> dict[str, float]:
    """Seconds of each part of an update: the profiler slows every operation alike."""
    busy = sum(spent.values()) / n
    scale = (whole - waited) / busy
    parts = {part: scale * spent[part] / n for part in PARTS} | {WAITED: waited}
    parts[OTHER] += whole - sum(parts.values())
    return parts


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # an ending .gz asks for a packed one
    try:
        profiler.export_chrome_trace(str(temporary))
        sync_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_to_disk(path.parent)


@dataclass(frozen=True)
class Worst:
    """A micro-batch that needs much memory."""

    pairs: int
    n_src: int
    n_tgt: int
    seconds: float  # as an update of its own
    peak: int  # bytes


@dataclass(frozen=True)
class Plan:
    where: str
    worst: tuple[Worst, ...]  # the longest sentences, the most sentences; known to the main rank
    timed: int  # updates
    median_s: float
    p90_s: float
    peak: int
    updates: int  # of the whole recipe
    src_tokens: float
    tgt_tokens: float
    epochs: float
    updates_h: float
    validations: int
    validations_h: float  # without decoding
    checkpoints: int
    checkpoint_bytes: int
    price: float | None  # of an hour

    @property
    def hours(self) -> float:
        return self.updates_h + self.validations_h

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.hours * self.price

    def table(self) -> str:
        figures = {"on": self.where}
        for name, w in zip(("longest", "most sentences"), self.worst, strict=False):
            figures[name] = (
                f"{w.pairs:,} pairs, {w.n_src:,} + {w.n_tgt:,} tokens in one micro-batch: "
                f"{w.seconds:.3f} s, peak memory by then {_bytes(w.peak)}"
            )
        figures |= {
            "update": f"median {self.median_s:.3f} s, nine in ten within {self.p90_s:.3f} s, of {self.timed}; "
            f"peak memory by then {_bytes(self.peak)}",
            "recipe": f"{self.updates:,} updates, {self.epochs:.2f} epochs, {self.src_tokens / 1e6:,.1f}M source and "
            f"{self.tgt_tokens / 1e6:,.1f}M target tokens",
            "time": f"{self.hours:,.2f} h = {self.hours / 24:,.2f} days: updates {format_duration(3600 * self.updates_h)}, "
            f"NLL of the dev set {self.validations:,} times {format_duration(3600 * self.validations_h)}",
            "not included": f"decoding the dev set for BLEU, writing {self.checkpoints:,} checkpoints of "
            f"{_bytes(self.checkpoint_bytes)}, preparing the data, starting",
        }
        if self.cost is not None:
            figures["price"] = f"{self.cost:,.2f} at {self.price:,.2f} an hour"
        return "\n".join(f"{name:<16} {text}" for name, text in figures.items())


def plan(config: RunConfig, world: World, price: float | None = None) -> Plan:
    """Try what needs most memory, time updates, and print what the whole recipe takes, from its first update on."""
    micro_tokens = resolve_micro_tokens(config, world)
    rehearsal, training = Rehearsal(config, micro_tokens, world), config.training
    if training.shard and world.size > 1:
        raise UserError(
            "training.shard: --plan has one rank try the worst alone, which has but a share; use --profile"
        )
    store, worst = rehearsal.store, list[Worst]()

    def try_worst() -> None:
        for order in order_by_memory(store):
            loader, pairs = load_excerpt(store, order, micro_tokens, world.device, rehearsal.shape)
            with loader:
                two = rehearsal.run(loader, 2, "worst micro-batches", is_alone=True)
            worst.append(Worst(pairs, two.n_src // 2, two.n_tgt // 2, two.seconds[-1], two.peak))

    world.on_main(try_worst)
    with rehearsal.updates() as updates:
        timing = rehearsal.run_for(updates, PLANNED_S, "typical updates")
    state, timed = footprint(rehearsal.model), len(timing.seconds)
    updates_h = training.steps * timing.mean_s / 3600
    validations = -(-training.steps // training.validate_every)
    checkpoints = training.steps // (training.checkpoint_every or training.steps)
    if training.checkpoint_minutes is not None:
        checkpoints += int(60 * updates_h / training.checkpoint_minutes)
    result = Plan(
        _where(config, world),
        tuple(worst),
        timed,
        statistics.median(timing.seconds),
        float(np.quantile(timing.seconds, 0.9)),
        timing.peak,
        training.steps,
        training.steps * timing.n_src / timed,
        training.steps * timing.n_tgt / timed,
        training.steps * timing.n_tgt / timed / store.tgt.n_tokens,
        updates_h,
        validations,
        validations * world.broadcast(rehearsal.dev_seconds()) / 3600,
        checkpoints,
        state.weights + state.adam,
        price,
    )
    if world.is_main:
        print(result.table())
    return result


def _where(config: RunConfig, world: World) -> str:
    is_cuda = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if is_cuda else "CPU"
    return (
        f"{world.size} x {device}, {config.training.precision}, threads {torch.get_num_threads()}, "
        f"torch {torch.__version__}{', BPE-dropout left out' if config.vocab.bpe_dropout else ''}"
    )


def _bytes(n: float) -> str:
    return f"{n / 1e9:,.2f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


def _speed(flop_per_s: float) -> str:
    return (
        f"{flop_per_s / 1e12:,.1f} TFLOP/s"
        if flop_per_s >= 1e12
        else f"{flop_per_s / 1e9:,.1f} GFLOP/s"
    )
