"""Where the time of an update goes: `nmt-train --profile`.

Speeds come from updates without a profiler, after those that compile. Only the shares of the parts
come from a few further updates with it: on CPU by the time of operations, on a GPU by that of kernels. The
parts always sum to the update.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from nmt.config import RunConfig
from nmt.data.loader import Loader
from nmt.profile.cost import TRAINING_BYTES, count_flop, measure_ceiling
from nmt.profile.dry_run import (
    DryRun,
    Timing,
    describe_machine,
    format_bytes,
    format_rows,
    open_dry_run,
)
from nmt.profile.time_by_part import sum_kernels, sum_operations
from nmt.system.files import check_writable, refuse_run_file, sync_to_disk
from nmt.system.ranks import World
from nmt.train.setup import Setup

PROFILED_MICROS = 12  # micro-batches of some 10,000 events, each of which must be read
WAITING, IDLE = "waiting for data", "GPU idle"


@dataclass(frozen=True)
class Profile:
    setup: Setup
    timing: Timing
    parts: dict[str, float]  # ms of an update
    flop_per_s: float  # of the model, over all ranks
    ceiling: float  # operations per second of all ranks' matrix products

    def table(self) -> str:
        setup, timing = self.setup, self.timing
        took = sum(timing.seconds)
        rows = {
            "on": describe_machine(setup),
            "model": f"{setup.n_weights / 1e6:.1f}M parameters; weights, gradients and Adam's moments "
            f"take {format_bytes(TRAINING_BYTES * setup.n_weights)}",
            "target tokens/s": f"{timing.n_tgt / took:,.0f}",
            "source tokens/s": f"{timing.n_src / took:,.0f}",
            "updates/s": f"{1 / timing.mean_s:.3f}, mean of {timing.n_updates} updates",
            "model speed": f"{_format_speed(self.flop_per_s)}, {self.flop_per_s / self.ceiling:.1%} of "
            f"the {_format_speed(self.ceiling)} that products of these shapes reach here",
            "peak memory": format_bytes(timing.peak),
        }
        update_ms = 1000 * timing.mean_s
        lines = [format_rows(rows), "", f"{'part of an update':<26} {'ms':>9} {'%':>6}"]
        by_size = sorted(self.parts.items(), key=lambda item: -item[1])
        for part, ms in [*by_size, ("update", update_ms)]:
            lines.append(f"{part:<26} {ms:>9,.1f} {100 * ms / update_ms:>6.1f}")
        return "\n".join(lines)


def profile_training(
    config: RunConfig, world: World, seconds: float = 30.0, trace: Path | None = None
) -> Profile:
    """Time updates for about that long and print where the time went.

    `trace` is a file to write for chrome://tracing or Perfetto.
    """
    if trace is not None:
        world.on_main(lambda: refuse_run_file(trace))
        world.on_main(lambda: check_writable(trace))
    dry_run = open_dry_run(config, world)
    setup = dry_run.setup
    with dry_run.updates() as updates:
        timing = dry_run.run_for(updates, seconds, "timing")
        parts = _measure_parts(dry_run, updates, timing, trace)

    mean_lengths = [float(side.lengths.mean()) for side in (setup.store.src, setup.store.tgt)]
    flop = count_flop(config.model, setup.model.n_vocab, *mean_lengths)
    rows = min(setup.micro_tokens, timing.n_tgt // timing.n_updates)
    dtype = torch.bfloat16 if setup.config.training.precision == "bf16" else torch.float32
    ceiling = measure_ceiling(config.model, rows, dtype, world.device)
    result = Profile(
        setup=setup,
        timing=timing,
        parts=parts,
        flop_per_s=(flop.src * timing.n_src + flop.tgt * timing.n_tgt) / sum(timing.seconds),
        ceiling=world.sum(torch.tensor(ceiling, dtype=torch.float64)).item(),
    )
    if world.is_main:
        print(result.table())
    return result


def _measure_parts(
    dry_run: DryRun, updates: Loader, timing: Timing, trace: Path | None
) -> dict[str, float]:
    """Return the ms of each part of an update, scaled to its time without a profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports its own start and end
    world = dry_run.world
    tokens = PROFILED_MICROS * dry_run.setup.micro_tokens * world.size
    n = min(3, max(1, tokens // dry_run.setup.config.training.tgt_tokens))
    is_cuda = world.device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        dry_run.run(updates, n, "profiling")
    if trace is not None and world.is_main:
        _write_trace(profiler, trace)

    events = list(profiler.events())
    if is_cuda:
        # Kernels take as long under a profiler as without. In the rest of an update the GPU has no work.
        seconds = sum_kernels(events)
        busy_s = min(timing.mean_s, sum(seconds.values()) / n)
        left_over = IDLE
    else:
        # The profiler slows every operation alike, but not the waiting.
        seconds = sum_operations(events)
        busy_s = timing.mean_s - timing.waited_s / timing.n_updates
        left_over = WAITING
    scale = busy_s / max(sum(seconds.values()), 1e-9)
    parts = {part: 1000 * scale * took for part, took in seconds.items()}
    parts[left_over] = 1000 * (timing.mean_s - busy_s)
    return parts


def _write_trace(profiler: torch.profiler.profile, trace: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".trace.", dir=trace.parent) as folder:
        complete = Path(folder, trace.name)  # torch compresses a name that ends in .gz
        profiler.export_chrome_trace(str(complete))
        sync_to_disk(complete)
        os.replace(complete, trace)
    sync_to_disk(trace.parent)


def _format_speed(flop_per_s: float) -> str:
    if flop_per_s >= 1e12:
        return f"{flop_per_s / 1e12:,.1f} TFLOP/s"
    return f"{flop_per_s / 1e9:,.1f} GFLOP/s"
