"""How large a micro-batch a GPU's memory has room for, found by a trial."""

import gc
from dataclasses import replace

import torch

from nmt.config import TrainingConfig
from nmt.data.plan import divide_tokens
from nmt.system.errors import UserError
from nmt.system.memory import is_out_of_memory
from nmt.system.ranks import World
from nmt.train.engine import MAX_ROUNDS, TrySize

TRIAL_MEMORY = 0.92  # the share of a GPU's memory that a trial may take


def choose_micro_tokens(
    training: TrainingConfig, world: World, least_memory: int, try_size: TrySize
) -> int:
    """Return an equal share of an update for each rank, halved until it fits into `least_memory`, the
    bytes of the smallest GPU of all ranks.
    """
    update_tokens = max(training.src_tokens, training.tgt_tokens)
    n_rounds = 1
    while n_rounds <= MAX_ROUNDS:
        micro_tokens = divide_tokens(update_tokens, world.size * n_rounds)
        if fits(try_size, micro_tokens, world, least_memory):
            return micro_tokens
        n_rounds *= 2
    raise UserError(
        f"training.micro_tokens: auto tried down to {micro_tokens} tokens, and none fit into memory; "
        "lower model.d_model or model.n_layers"
    )


def measure_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def fits(try_size: TrySize, micro_tokens: int, world: World, least_memory: int) -> bool:
    """Whether model, optimizer and the worst micro-batches of this size fit into memory. All of it
    is freed again.
    """
    # NCCL and others use memory that torch does not count
    share = TRIAL_MEMORY * least_memory / measure_memory(world.device)
    torch.cuda.set_per_process_memory_fraction(share, world.device)
    try:
        try_size(micro_tokens, replace(world, rank=0, size=1))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        gc.collect()  # reference cycles in autograd and the compiler keep tensors alive
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, world.device)
    return True
