"""Resolves what a config leaves to the machine that a run begins on, and refuses what its device could never train.

`training.precision: auto` is bf16 where the processor has instructions for it. A run keeps the choice on
every machine, because an update in the other precision would differ. `training.micro_tokens: auto` is an
equal share of an update for each rank, as small as the engine finds necessary to train and to validate.
"""

from dataclasses import replace

import torch

from nmt.config import ModelConfig, RunConfig, TrainingConfig, VocabConfig
from nmt.model.size import check_moments_fit
from nmt.system.device import Precision, choose_precision
from nmt.system.errors import UserError
from nmt.system.memory import MemoryLimit, find_memory_limit
from nmt.system.progress import say
from nmt.system.ranks import World
from nmt.train.engine import choose_training_engine
from nmt.train.memory_probe import try_update
from nmt.train.setup import open_setup

# A run resumed on another number of ranks keeps its micro-batches, unless less than this share of
# the ranks would be busy.
MIN_USEFUL_SHARE = 0.9


def check_training_fits(
    model: ModelConfig, vocab: VocabConfig, training: TrainingConfig, world: World
) -> None:
    """Refuse what this device could never train, before its data is prepared."""
    check_precision(training.precision, world.device)
    limit = find_memory_limit()
    if world.device.type == "cuda":
        n_bytes = torch.cuda.get_device_properties(world.device).total_memory
        limit = MemoryLimit(n_bytes, "all memory of this GPU")
    check_moments_fit(model, vocab, training.ema is not None, limit, world.size)


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse bf16 on a GPU that computes it by way of fp32: a run would take weeks."""
    if precision != "bf16" or device.type != "cuda":
        return
    choice, reason = choose_precision(device)
    if choice != "bf16":
        raise UserError(f"training.precision=bf16: {reason}; give training.precision=fp32")


def resolve(config: RunConfig, recorded: RunConfig, world: World) -> RunConfig:
    """Return the config with a value for each `auto`: that of the config which the run began with, or
    else a choice.

    The main rank decides for all: it alone has read what is `recorded`, and later it writes that file.
    """
    training = config.training
    if training.precision == "auto":
        is_bf16 = world.decide(lambda: _choose_precision(recorded, world.device) == "bf16")
        training = replace(training, precision="bf16" if is_bf16 else "fp32")
        config = replace(config, training=training)
    micro_tokens = resolve_micro_tokens(config, recorded, world)
    return replace(config, training=replace(training, micro_tokens=micro_tokens))


def _choose_precision(recorded: RunConfig, device: torch.device) -> Precision:
    began_with = recorded.training.precision
    if began_with != "auto":
        check_precision(began_with, device)
        return began_with
    choice, reason = choose_precision(device)
    say(f"training.precision: auto has chosen {choice}, because {reason}")
    return choice


def resolve_micro_tokens(config: RunConfig, recorded: RunConfig, world: World) -> int:
    """Return `training.micro_tokens`. If it is `auto`, return the number that the run began with,
    provided that it keeps the ranks busy, or else an equal share of an update that fits into
    memory.
    """
    training = config.training
    if isinstance(training.micro_tokens, int):
        return training.micro_tokens

    engine = choose_training_engine(world.device)
    least_memory = engine.find_least_memory(world)

    def try_size(micro_tokens: int, alone: World) -> None:
        tried = replace(config, training=replace(training, micro_tokens=micro_tokens))
        try_update(open_setup(tried, alone))

    def find_micro_tokens() -> int:
        began_with = recorded.training.micro_tokens
        if began_with != "auto" and _is_useful(began_with, training, world.size):
            return began_with
        micro_tokens = engine.choose_micro_tokens(training, world, least_memory, try_size)
        say(f"training.micro_tokens: auto has chosen {micro_tokens}")
        return micro_tokens

    return int(world.decide(find_micro_tokens))


def _is_useful(micro_tokens: int, training: TrainingConfig, n_ranks: int) -> bool:
    """Whether micro-batches of the size that the run began with keep the ranks busy; say if they do not."""
    share = useful_share(training, micro_tokens, n_ranks)
    if share < MIN_USEFUL_SHARE:
        say(
            f"the run began with micro-batches of {micro_tokens} tokens, which would leave "
            f"{n_ranks} ranks idle for {1 - share:.0%} of their time; choosing another size"
        )
    return share >= MIN_USEFUL_SHARE


def useful_share(training: TrainingConfig, micro_tokens: int, n_ranks: int) -> float:
    """Compute the share of the ranks that have a micro-batch to work on, averaged over an update."""
    n_micros = -(-max(training.src_tokens, training.tgt_tokens) // micro_tokens)
    n_rounds = -(-n_micros // n_ranks)
    return n_micros / (n_rounds * n_ranks)
