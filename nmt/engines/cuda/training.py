"""What makes updates where several ranks share the work, code is compiled, or there is a GPU."""

from nmt.config import TrainingConfig
from nmt.data.batch import BatchShape
from nmt.engines.cuda.memory_trial import choose_micro_tokens
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
        is_bf16, has_sums_apart = training.precision == "bf16", training.compile == "sums_apart"
        return RecordedReplica(objective, world, is_bf16, shape, has_sums_apart)

    def choose_micro_tokens(self, training: TrainingConfig, world: World, try_size: TrySize) -> int:
        if world.device.type == "cpu":
            return super().choose_micro_tokens(training, world, try_size)
        return choose_micro_tokens(training, world, try_size)
