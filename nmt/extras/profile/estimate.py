"""What a whole run will take, in hours, memory and money, before it begins: `nmt-train --plan`.

An estimate is made of what was measured: the micro-batches that need most memory, and half a minute
of typical updates. What could not be measured is listed as not included.
"""

import itertools
import math
from dataclasses import dataclass

from nmt.data.loader import MicroBatch, Update
from nmt.data.plan import Cursor
from nmt.extras.profile.cost import AVERAGE_BYTES, CHECKPOINT_BYTES
from nmt.extras.profile.dry_run import (
    DryRun,
    Timing,
    describe_machine,
    format_bytes,
    format_rows,
)
from nmt.system.progress import format_duration
from nmt.train.memory_probe import make_full_batch, order_by_memory
from nmt.train.setup import Setup

TIMED_S = 35.0
# Bytes a second that sums over ranks reach: of eight GPUs in one machine, and between machines
NETWORKS = {"NVLink (H100)": 370e9, "100 Gb/s Ethernet": 11e9}


@dataclass(frozen=True)
class Estimate:
    setup: Setup
    # Bytes, on the main rank: of the longest sentences, the most sentences, typical updates
    peaks: tuple[int, int, int]
    timing: Timing  # of typical updates
    validation_s: float  # of the NLL and the BLEU of the dev set, once
    price: float | None  # of an hour

    @property
    def tgt_tokens(self) -> float:
        """Target tokens of the whole run."""
        return self.setup.config.training.steps * self.timing.n_tgt / self.timing.n_updates

    @property
    def epochs(self) -> float:
        tgt, mixture = self.setup.store.tgt, self.setup.mixture
        n_tokens = tgt.n_tokens if mixture is None else mixture.count_tokens(tgt.lengths)
        return self.tgt_tokens / n_tokens

    @property
    def n_validations(self) -> int:
        training = self.setup.config.training
        return math.ceil(training.steps / training.validate_every)

    @property
    def updates_s(self) -> float:
        return self.setup.config.training.steps * self.timing.mean_s

    @property
    def validations_s(self) -> float:
        return self.n_validations * self.validation_s

    @property
    def hours(self) -> float:
        return (self.updates_s + self.validations_s) / 3600

    def table(self) -> str:
        setup, training = self.setup, self.setup.config.training
        longest, most, typical = map(format_bytes, self.peaks)
        parameter_bytes = CHECKPOINT_BYTES + (0 if training.ema is None else AVERAGE_BYTES)
        checkpoint_bytes = parameter_bytes * setup.n_weights
        rows = {
            "on": describe_machine(setup),
            "peak memory": f"{longest} after the longest sentences, {most} after the most sentences in "
            f"a micro-batch, {typical} in typical updates",
            "update": f"{self.timing.mean_s:.3f} s, mean of {self.timing.n_updates}",
            "recipe": f"{training.steps:,} updates, {self.epochs:.2f} epochs, "
            f"{self.tgt_tokens / 1e6:,.1f}M target tokens",
            "time": f"{self.hours:,.2f} h = {self.hours / 24:,.2f} days: "
            f"updates {format_duration(self.updates_s)}, the dev set {self.n_validations:,} times, "
            f"each translation as long as its source, {format_duration(self.validations_s)}",
            "not included": "writing checkpoints of "
            f"{format_bytes(checkpoint_bytes)}, preparing the data, starting",
        }
        if setup.world.size > 1:
            rows["network"] = describe_network(setup.replica.network_bytes)
        if self.price is not None:
            rows["price"] = f"{self.hours * self.price:,.2f} at {self.price:,.2f} an hour"
        return format_rows(rows)


def describe_network(n_bytes: float) -> str:
    """Say what an update costs the network, as far as no computation hides it."""
    times = [f"{1000 * n_bytes / speed:,.1f} ms over {name}" for name, speed in NETWORKS.items()]
    return (
        f"each rank sends and receives {format_bytes(n_bytes)} in an update: {' or '.join(times)}, "
        "part of it behind the computation"
    )


def estimate_run(dry_run: DryRun, price: float | None = None) -> Estimate:
    """Run the largest micro-batches, time typical updates, and print what the whole run takes from its
    first update on.
    """
    world = dry_run.world
    largest = _measure_peaks(dry_run)
    with dry_run.updates() as updates:
        timing = dry_run.run_for(updates, TIMED_S, "typical updates")

    peaks = (*largest, timing.peak)
    validation_s = world.broadcast(dry_run.dev_seconds() + dry_run.decoding_seconds())
    result = Estimate(dry_run.setup, peaks, timing, validation_s, price)
    if world.is_main:
        print(result.table())
    return result


def _measure_peaks(dry_run: DryRun) -> tuple[int, int]:
    """Return the peak memory of updates of the longest sentences, and of the most sentences."""
    setup = dry_run.setup
    peaks = []
    for order in order_by_memory(setup.store):
        batch = make_full_batch(setup.store, order, setup.micro_tokens, setup.shape)
        batch = batch.to(setup.world.device)
        update = Update([MicroBatch(0, batch)], batch.src.n_live, batch.n_tokens, Cursor())
        # Two updates, because the optimizer allocates its moments at the end of the first.
        twice = itertools.repeat(update)
        peaks.append(dry_run.run(twice, 2, "largest micro-batches").peak)
    longest, most = peaks
    return longest, most
