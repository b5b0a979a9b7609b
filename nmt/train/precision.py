"""Resolves `training.precision: auto` where a run begins: bf16 where the processor has instructions for it.

The choice is recorded in the run folder and kept on every machine, because an update in the other
precision would differ.
"""

from dataclasses import replace

from nmt.config import RunConfig, load_recorded_config
from nmt.system.device import Precision, choose_precision
from nmt.system.errors import UserError
from nmt.system.files import has_plain_file
from nmt.system.progress import say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder


def resolve_precision(config: RunConfig, world: World) -> RunConfig:
    """Return the config with `auto` replaced by a precision."""
    if config.training.precision != "auto":
        return config
    # The main rank decides, as for micro_tokens: it later writes the file that is read here.
    choice = world.on_main(lambda: _choose_precision(config, world))
    is_bf16 = bool(world.broadcast(float(choice == "bf16")))
    training = replace(config.training, precision="bf16" if is_bf16 else "fp32")
    return replace(config, training=training)


def _choose_precision(config: RunConfig, world: World) -> Precision:
    path = RunFolder(config.folder).config
    if has_plain_file(path):
        recorded = load_recorded_config(path).training.precision
        if recorded == "auto":
            raise UserError(
                f"{path}: training.precision is auto, but nmt-train records bf16 or fp32 there; "
                "give one on the command line, or remove the folder to start over"
            )
        return recorded
    choice, reason = choose_precision(world.device)
    say(f"training.precision: auto has chosen {choice}, because {reason}")
    return choice
