"""Fits a training into a given time: `nmt-train budget=2h`, `nmt-init --hours`.

Updates, a validation and a checkpoint are timed before the run begins. The numbers that follow are
written into its config, so the run itself does not depend on a clock: the same config gives the same
weights, and a run that was stopped continues with the numbers that it began with.
"""

import math
import re
from dataclasses import dataclass

from nmt.checkpoint import load_run_config
from nmt.config import RunConfig
from nmt.profile.cost import CHECKPOINT_BYTES
from nmt.profile.dry_run import open_dry_run
from nmt.system.errors import UserError
from nmt.system.progress import format_duration, say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder

SAMPLE_S = 20.0
RESERVE = 0.03  # of the time, for the start and for a machine that becomes slower
VALIDATION_SHARE = 0.1  # of the time, at most
MAX_VALIDATIONS, PLANNED_CHECKPOINTS = 20, 40
LEAST_UPDATES = 100
WARMUP_SHARE = 0.2  # of the updates, at most
DISK_BYTES_PER_S = 300e6  # of a slow disk


@dataclass(frozen=True)
class Plan:
    """The settings that fit a run into its time."""

    steps: int
    validate_every: int
    checkpoint_every: int
    warmup_steps: int
    scale: float

    def list_settings(self) -> list[str]:
        return [
            f"training.steps={self.steps}",
            f"training.validate_every={self.validate_every}",
            f"training.checkpoint_every={self.checkpoint_every}",
            f"optimizer.warmup_steps={self.warmup_steps}",
            f"optimizer.scale={self.scale!r}",
        ]


def parse_duration(text: str) -> float:
    """Return the seconds of a time such as 2h, 90m or 1h30m."""
    found = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?", text)
    seconds = 0.0
    if found is not None:
        hours, minutes = found.groups("0")
        seconds = 3600 * float(hours) + 60 * float(minutes)
    if not 60 <= seconds < 1e7:
        raise UserError(
            f"budget={text}: give a time of at least a minute, such as 2h, 90m or 1h30m"
        )
    return seconds


def plan_run(config: RunConfig, seconds: float, world: World) -> Plan:
    """Return the plan that a run in this folder began with, or measure and make one."""
    begun = load_run_config(RunFolder(config.folder))
    if begun is not None:
        training, optimizer = begun.training, begun.optimizer
        say(
            f"budget: {config.folder} continues with the {training.steps:,} updates that it began with"
        )
        return Plan(
            steps=training.steps,
            validate_every=training.validate_every,
            checkpoint_every=training.checkpoint_every or training.steps,
            warmup_steps=optimizer.warmup_steps,
            scale=optimizer.scale,
        )
    update_s, validation_s = (world.broadcast(value) for value in _measure(config, world))
    plan = make_plan(config, seconds, update_s, validation_s)
    if world.is_main:
        n_validations = math.ceil(plan.steps / plan.validate_every)
        say(
            f"budget: {format_duration(seconds)} are {plan.steps:,} updates of {update_s:.3f} s and "
            f"{n_validations} validations of {validation_s:.1f} s; {' '.join(plan.list_settings())}"
        )
    return plan


def make_plan(config: RunConfig, seconds: float, update_s: float, validation_s: float) -> Plan:
    """Return how many updates of these costs fit, and what follows from their number."""
    useful_s = (1 - RESERVE) * seconds
    affordable = int(VALIDATION_SHARE * useful_s / max(validation_s, 1e-9))
    n_validations = min(MAX_VALIDATIONS, max(1, affordable))
    steps = int((useful_s - n_validations * validation_s) / update_s)
    if steps < LEAST_UPDATES:
        raise UserError(
            f"budget: {format_duration(seconds)} are enough for {max(0, steps):,} updates of "
            f"{update_s:.2f} s, too few to learn anything; give at least "
            f"{format_duration(LEAST_UPDATES * update_s + validation_s)}, a smaller model, or fewer "
            "training.src_tokens and tgt_tokens"
        )
    warmup = min(config.optimizer.warmup_steps, int(WARMUP_SHARE * steps))
    scale = config.optimizer.scale
    if config.optimizer.schedule == "paper":  # the same highest rate, reached earlier
        scale = float(f"{scale * math.sqrt(warmup / config.optimizer.warmup_steps):.4g}")
    every = max(1, steps // PLANNED_CHECKPOINTS)
    # a multiple, so that each validated update has a checkpoint
    validate_every = every * math.ceil(steps / (n_validations * every))
    return Plan(steps, validate_every, every, warmup, scale)


def _measure(config: RunConfig, world: World) -> tuple[float, float]:
    """Time an update, and a validation with its checkpoint."""
    dry_run = open_dry_run(config, world)
    with dry_run.updates() as updates:
        update_s = dry_run.run_for(updates, SAMPLE_S, "timing updates").mean_s
    checkpoint_s = CHECKPOINT_BYTES * dry_run.setup.n_weights / DISK_BYTES_PER_S
    return update_s, dry_run.dev_seconds() + dry_run.decoding_seconds() + checkpoint_s
