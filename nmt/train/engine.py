"""What makes updates: plain torch, or an engine of nmt/engines/ that makes the same faster.

An engine is chosen once, when a training is opened, from the device alone. Without nmt/engines/, plain
torch does everything, as `TrainingEngine` does.
"""

from collections.abc import Callable

import torch

from nmt.config import ModelConfig, OptimizerConfig, TrainingConfig
from nmt.data.batch import BatchShape
from nmt.data.plan import divide_tokens
from nmt.model.backend import PLAIN, Backend
from nmt.system.engines import find_engines
from nmt.system.ranks import World
from nmt.train.loss import Objective
from nmt.train.replica import Replica

CPU_MICRO_TOKENS = 2_100  # whatever the number of cores, because dropout depends on micro-batches
MAX_ROUNDS = 64  # micro-batches of an update on one rank
# Makes the update that needs the most memory, with micro-batches of a size, on a rank that is alone
TrySize = Callable[[int, World], None]


class TrainingEngine:
    """Plain torch, on any device. Engines override what they do better."""

    def __init__(self, backend: Backend = PLAIN) -> None:
        self.backend = backend

    def has_fixed_shape(self, model: ModelConfig, training: TrainingConfig, world: World) -> bool:
        """Whether all micro-batches must have one shape, because code is compiled for it."""
        return False

    def make_replica(
        self,
        objective: Objective,
        world: World,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        shape: BatchShape | None,
    ) -> Replica:
        return Replica(objective, world, training.precision == "bf16")

    def name_kernels(self, training: TrainingConfig) -> str | None:
        """Name what computes attention and loss, if that depends on what is installed."""
        return None

    def find_least_memory(self, world: World) -> int:
        """Return the bytes of the smallest device of all ranks, on the main rank, as far as
        `choose_micro_tokens` asks for it. All ranks must call this.
        """
        return 0

    def choose_micro_tokens(
        self, training: TrainingConfig, world: World, least_memory: int, try_size: TrySize
    ) -> int:
        """Return an equal share of an update for each rank, divided until it is small."""
        update_tokens = max(training.src_tokens, training.tgt_tokens)
        for n_rounds in range(1, MAX_ROUNDS + 1):
            size = divide_tokens(update_tokens, world.size * n_rounds)
            if size <= CPU_MICRO_TOKENS:
                return size
        return CPU_MICRO_TOKENS


def choose_training_engine(device: torch.device) -> TrainingEngine:
    engines = find_engines()
    return TrainingEngine() if engines is None else engines.choose_for_training(device)
