"""What makes updates on a GPU, and on a CPU where training.compile=on asks for compiled code."""

from nmt.config import TrainingConfig
from nmt.data.batch import BatchShape
from nmt.engines.cuda.memory_trial import choose_micro_tokens, measure_memory
from nmt.engines.cuda.recorded_replica import RecordedReplica, has_fixed_shape
from nmt.model.backend import Backend
from nmt.system.ranks import World
from nmt.train.engine import TrainingEngine, TrySize
from nmt.train.loss import Objective
from nmt.train.replica import Replica


class RecordedTraining(TrainingEngine):
    has_fixed_shape = staticmethod(has_fixed_shape)

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def make_replica(
        self,
        objective: Objective,
        world: World,
        training: TrainingConfig,
        shape: BatchShape | None,
    ) -> Replica:
        if world.device.type == "cpu" and shape is None:
            return super().make_replica(objective, world, training, shape)
        return RecordedReplica(objective, world, training.precision == "bf16", shape)

    def find_least_memory(self, world: World) -> int:
        if world.device.type == "cpu":
            return super().find_least_memory(world)
        memory = world.collect(str(measure_memory(world.device)).encode())
        return min(map(int, memory), default=0)

    def choose_micro_tokens(
        self, training: TrainingConfig, world: World, least_memory: int, try_size: TrySize
    ) -> int:
        if world.device.type == "cpu":
            return super().choose_micro_tokens(training, world, least_memory, try_size)
        return choose_micro_tokens(training, world, least_memory, try_size)
