"""What makes updates on a GPU."""

from nmt.config import OptimizerConfig, TrainingConfig
from nmt.data.batch import BatchShape
from nmt.engines.cuda.memory_trial import choose_micro_tokens, measure_memory
from nmt.engines.cuda.recorded_replica import RecordedReplica, has_fixed_shape
from nmt.model.moments import choose_moments
from nmt.system.ranks import World
from nmt.train.engine import TrainingEngine
from nmt.train.loss import Objective
from nmt.train.replica import Replica


class RecordedTraining(TrainingEngine):
    has_fixed_shape = staticmethod(has_fixed_shape)
    choose_micro_tokens = staticmethod(choose_micro_tokens)

    def make_replica(
        self,
        objective: Objective,
        world: World,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        shape: BatchShape | None,
    ) -> Replica:
        whole = [
            name
            for name, p in objective.model.named_parameters()
            if choose_moments(optimizer, name, p.shape).needs_whole
        ]
        return RecordedReplica(objective, world, training.precision == "bf16", shape, whole)

    def find_least_memory(self, world: World) -> int:
        memory = world.collect(str(measure_memory(world.device)).encode())
        return min(map(int, memory), default=0)
