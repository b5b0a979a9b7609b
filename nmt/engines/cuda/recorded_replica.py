"""Makes a model train fast without changing it: compiled code, a CUDA graph, an update divided among
ranks.

The model knows nothing about it. Every micro-batch of a run has one shape, so its forward and
backward pass is compiled once, recorded as one CUDA graph, and replayed: the same graph on every
rank and for every micro-batch, with dropout drawn from the micro-batch's own seed. The graph ends with
its gradients. What follows happens between graphs: gradients add up in flat fp32 buffers, and ranks sum
them and collect new weights (shares.py).

FSDP2 can be recorded, too, since torch 2.11. It divides each tensor, so that a model may be larger than a
GPU; here each layer would be a collective of its own, for models that fit many times.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nmt.config import ModelConfig, TrainingConfig
from nmt.data.batch import Batch, BatchShape, Packed
from nmt.engines.cuda.attention_triton import WIDEST_HEAD, can_attend
from nmt.engines.cuda.cuda_graph import capture, warm_up
from nmt.engines.cuda.kernels import COMPILER_REMEDY, summarize_error, triton
from nmt.engines.cuda.loss_triton import can_compute_loss
from nmt.engines.cuda.shares import Shares
from nmt.model.transformer import Transformer
from nmt.system.memory import is_out_of_memory
from nmt.system.progress import say
from nmt.system.ranks import OwnShares, World
from nmt.system.tensor_files import Tensors
from nmt.train.loss import Objective
from nmt.train.replica import Replica

BACKEND = "inductor"
# (batch, what it reads in place of the parameters) -> the sums of the smoothed and the plain loss
RunObjective = Callable[[Batch, dict[str, Tensor]], tuple[Tensor, Tensor]]
# The gradients are in the order of what was read.
SumsAndGradients = tuple[Tensor, tuple[Tensor, ...]]


def has_fixed_shape(model: ModelConfig, training: TrainingConfig, world: World) -> bool:
    """Whether all micro-batches must have one shape, because code is compiled for it."""
    if training.compile == "off":
        return False
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
    """An objective (Batch, used weights -> sums) as compiled code for batches of one shape."""

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

    def forward(self, batch: Batch, used: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.compiled_sums(self.objective, used, self.shape, *batch.tensors)


def _compute_sums(
    objective: nn.Module,
    used: dict[str, Tensor],
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
    return functional_call(objective, used, (Batch(src, tgt, labels, 0),))


class Recording:
    """The forward and backward pass of micro-batches of one shape. First `prepare` it, then `capture` it as
    a graph, then `replay` it for each batch; without a graph it can be replayed, too.
    """

    def __init__(
        self, compute: Callable[[Batch, Tensor], SumsAndGradients], batch: Batch, model: Transformer
    ) -> None:
        # The graph reads these tensors; each batch is copied into them.
        self.inputs = deepcopy(batch)
        self.scale = torch.zeros((), device=batch.labels.device)
        # Decoding may replace these tables with longer ones, so the old ones are kept alive here.
        self.tables = model.src_positions.table, model.tgt_positions.table
        self.launch: Callable[[], SumsAndGradients] = partial(compute, self.inputs, self.scale)

    def prepare(self) -> None:
        """Compile the pass, and allocate what stays."""
        warm_up(self.launch, self.scale.device)

    def capture(self) -> None:
        self.launch = capture(self.launch, self.scale.device)

    def replay(self, batch: Batch, scale: float) -> SumsAndGradients:
        """Return the sums and gradients of a batch, which the next call overwrites."""
        for recorded, new in zip(self.inputs.tensors, batch.tensors, strict=True):
            recorded.copy_(new)
        self.scale.fill_(scale)
        return self.launch()


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
        whole: Sequence[str] = (),
    ) -> None:
        super().__init__(objective, world, is_bf16)
        self.shape = shape
        self.shares = Shares(objective.model, world, is_bf16, whole)
        # what the objective reads in place of its parameters
        self.used = {f"model.{name}": used for name, used in self.shares.used.items()}
        self.is_first = True  # of an update, the next micro-batch
        self.compiled: CompiledObjective | None = None
        self.recording: Recording | None = None
        if shape is not None:
            # The table must have its final address before a graph records it.
            objective.model.reserve_positions(shape.longest)
            is_cuda = world.device.type == "cuda"
            self.compiled = CompiledObjective(objective, shape, is_one_graph=is_cuda)

    @property
    def own(self) -> OwnShares:
        return self.shares.own

    @property
    def network_bytes(self) -> int:
        return self.shares.network_bytes

    def run(self, batch: Batch, scale: float, seed: int) -> Tensor:
        if self.is_first:
            self.shares.collect_weights()
        recording = self.find_recording(batch)
        torch.manual_seed(seed)
        if recording is None:
            sums, gradients = self.compute(self.run_eagerly, batch, scale)
        else:
            sums, gradients = recording.replay(batch, scale)
        self.shares.add_gradients(gradients, self.is_first)
        self.is_first = False
        return sums

    def run_eagerly(self, batch: Batch, used: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return functional_call(self.objective, used, (batch,))

    def compute(
        self, objective: RunObjective, batch: Batch, scale: Tensor | float
    ) -> SumsAndGradients:
        """Run forward and backward."""
        with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=self.is_bf16):
            loss, nll = objective(batch, self.used)
        gradients = torch.autograd.grad(
            loss * scale, list(self.used.values()), materialize_grads=True
        )
        return torch.stack((loss.detach(), nll)), gradients

    def find_recording(self, batch: Batch) -> Recording | None:
        """Return what runs batches of this shape, made when the first comes; None if they run eagerly."""
        if self.shape is None or not batch.has_shape(self.shape):
            return None
        if self.recording is None and self.compiled is not None:
            self.record(self.compiled, batch)
        return self.recording

    def record(self, compiled: CompiledObjective, batch: Batch) -> None:
        """Compile and record the pass over batches of this shape. If compiling fails, batches run
        eagerly; if recording fails, the compiled code runs without a graph. Either gives a warning, and
        on one rank makes all go the same way.
        """
        recording = Recording(partial(self.compute, compiled), batch, self.objective.model)
        fault = self.find_fault(recording.prepare)
        if fault is not None:
            say(
                "warning: the model cannot be compiled, so training is much slower: "
                f"{fault}; {COMPILER_REMEDY}"
            )
            self.compiled = None
            return
        compiled_pass = recording.launch
        fault = self.find_fault(recording.capture)
        if fault is not None:
            say(f"warning: the CUDA graph cannot be recorded, so training is slower: {fault}")
            recording.launch = compiled_pass  # this rank may have its graph
        self.recording = recording

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

    def sum_gradients(self) -> None:
        self.shares.sum_gradients()

    def clear_gradients(self) -> None:
        self.is_first = True  # the next update replaces them

    def gather_weights(self) -> None:
        self.shares.gather_weights()

    def gather(self, own: Tensors) -> Tensors:
        return self.shares.gather(own)

    def gradient_norm(self) -> Tensor:
        return self.shares.gradient_norm()
