"""What a whole run will take, in hours, memory and money, before it begins: `nmt-train --plan`.

An estimate is made of what was measured: the micro-batches that need most memory, and half a minute
of typical updates. What could not be measured is listed as not included.
"""

from dataclasses import dataclass

import numpy as np

from nmt.config import RunConfig
from nmt.profile.cost import AVERAGE_BYTES, CHECKPOINT_BYTES, count_parameters
from nmt.profile.dry_run import DryRun, describe_machine, format_bytes, format_rows
from nmt.system.errors import UserError
from nmt.system.progress import format_duration
from nmt.system.ranks import World
from nmt.train.memory_probe import load_excerpt, order_by_memory, resolve_micro_tokens
from nmt.train.precision import resolve_precision

TIMED_S = 35.0


@dataclass(frozen=True)
class Estimate:
    machine: str
    # Bytes, on the main rank: of the longest sentences, the most sentences, typical updates
    peaks: tuple[int, int, int]
    update_s: float  # mean of the updates that were timed
    timed_updates: int
    updates: int  # of the whole run
    epochs: float
    tgt_tokens: float
    updates_h: float
    validations: int
    validations_h: float  # without decoding
    checkpoint_bytes: int
    price: float | None  # of an hour

    @property
    def hours(self) -> float:
        return self.updates_h + self.validations_h

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.hours * self.price

    def table(self) -> str:
        longest, most, typical = map(format_bytes, self.peaks)
        rows = {
            "on": self.machine,
            "peak memory": f"{longest} after the longest sentences, {most} after the most sentences in "
            f"a micro-batch, {typical} in typical updates",
            "update": f"{self.update_s:.3f} s, mean of {self.timed_updates}",
            "recipe": f"{self.updates:,} updates, {self.epochs:.2f} epochs, "
            f"{self.tgt_tokens / 1e6:,.1f}M target tokens",
            "time": f"{self.hours:,.2f} h = {self.hours / 24:,.2f} days: "
            f"updates {format_duration(3600 * self.updates_h)}, "
            f"NLL of the dev set {self.validations:,} times {format_duration(3600 * self.validations_h)}",
            "not included": "decoding the dev set for BLEU, writing checkpoints of "
            f"{format_bytes(self.checkpoint_bytes)}, preparing the data, starting",
        }
        if self.cost is not None:
            rows["price"] = f"{self.cost:,.2f} at {self.price:,.2f} an hour"
        return format_rows(rows)


def estimate_run(config: RunConfig, world: World, price: float | None = None) -> Estimate:
    """Try what needs most memory, time updates, and print what the whole run takes from its first
    update on.
    """
    training = config.training
    if training.shard and world.size > 1:
        raise UserError(
            "training.shard: --plan tries the largest micro-batches on one rank, but with sharding a "
            "rank holds only a share of the model; use --profile"
        )
    config = resolve_precision(config, world)
    dry_run = DryRun(config, resolve_micro_tokens(config, world), world)
    largest = world.on_main(lambda: _peaks_of_largest(dry_run)) or (0, 0)
    with dry_run.updates() as updates:
        timing = dry_run.run_for(updates, TIMED_S, "typical updates")

    tgt_tokens = training.steps * timing.n_tgt / timing.n_updates
    validations = -(-training.steps // training.validate_every)
    validation_s = world.broadcast(dry_run.dev_seconds())
    tgt, mixture = dry_run.store.tgt, dry_run.mixture
    epoch_tokens = tgt.n_tokens if mixture is None else mixture.count_tokens(tgt.lengths)
    parameter_bytes = CHECKPOINT_BYTES
    if training.ema is not None:
        parameter_bytes += AVERAGE_BYTES
    result = Estimate(
        machine=describe_machine(config, world),
        peaks=(*largest, timing.peak),
        update_s=timing.mean_s,
        timed_updates=timing.n_updates,
        updates=training.steps,
        epochs=tgt_tokens / epoch_tokens,
        tgt_tokens=tgt_tokens,
        updates_h=training.steps * timing.mean_s / 3600,
        validations=validations,
        validations_h=validations * validation_s / 3600,
        checkpoint_bytes=parameter_bytes * count_parameters(dry_run.model),
        price=price,
    )
    if world.is_main:
        print(result.table())
    return result


def _peaks_of_largest(dry_run: DryRun) -> tuple[int, int]:
    """Peak memory of updates of the longest sentences, and of the most, on this rank alone."""
    longest, most = order_by_memory(dry_run.store)
    return _try_updates(dry_run, longest), _try_updates(dry_run, most)


def _try_updates(dry_run: DryRun, order: np.ndarray) -> int:
    device, shape = dry_run.world.device, dry_run.shape
    updates, _ = load_excerpt(dry_run.store, order, dry_run.micro_tokens, device, shape)
    with updates:
        # Two updates, because the optimizer allocates its moments at the end of the first.
        return dry_run.run(updates, 2, "largest micro-batches", is_alone=True).peak
