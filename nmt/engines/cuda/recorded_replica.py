"""Makes a model train fast without changing it: compiled code, a CUDA graph, gradients summed over
ranks.

The model knows nothing about it. Every micro-batch of a run has one shape, so its forward and
backward pass is compiled once, recorded as one CUDA graph, and replayed: the same graph on every
rank, with dropout drawn from the micro-batch's own seed. Gradients accumulate in flat fp32 buffers;
those of several ranks are summed within the last micro-batch of an update (shares.py), or after it.
"""

from collections.abc import Callable
from copy import deepcopy
from weakref import proxy

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig, TrainingConfig
from nmt.data.batch import Batch, BatchShape, Packed
from nmt.engines.cuda.attention_triton import WIDEST_HEAD, can_attend
from nmt.engines.cuda.cuda_graph import capture
from nmt.engines.cuda.loss_triton import can_compute_loss
from nmt.engines.cuda.shares import ALIGNMENT, Bucket, Shares
from nmt.system.kernels import COMPILER_REMEDY, summarize_error, triton
from nmt.system.memory import is_out_of_memory
from nmt.system.progress import say
from nmt.system.ranks import Share, World
from nmt.system.tensor_files import Tensors
from nmt.train.loss import Objective
from nmt.train.replica import ALONE, Phase, Replica, forward_backward

BACKEND = "inductor"


def is_compiled(training: TrainingConfig, device: str) -> bool:
    """Whether the config asks for compiled code on this type of device."""
    return training.compile == "on" or (device == "cuda" and training.compile != "off")


def has_fixed_shape(model: ModelConfig, training: TrainingConfig, world: World) -> bool:
    """Whether all micro-batches must have one shape, because code is compiled for it."""
    if not is_compiled(training, world.device.type):
        return False
    if world.device.type == "cpu":
        return True
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    heads = model.key_size, model.value_size
    reason = None
    if triton is None:
        reason = "Triton is not installed"
    elif max(heads) > WIDEST_HEAD:
        reason = f"the attention kernels support heads of at most {WIDEST_HEAD}"
    if reason is not None and world.is_main:
        say(f"warning: the model is not compiled, so training is slower: {reason}")
    is_able = reason is None and can_attend(world.device, dtype, *heads)
    is_able = is_able and can_compute_loss(world.device, dtype)
    # on all ranks or none: batches of another shape would hold other sentences
    n_able = world.sum(torch.tensor(float(is_able)))
    return n_able.item() == world.size


class CompiledObjective(nn.Module):
    """An objective (Batch -> sums) as compiled code for batches of one shape."""

    def __init__(self, objective: Objective, shape: BatchShape, is_one_graph: bool) -> None:
        super().__init__()
        self.objective, self.shape = objective, shape
        import torch._inductor.config

        # What a process compiled for earlier models and shapes counts against dynamo's limit.
        torch.compiler.reset()
        # Autotuning by timing could choose another order of summation at each start, so a resumed
        # run would not be identical.
        torch._inductor.config.deterministic = True
        self.compiled_sums = torch.compile(
            _compute_sums, fullgraph=is_one_graph, dynamic=False, backend=BACKEND
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.compiled_sums(self.objective, self.shape, *batch.tensors)


def _compute_sums(
    objective: nn.Module,
    shape: BatchShape,
    src_tokens: Tensor,
    src_offsets: Tensor,
    tgt_tokens: Tensor,
    tgt_offsets: Tensor,
    labels: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the sums of a batch of this shape. Not a method, which its own compiled code would keep
    alive.
    """
    src = Packed(src_tokens, src_offsets, shape.longest, shape.src_tokens)
    tgt = Packed(tgt_tokens, tgt_offsets, shape.longest, shape.tgt_tokens)
    return objective(Batch(src, tgt, labels, 0))


class RecordedReplica(Replica):
    """With a fixed shape, micro-batches run as compiled code, on a GPU as one CUDA graph. A batch of
    any other shape runs eagerly; only BPE-dropout without data.clean.max_pieces can make one.
    """

    def __init__(
        self,
        objective: Objective,
        world: World,
        is_bf16: bool,
        shape: BatchShape | None = None,
        has_sums_apart: bool = False,
    ) -> None:
        super().__init__(objective, world, is_bf16)
        self.shape = shape
        self.compiled: CompiledObjective | None = None
        self.shares: Shares | None = None
        self.buckets: list[Bucket] = []
        self.replays: dict[Phase, Callable[[], Tensor]] = {}
        is_cuda = world.device.type == "cuda"
        # One memory for all recorded graphs, of which only one runs at a time.
        self.pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self.plain = objective  # what runs where nothing is compiled
        if world.size > 1 or is_cuda:  # a single CPU rank is faster without buffers
            self.shares = Shares(objective, world, is_bf16, has_sums_apart)
            self.buckets, self.plain = self.shares.buckets, self.shares.objective
            self.phases = [Phase(a, b) for b in (True, False) for a in (True, False)]
        # What ranks exchange before and after micro-batches instead of within them.
        self.apart = self.shares if world.size > 1 and has_sums_apart else None
        if shape is not None:
            # The table must have its final address before a graph records it.
            objective.model.reserve_positions(shape.longest)
            self.compiled = CompiledObjective(self.plain, shape, is_one_graph=is_cuda)

    @property
    def own(self) -> dict[str, Share]:
        return super().own if self.shares is None else self.shares.own

    @property
    def network_bytes(self) -> int:
        return 0 if self.shares is None else self.shares.network_bytes

    def run(self, batch: Batch, scale: float, seed: int, phase: Phase = ALONE) -> Tensor:
        if self.apart is not None and phase.is_first:
            self.apart.collect_weights()
        kind = self.unify(phase)
        has_shape = self.shape is not None and batch.has_shape(self.shape)
        if has_shape and self.compiled is not None and kind not in self.replays:
            self.record(batch, kind)
        torch.manual_seed(seed)
        if has_shape and kind in self.replays:
            for recorded, new in zip(self.inputs.tensors, batch.tensors, strict=True):
                recorded.copy_(new)
            self.scale.fill_(scale)
            sums = self.replays[kind]()
        else:
            sums = self.compute(self.plain, batch, scale, kind)
        if self.apart is not None and phase.is_last:
            self.apart.sum_gradients()
        return sums

    def unify(self, phase: Phase) -> Phase:
        """Return the phase that is recorded for this one: without sums within it a last micro-batch is
        like any other, and without buffers so is a first one.
        """
        is_first = phase.is_first or self.shares is None
        return Phase(is_first, phase.is_last and self.world.size > 1 and self.apart is None)

    def compute(
        self, objective: nn.Module, batch: Batch, scale: Tensor | float, phase: Phase
    ) -> Tensor:
        """Run forward and backward, and what ranks do for each other meanwhile."""
        if self.shares is not None:
            self.shares.start(*phase)
        sums = forward_backward(objective, batch, scale, self.is_bf16)
        if self.shares is not None:
            self.shares.finish()
        return sums

    def record(self, batch: Batch, phase: Phase) -> None:
        """Compile and record the forward and backward pass over batches of this shape. If
        compiling fails, batches run eagerly; if recording fails, the compiled code runs without a
        graph. Either gives a warning, and on one rank makes all go the same way.
        """
        compiled, device = self.compiled, batch.labels.device
        assert compiled is not None
        if not self.replays:
            self.inputs = deepcopy(batch)
            self.scale = torch.zeros((), device=device)
            model = self.objective.model
            # The graph reads these tables. Decoding may replace them with longer ones, so the old
            # ones are kept alive here.
            self.tables = model.src_positions.table, model.tgt_positions.table
        own = proxy(self)  # what is recorded must not keep this alive, and so itself

        def work(phase: Phase = phase) -> Tensor:
            return own.compute(compiled, own.inputs, own.scale, phase)

        def record_graph() -> None:
            self.replays[phase] = capture(work, device, self.pool)

        before = [bucket.gradients.clone() for bucket in self.buckets]
        fault = self.find_fault(lambda: work(Phase(False, False)))  # waits for no other rank
        if fault is not None:
            say(
                "warning: the model cannot be compiled, so training is much slower: "
                f"{fault}; {COMPILER_REMEDY}"
            )
            self.compiled = None
        else:
            fault = self.find_fault(record_graph)
            if fault is not None:
                say(f"warning: the CUDA graph cannot be recorded, so training is slower: {fault}")
                self.replays[phase] = work
        for bucket, gradients in zip(self.buckets, before, strict=True):
            bucket.gradients.copy_(gradients)  # recording ran the work, which added to them

    def find_fault(self, work: Callable[[], object]) -> str | None:
        """Do this on every rank; return why it fails, on all ranks if on one."""
        fault = None
        try:
            work()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            fault = summarize_error(error)
        n_failed = self.world.sum(torch.tensor(float(fault is not None)))
        if n_failed:
            return fault or "it fails on another rank"
        return None

    def close(self) -> None:
        self.replays.clear()

    def clear_gradients(self) -> None:
        if self.shares is None:  # with shares, the next update replaces them
            super().clear_gradients()

    def gather_weights(self) -> None:
        if self.shares is not None:
            self.shares.gather_weights()

    def gather(self, own: Tensors) -> Tensors:
        return own if self.shares is None else self.shares.gather(own)

    def gradient_norm(self) -> Tensor:
        if not self.buckets:
            return super().gradient_norm()
        norms = []
        for bucket in self.buckets:
            # A sum of millions of squares loses digits in fp32, so only short rows are summed in it;
            # in fp64 throughout, torch would first make a copy of all gradients.
            rows = bucket.world.own_part(bucket.gradients).view(-1, ALIGNMENT)
            norms.append(torch.linalg.vector_norm(rows, dim=1))
        return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
