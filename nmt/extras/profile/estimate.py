"""What a whole run will take, in hours, memory and money, before it begins: `nmt-train --plan`.

An estimate is made of what was measured: the micro-batches that need most memory, and half a minute
of typical updates. What could not be measured is listed as not included.
"""

import math

from nmt.extras.profile.cost import CHECKPOINT_BYTES
from nmt.extras.profile.dry_run import DryRun, describe_machine, format_bytes, format_rows
from nmt.extras.profile.formats import describe_formats
from nmt.model.moments import WEIGHT_BYTES
from nmt.system.progress import format_duration
from nmt.train.memory_probe import order_by_memory

TIMED_S = 35.0
# Bytes a second that sums over ranks reach: of eight GPUs in one machine, and between machines
NETWORKS = {"NVLink (H100)": 370e9, "100 Gb/s Ethernet": 11e9}


def describe_network(n_bytes: float) -> str:
    """Say what an update costs the network, as far as no computation hides it."""
    times = [f"{1000 * n_bytes / speed:,.1f} ms over {name}" for name, speed in NETWORKS.items()]
    return (
        f"each rank sends and receives {format_bytes(n_bytes)} in an update: {' or '.join(times)}, "
        "part of it behind the computation"
    )


def estimate_run(dry_run: DryRun, price: float | None = None) -> dict[str, str]:
    """Run the largest micro-batches, time typical updates, and print what the whole run takes from its
    first update on.
    """
    setup, world = dry_run.setup, dry_run.world
    training = setup.config.training
    peak = _measure_peak(dry_run)
    with dry_run.updates() as updates:
        timing = dry_run.run_for(updates, TIMED_S, "3 of 3, typical updates")
    validation_s = world.broadcast(dry_run.dev_seconds() + dry_run.decoding_seconds())

    n_validations = math.ceil(training.steps / training.validate_every)
    updates_s, validations_s = training.steps * timing.mean_s, n_validations * validation_s
    hours = (updates_s + validations_s) / 3600
    tgt_tokens = training.steps * timing.n_tgt / timing.n_updates
    tgt, mixture = setup.store.tgt, setup.mixture
    epochs = tgt_tokens / (tgt.n_tokens if mixture is None else mixture.count_tokens(tgt.lengths))
    parameter_bytes = CHECKPOINT_BYTES + (0 if training.ema is None else WEIGHT_BYTES)
    rows = {
        "on": describe_machine(setup),
        "peak memory": f"{format_bytes(max(peak, timing.peak))}, the largest micro-batches included",
        "update": f"{timing.mean_s:.3f} s, mean of {timing.n_updates}",
        "recipe": f"{training.steps:,} updates, {epochs:.2f} epochs, {tgt_tokens / 1e6:,.1f}M target tokens",
        "time": f"{hours:,.2f} h = {hours / 24:,.2f} days: updates {format_duration(updates_s)}, the dev "
        f"set {n_validations:,} times, each translation as long as its source, "
        f"{format_duration(validations_s)}",
        "exports": describe_formats(setup.config.model),
        "not included": "writing checkpoints of "
        f"{format_bytes(parameter_bytes * setup.n_weights)}, preparing the data, starting",
    }
    if world.size > 1:
        rows["network"] = describe_network(setup.replica.network_bytes)
    if price is not None:
        rows["price"] = f"{hours * price:,.2f} at {price:,.2f} an hour"
    if world.is_main:
        print(format_rows(rows))
    return rows


def _measure_peak(dry_run: DryRun) -> int:
    """Return the peak memory of updates of the longest sentences and of the most sentences."""
    setup = dry_run.setup
    longest, most = order_by_memory(setup.store)
    peaks = [
        # a single pair first, because the optimizer allocates its moments at the end of an update
        dry_run.run_batch(longest, 1, "starting"),
        dry_run.run_batch(longest, setup.micro_tokens, "1 of 3, the longest sentences"),
        dry_run.run_batch(most, setup.micro_tokens, "2 of 3, the most sentences"),
    ]
    return max(peaks)
