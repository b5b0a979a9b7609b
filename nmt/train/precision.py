"""Chooses `training.precision: auto`: bf16 on a GPU, on a CPU whichever precision multiplies faster there.

Processors with AVX512-BF16 or AMX are twice to six times as fast in bf16 as in fp32, others several times
slower, so a trial product decides. Which it was is recorded in the run folder, and the run goes on with it
on any machine: an update in the other precision would be another update.
"""

from dataclasses import replace

import torch

from nmt.config import RunConfig, load_recorded_config
from nmt.system.files import has_plain_file
from nmt.system.progress import clock, say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder

ROWS = 2_048  # as in micro-batches
TRIALS = 5


def resolve_precision(config: RunConfig, world: World) -> RunConfig:
    """Return the config with the precision that `auto` stands for."""
    if config.training.precision != "auto":
        return config
    # The main rank decides, as for micro_tokens: it later writes the file that is read here.
    is_bf16 = world.broadcast(float(world.on_main(lambda: _is_bf16(config, world)) or False))
    training = replace(config.training, precision="bf16" if is_bf16 else "fp32")
    return replace(config, training=training)


def _is_bf16(config: RunConfig, world: World) -> bool:
    path = RunFolder(config.folder).config
    if has_plain_file(path):
        return load_recorded_config(path).training.precision == "bf16"
    if world.device.type != "cpu":
        return True
    fp32, bf16 = _time_products(config.model.d_model, config.model.d_ff)
    if bf16 < fp32:
        choice = f"bf16, {fp32 / bf16:.1f} times as fast as fp32"
    else:
        choice = f"fp32, {bf16 / fp32:.1f} times as fast as bf16"
    say(f"training.precision: auto has chosen {choice} in products on this processor")
    return bf16 < fp32


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
