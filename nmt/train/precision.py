"""Resolves `training.precision: auto`: bf16 on a GPU; on a CPU, whichever precision multiplies faster.

Processors with AVX512-BF16 or AMX are two to six times as fast in bf16 as in fp32; on others bf16 is
several times slower. So a trial product decides. The choice is recorded in the run folder and kept on
every machine, because an update in the other precision would differ.
"""

from dataclasses import replace
from typing import Literal

import torch

from nmt.config import RunConfig, load_recorded_config
from nmt.system.errors import UserError
from nmt.system.files import has_plain_file
from nmt.system.progress import clock, say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder

ROWS = 2_048  # as in micro-batches
TRIALS = 5


def resolve_precision(config: RunConfig, world: World) -> RunConfig:
    """Return the config with `auto` replaced by a precision."""
    if config.training.precision != "auto":
        return config
    # The main rank decides, as for micro_tokens: it later writes the file that is read here.
    choice = world.on_main(lambda: _choose_precision(config, world))
    is_bf16 = bool(world.broadcast(float(choice == "bf16")))
    training = replace(config.training, precision="bf16" if is_bf16 else "fp32")
    return replace(config, training=training)


def _choose_precision(config: RunConfig, world: World) -> Literal["bf16", "fp32"]:
    path = RunFolder(config.folder).config
    if has_plain_file(path):
        recorded = load_recorded_config(path).training.precision
        if recorded == "auto":
            raise UserError(
                f"{path}: training.precision is auto, but nmt-train records bf16 or fp32 there; "
                "give one on the command line, or remove the folder to start over"
            )
        return recorded
    if world.device.type != "cpu":
        return "bf16"
    fp32, bf16 = _time_products(config.model.d_model, config.model.d_ff)
    if bf16 < fp32:
        choice = f"bf16, {fp32 / bf16:.1f} times as fast as fp32"
    else:
        choice = f"fp32, {bf16 / fp32:.1f} times as fast as bf16"
    say(f"training.precision: auto has chosen {choice} for products on this processor")
    return "bf16" if bf16 < fp32 else "fp32"


def _time_products(n_inputs: int, n_outputs: int) -> tuple[float, float]:
    """Time a product in fp32 and in bf16, in turn; return the shortest times."""
    shortest = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for _ in range(TRIALS):
        for dtype in shortest:
            x = torch.ones(ROWS, n_inputs, dtype=dtype)
            weight = torch.ones(n_inputs, n_outputs, dtype=dtype)
            started_at = clock()
            x @ weight
            shortest[dtype] = min(shortest[dtype], clock() - started_at)
    return shortest[torch.float32], shortest[torch.bfloat16]
