"""Resolves `training.precision: auto` where a run begins: bf16 where the processor has instructions for it.

The choice is recorded in the run folder and kept on every machine, because an update in the other
precision would differ.
"""

from dataclasses import replace

import torch

from nmt.checkpoint.run_checkpoints import load_run_config
from nmt.config import TrainingConfig
from nmt.system.device import Precision, choose_precision
from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse bf16 on a GPU that computes it by way of fp32: a run would take weeks."""
    if precision != "bf16" or device.type != "cuda":
        return
    choice, reason = choose_precision(device)
    if choice != "bf16":
        raise UserError(f"training.precision=bf16: {reason}; give training.precision=fp32")


def resolve_precision(training: TrainingConfig, run: RunFolder, world: World) -> TrainingConfig:
    """Return the settings with `auto` replaced by a precision."""
    check_precision(training.precision, world.device)
    if training.precision != "auto":
        return training
    # The main rank decides, as for micro_tokens: it later writes the file that is read here.
    is_bf16 = world.decide(lambda: _choose_precision(run, world.device) == "bf16")
    return replace(training, precision="bf16" if is_bf16 else "fp32")


def _choose_precision(run: RunFolder, device: torch.device) -> Precision:
    recorded = load_run_config(run)
    if recorded is not None and recorded.training.precision != "auto":
        check_precision(recorded.training.precision, device)
        return recorded.training.precision
    choice, reason = choose_precision(device)
    say(f"training.precision: auto has chosen {choice}, because {reason}")
    return choice
