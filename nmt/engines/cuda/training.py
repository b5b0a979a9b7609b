"""What makes updates where several ranks share the work, code is compiled, or there is a GPU."""

from nmt.config import ModelConfig, TrainingConfig
from nmt.data.batch import BatchShape
from nmt.engines.cuda.memory_trial import choose_micro_tokens
from nmt.engines.cuda.recorded_replica import RecordedReplica, has_fixed_shape
from nmt.model.backend import Backend
from nmt.system.ranks import World
from nmt.train.engine import TrainingEngine, TrySize
from nmt.train.loss import Objective
from nmt.train.replica import Replica


class RecordedTraining(TrainingEngine):
    def __init__(self, backend: Backend, is_cuda: bool) -> None:
        self.backend, self.is_cuda = backend, is_cuda

    def has_fixed_shape(self, model: ModelConfig, training: TrainingConfig, world: World) -> bool:
        return has_fixed_shape(model, training, world)

    def make_replica(
        self, objective: Objective, world: World, is_bf16: bool, shape: BatchShape | None
    ) -> Replica:
        return RecordedReplica(objective, world, is_bf16, shape)

    def choose_micro_tokens(self, training: TrainingConfig, world: World, try_size: TrySize) -> int:
        if not self.is_cuda:
            return super().choose_micro_tokens(training, world, try_size)
        return choose_micro_tokens(training, world, try_size)
