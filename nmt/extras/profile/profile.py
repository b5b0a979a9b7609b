"""Where the time of an update goes: `nmt-train --profile`.

Speeds come from updates without a profiler, after those that compile. A few further updates run with
torch's profiler, which prints its table of operations, or on a GPU of kernels.
"""

import os
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity

from nmt.data.loader import Loader
from nmt.extras.profile.cost import TRAINING_BYTES, count_flop, measure_ceiling
from nmt.extras.profile.dry_run import (
    DryRun,
    Timing,
    describe_machine,
    format_bytes,
    format_rows,
)
from nmt.train.setup import Setup

PROFILED_MICROS = 12  # micro-batches of some 10,000 events, each of which must be read
N_OPERATIONS = 20  # that the table has
WIDEST_NAME = 60


@dataclass(frozen=True)
class Profile:
    setup: Setup
    timing: Timing
    operations: str  # torch's table
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
            "waiting for data": f"{timing.waited_s / took:.1%} of the time",
            "model speed": f"{_format_speed(self.flop_per_s)}, {self.flop_per_s / self.ceiling:.1%} of "
            f"the {_format_speed(self.ceiling)} that products of these shapes reach here",
            "peak memory": format_bytes(timing.peak),
        }
        return f"{format_rows(rows)}\n\n{self.operations}"


def profile_training(dry_run: DryRun, seconds: float = 30.0) -> Profile:
    """Time updates for about that long and print where the time went."""
    setup, world = dry_run.setup, dry_run.world
    with dry_run.updates() as updates:
        timing = dry_run.run_for(updates, seconds, "timing")
        operations = _list_operations(dry_run, updates)

    mean_lengths = [float(side.lengths.mean()) for side in (setup.store.src, setup.store.tgt)]
    flop = count_flop(setup.config.model, setup.model.n_vocab, *mean_lengths)
    rows = min(setup.micro_tokens, timing.n_tgt // timing.n_updates)
    dtype = torch.bfloat16 if setup.config.training.precision == "bf16" else torch.float32
    ceiling = measure_ceiling(setup.config.model, rows, dtype, world.device)
    result = Profile(
        setup=setup,
        timing=timing,
        operations=operations,
        flop_per_s=(flop.src * timing.n_src + flop.tgt * timing.n_tgt) / sum(timing.seconds),
        ceiling=world.sum(torch.tensor(ceiling, dtype=torch.float64)).item(),
    )
    if world.is_main:
        print(result.table())
    return result


def _list_operations(dry_run: DryRun, updates: Loader) -> str:
    """Return torch's table of what took longest, within itself, in a few updates."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports its own start and end
    world = dry_run.world
    tokens = PROFILED_MICROS * dry_run.setup.micro_tokens * world.size
    n = min(3, max(1, tokens // dry_run.setup.config.training.tgt_tokens))
    activities, order = [ProfilerActivity.CPU], "self_cpu_time_total"
    if world.device.type == "cuda":
        activities, order = [*activities, ProfilerActivity.CUDA], "self_device_time_total"
    with torch.profiler.profile(activities=activities) as profiler:
        dry_run.run(updates, n, "profiling")
    return profiler.key_averages().table(order, N_OPERATIONS, max_name_column_width=WIDEST_NAME)


def _format_speed(flop_per_s: float) -> str:
    if flop_per_s >= 1e12:
        return f"{flop_per_s / 1e12:,.1f} TFLOP/s"
    return f"{flop_per_s / 1e9:,.1f} GFLOP/s"
