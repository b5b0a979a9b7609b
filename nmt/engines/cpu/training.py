"""What makes updates on a CPU: threads of this process, each with micro-batches of its own.

Threads share the weights. Each has a copy of the modules around them, gradients of its own, and a generator
that draws dropout. Gradients are added in the order of the micro-batches, and the norm adds those of one
parameter in one thread. So the bits of a run do not depend on how many threads computed it, as long as
products take one core each. Where there are more cores than micro-batches of a useful size, the others help
inside products, whose last bits may then depend on their number.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from nmt.config import OptimizerConfig, TrainingConfig
from nmt.data.batch import Batch, BatchShape
from nmt.engines.cpu.backend import CpuBackend, load_compiled
from nmt.model.backend import use_backend
from nmt.system.memory import find_memory_limit
from nmt.system.ranks import World
from nmt.train.engine import TrainingEngine
from nmt.train.loss import Objective
from nmt.train.replica import Replica

MIN_WORKER_TOKENS = 1_500  # target tokens; with fewer, Python takes longer than the products
GRADIENT_SHARE = 0.25  # of all memory, that gradients of workers may take


class CpuTraining(TrainingEngine):
    def name_kernels(self, training: TrainingConfig) -> str:
        return "torch" if load_compiled(find_dtype(training)) is None else "numba"

    def make_replica(
        self,
        objective: Objective,
        world: World,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        shape: BatchShape | None,
    ) -> Replica:
        is_bf16 = training.precision == "bf16"
        load_compiled(find_dtype(training))  # before threads ask for it
        if world.size > 1:  # a rank is a worker
            return Replica(objective, world, is_bf16)
        n_bytes = sum(parameter.nbytes for parameter in objective.parameters())
        n_cores = torch.get_num_threads()
        n = count_workers(training, n_cores, n_bytes, find_memory_limit().n_bytes)
        return SharedReplica(objective, world, is_bf16, n, n_cores // n)


def find_dtype(training: TrainingConfig) -> torch.dtype:
    return torch.bfloat16 if training.precision == "bf16" else torch.float32


def count_workers(
    training: TrainingConfig, n_cores: int, gradient_bytes: int, memory_bytes: int
) -> int:
    """Return how many micro-batches to compute at a time."""
    assert isinstance(training.micro_tokens, int)  # auto is resolved
    n_micros = -(-max(training.src_tokens, training.tgt_tokens) // training.micro_tokens)
    n_useful = training.tgt_tokens // MIN_WORKER_TOKENS
    n_fitting = int(GRADIENT_SHARE * memory_bytes) // gradient_bytes
    return max(1, min(n_cores, n_micros, n_useful, n_fitting))


class Learner(Replica):
    """An objective that shares its weights with another one, and has gradients of its own."""

    def __init__(self, shared: Replica) -> None:
        given = shared.objective.parameters()
        own = {id(parameter): nn.Parameter(parameter.detach()) for parameter in given}
        super().__init__(deepcopy(shared.objective, dict(own)), shared.world, shared.is_bf16)
        self.parameters = list(own.values())
        self.generator = torch.Generator()
        use_backend(self.objective.model, CpuBackend(self.generator))

    def set_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def take_gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self.parameters]
        self.clear_gradients()
        return gradients


class SharedReplica(Replica):
    """An objective whose micro-batches are computed by several threads."""

    def __init__(
        self, objective: Objective, world: World, is_bf16: bool, n_workers: int, n_threads: int
    ) -> None:
        super().__init__(objective, world, is_bf16)
        self.n_at_once = n_workers
        self.idle: SimpleQueue[Learner] = SimpleQueue()
        for _ in range(n_workers):
            self.idle.put(Learner(self))
        set_threads: Callable[[int], None] = torch.set_num_threads
        self.threads = ThreadPoolExecutor(n_workers, "worker", set_threads, (n_threads,))

    def run_micros(self, batches: Sequence[Batch], scale: float, seeds: Sequence[int]) -> Tensor:
        sums: list[Future[Tensor]] = []
        for batch, seed in zip(batches, seeds, strict=True):
            before = sums[-1] if sums else None
            sums.append(self.threads.submit(self._run_one, batch, scale, seed, before))
        return torch.stack([future.result() for future in sums])

    def run(self, batch: Batch, scale: float, seed: int) -> Tensor:
        return self.run_micros([batch], scale, [seed])[0]

    def _run_one(
        self, batch: Batch, scale: float, seed: int, before: Future[Tensor] | None
    ) -> Tensor:
        learner = self.idle.get()
        try:
            sums = learner.run(batch, scale, seed)
        finally:
            gradients = learner.take_gradients()
            self.idle.put(learner)
        if before is not None:
            before.result()  # its gradients are added
        for parameter, gradient in zip(self.objective.parameters(), gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)
        return sums

    def gradient_norm(self) -> Tensor:
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        norms = list(self.threads.map(torch.linalg.vector_norm, gradients))
        return torch.linalg.vector_norm(torch.stack(norms))
