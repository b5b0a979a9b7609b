"""Where the time of an update goes: `nmt-train --profile`.

Speeds come from updates without a profiler, after those that compile. A few further updates run with
torch's profiler, which prints its table of operations, or on a GPU of kernels.
"""

import os

import torch
from torch.profiler import ProfilerActivity

from nmt.data.loader import Loader
from nmt.extras.profile.dry_run import (
    DryRun,
    Timing,
    describe_machine,
    format_bytes,
    format_rows,
)

PROFILED_MICROS = 12  # micro-batches of some 10,000 events, each of which must be read
N_OPERATIONS = 20  # that the table has
WIDEST_NAME = 60


def profile_training(dry_run: DryRun, seconds: float = 30.0) -> Timing:
    """Time updates for about that long and print where the time went."""
    with dry_run.updates() as updates:
        timing = dry_run.run_for(updates, seconds, "timing")
        operations = _list_operations(dry_run, updates)
    took = sum(timing.seconds)
    rows = {
        "on": describe_machine(dry_run.setup),
        "target tokens/s": f"{timing.n_tgt / took:,.0f}",
        "updates/s": f"{1 / timing.mean_s:.3f}, mean of {timing.n_updates} updates",
        "waiting for data": f"{timing.waited_s / took:.1%} of the time",
        "peak memory": format_bytes(timing.peak),
    }
    if dry_run.world.is_main:
        print(f"{format_rows(rows)}\n\n{operations}")
    return timing


def _list_operations(dry_run: DryRun, updates: Loader) -> str:
    """Return torch's table of what took longest, within itself, in a few updates."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports its own start and end
    world = dry_run.world
    tokens = PROFILED_MICROS * dry_run.setup.micro_tokens * world.size
    n = min(3, max(1, tokens // dry_run.setup.config.training.tgt_tokens))
    activities, order = [ProfilerActivity.CPU], "self_cpu_time_total"
    if world.device.type == "cuda":
        activities, order = [*activities, ProfilerActivity.CUDA], "self_device_time_total"
    # the threads of a CPU's workers, too
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=activities, experimental_config=everywhere) as profiler:
        dry_run.run(updates, n, "profiling")
    return profiler.key_averages().table(order, N_OPERATIONS, max_name_column_width=WIDEST_NAME)
