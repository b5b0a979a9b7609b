"""Fits a training into some hours of this machine: `nmt-init --hours`.

Updates, a validation and a checkpoint are timed before the config is written, and the numbers that follow
are part of it. So the run itself does not depend on a clock: the same config gives the same weights.
"""

import math

import torch

from nmt.config import ModelConfig, OptimizerConfig, RunConfig
from nmt.extras.profile.cost import CHECKPOINT_BYTES, FLOP_PER_MULTIPLY_ADD, measure_ceiling
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


def estimate_update_seconds(model: ModelConfig, n_weights: int, n_tokens: int) -> float:
    """Estimate the time of an update from the speed of the model's largest matrix products here."""
    device = choose_device()
    precision, _ = choose_precision(device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    speed = USED_SHARE * measure_ceiling(model, n_tokens, dtype, device)
    return FLOP_PER_MULTIPLY_ADD * n_weights * n_tokens / speed


def fit_schedule(config: RunConfig, hours: float) -> dict[str, int | float]:
    """Return the settings with which the run of this config takes these hours here."""
    seconds = 3600 * hours
    world = World(0, 1, choose_device(config.device))
    update_s, validation_s = _measure(open_dry_run(config, world))
    settings = plan_schedule(config.optimizer, seconds, update_s, validation_s)
    n_validations = math.ceil(settings["training.steps"] / settings["training.validate_every"])
    say(
        f"--hours {hours:g}: {settings['training.steps']:,} updates of {update_s:.3f} s and "
        f"{n_validations} validations of {validation_s:.1f} s"
    )
    return settings


def plan_schedule(
    optimizer: OptimizerConfig, seconds: float, update_s: float, validation_s: float
) -> dict[str, int | float]:
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
    warmup = min(optimizer.warmup_steps, int(WARMUP_SHARE * steps))
    every = max(1, steps // PLANNED_CHECKPOINTS)
    settings: dict[str, int | float] = {
        "training.steps": steps,
        # a multiple, so that each validated update has a checkpoint
        "training.validate_every": every * math.ceil(steps / (n_validations * every)),
        "training.checkpoint_every": every,
        "optimizer.warmup_steps": warmup,
    }
    if optimizer.schedule == "paper":  # the same highest rate, reached earlier
        factor = math.sqrt(warmup / optimizer.warmup_steps)
        settings["optimizer.scale"] = float(f"{optimizer.scale * factor:.4g}")
    return settings


def _measure(dry_run: DryRun) -> tuple[float, float]:
    """Time an update, and a validation with its checkpoint."""
    with dry_run.updates() as updates:
        update_s = dry_run.run_for(updates, SAMPLE_S, "timing updates").mean_s
    checkpoint_s = CHECKPOINT_BYTES * dry_run.setup.n_weights / DISK_BYTES_PER_S
    return update_s, dry_run.dev_seconds() + dry_run.decoding_seconds() + checkpoint_s
