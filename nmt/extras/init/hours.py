"""Fits a training into some hours of this machine: `nmt-init --hours`.

Updates, a validation and a checkpoint are timed before the config is written, and the numbers that follow
are part of it. So the run itself does not depend on a clock: the same config gives the same weights.
"""

import math
from dataclasses import dataclass, replace

import torch

from nmt.config import ModelConfig, RunConfig
from nmt.extras.profile.cost import CHECKPOINT_BYTES, count_flop, measure_ceiling
from nmt.extras.profile.dry_run import DryRun, open_dry_run
from nmt.system.device import choose_device, choose_precision
from nmt.system.errors import UserError
from nmt.system.progress import format_duration, say
from nmt.system.ranks import World

SAMPLE_S = 20.0
RESERVE = 0.03  # of the time, for the start and for a machine that becomes slower
VALIDATION_SHARE = 0.1  # of the time, at most
MAX_VALIDATIONS, PLANNED_CHECKPOINTS = 20, 40
LEAST_UPDATES = 100
WARMUP_SHARE = 0.2  # of the updates, at most
DISK_BYTES_PER_S = 300e6  # of a slow disk
USED_SHARE = 0.4  # of the speed of matrix products alone, in training


@dataclass(frozen=True)
class Schedule:
    """How long a run trains, and when it validates and saves."""

    tokens: int  # of an update, on each side
    steps: int
    validate_every: int
    checkpoint_every: int
    warmup_steps: int
    passes: float  # over the text
    reason: str


def estimate_update_seconds(model: ModelConfig, n_vocab: int, n_tokens: int) -> float:
    """Estimate the time of an update from the speed of the model's largest matrix products here."""
    device = choose_device()
    precision, _ = choose_precision(device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    speed = USED_SHARE * measure_ceiling(model, n_tokens, dtype, device)
    flop = count_flop(model, n_vocab, src_length=0, tgt_length=0)  # of the weights alone
    return n_tokens * (flop.src + flop.tgt) / speed


def fit_schedule(schedule: Schedule, config: RunConfig, hours: float) -> Schedule:
    """Return the schedule with which the run of this config takes these hours here."""
    world = World(0, 1, choose_device(config.device))
    update_s, validation_s = _measure(open_dry_run(config, world))
    fitted = plan_schedule(schedule, 3600 * hours, update_s, validation_s)
    n_validations = math.ceil(fitted.steps / fitted.validate_every)
    say(
        f"--hours {hours:g}: {fitted.steps:,} updates of {update_s:.3f} s and "
        f"{n_validations} validations of {validation_s:.1f} s"
    )
    return fitted


def plan_schedule(
    schedule: Schedule, seconds: float, update_s: float, validation_s: float
) -> Schedule:
    """Return how many updates of these costs fit, and what follows from their number."""
    useful_s = (1 - RESERVE) * seconds
    affordable = int(VALIDATION_SHARE * useful_s / max(validation_s, 1e-9))
    n_validations = min(MAX_VALIDATIONS, max(1, affordable))
    steps = int((useful_s - n_validations * validation_s) / update_s)
    if steps < LEAST_UPDATES:
        raise UserError(
            f"--hours: {format_duration(seconds)} are enough for {max(0, steps):,} updates of "
            f"{update_s:.2f} s, too few to learn anything; give at least "
            f"{format_duration(LEAST_UPDATES * update_s + validation_s)}"
        )
    every = max(1, steps // PLANNED_CHECKPOINTS)
    return replace(
        schedule,
        steps=steps,
        # a multiple, so that each validated update has a checkpoint
        validate_every=every * math.ceil(steps / (n_validations * every)),
        checkpoint_every=every,
        warmup_steps=min(schedule.warmup_steps, int(WARMUP_SHARE * steps)),
        passes=schedule.passes * steps / schedule.steps,
        reason=f"what fits into {seconds / 60:g} minutes, by a measured speed; so do warm-up, validations "
        "and checkpoints",
    )


def _measure(dry_run: DryRun) -> tuple[float, float]:
    """Time an update, and a validation with its checkpoint."""
    with dry_run.updates() as updates:
        update_s = dry_run.run_for(updates, SAMPLE_S, "timing updates").mean_s
    checkpoint_s = CHECKPOINT_BYTES * dry_run.setup.n_weights / DISK_BYTES_PER_S
    return update_s, dry_run.dev_seconds() + dry_run.decoding_seconds() + checkpoint_s
