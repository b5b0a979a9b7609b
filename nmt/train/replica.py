"""Makes a model train fast without changing it: compiled code, a CUDA graph, gradients summed over
ranks.

The model knows nothing about it. Every micro-batch of a run has one shape, so its forward and
backward pass is compiled once, recorded as one CUDA graph, and replayed: the same graph on every
rank, with dropout drawn from the micro-batch's own seed. Gradients accumulate in one flat fp32
buffer, which is summed over the ranks once, after the last micro-batch of an update. With
`training.shard`, each rank instead holds only a share of weights, gradients and moments (FSDP2).
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig, TrainingConfig
from nmt.data.batch import Batch, BatchShape, Packed
from nmt.model.attention_triton import WIDEST_HEAD, can_attend
from nmt.model.packed_attention import load_compiled
from nmt.model.transformer import Transformer
from nmt.system.cuda_graph import capture
from nmt.system.kernels import COMPILER_REMEDY, summarize_error, triton
from nmt.system.memory import is_out_of_memory
from nmt.system.progress import say
from nmt.system.ranks import World, gather_shards
from nmt.train.loss import Objective
from nmt.train.loss_triton import can_compute_loss

BACKEND = "inductor"
# Elements; each gradient starts at a multiple of this in the flat buffer, so that kernels can use
# wide loads.
ALIGNMENT = 64


def is_compiled(training: TrainingConfig, device: str) -> bool:
    """Whether the config asks for compiled code on this type of device."""
    if training.compile == "auto":
        return device == "cuda" and not training.shard
    return training.compile == "on"


def has_fixed_shape(model: ModelConfig, training: TrainingConfig, world: World) -> bool:
    """Whether all micro-batches must have one shape, because code is compiled for it."""
    if not is_compiled(training, world.device.type):
        return False
    if world.device.type == "cpu":
        return True
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    heads = model.key_size, model.value_size
    reason = None
    if model.attention_dropout:
        reason = "the attention kernels have no dropout (model.attention_dropout)"
    elif triton is None:
        reason = "Triton is not installed"
    elif max(heads) > WIDEST_HEAD:
        reason = f"the attention kernels support heads of at most {WIDEST_HEAD}"
    if reason is not None and world.is_main:
        say(f"warning: the model is not compiled, so training is slower: {reason}")
    is_able = reason is None and can_attend(world.device, dtype, *heads)
    is_able = is_able and can_compute_loss(world.device, dtype)
    # on no rank unless on all: batches of another shape would hold other sentences
    n_able = world.sum(torch.tensor(float(is_able)))
    return n_able.item() == world.size


def name_engine(model: ModelConfig, precision: str, device: torch.device) -> str | None:
    """Name what computes attention on a CPU: whether numba works decides the last bits of a run. None
    on a GPU.
    """
    if device.type != "cpu":
        return None
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    is_numba = not model.attention_dropout and load_compiled(dtype) is not None
    return "numba" if is_numba else "torch"


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
            self.compute_sums, fullgraph=is_one_graph, dynamic=False, backend=BACKEND
        )

    def compute_sums(
        self,
        src_tokens: Tensor,
        src_offsets: Tensor,
        tgt_tokens: Tensor,
        tgt_offsets: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        src = Packed(src_tokens, src_offsets, self.shape.longest, self.shape.tokens)
        tgt = Packed(tgt_tokens, tgt_offsets, self.shape.longest, self.shape.tokens)
        return self.objective(Batch(src, tgt, labels, 0))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.compiled_sums(*batch.tensors)


def forward_backward(
    objective: nn.Module, batch: Batch, scale: Tensor | float, is_bf16: bool
) -> Tensor:
    """Add the gradient of scale * the smoothed loss; return the sums of the smoothed and the plain
    loss, on the device.
    """
    with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=is_bf16):
        loss, nll = objective(batch)
    (loss * scale).backward()
    return torch.stack((loss.detach(), nll))


class FlatGradients:
    """The gradients of all parameters, end to end in one fp32 buffer whose address never changes."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        begins, end = [], 0
        for p in parameters:
            begins.append(end)
            end += -(-p.numel() // ALIGNMENT) * ALIGNMENT
        self.buffer = torch.zeros(end, device=parameters[0].device)
        for p, begin in zip(parameters, begins, strict=True):
            p.grad = self.buffer[begin : begin + p.numel()].view_as(p)


class Replica:
    """An objective on this rank: runs micro-batches, each adding to the gradients, and sums those
    over ranks.

    With a fixed shape, micro-batches run as compiled code, on a GPU as one CUDA graph. A batch of
    any other shape runs eagerly; only BPE-dropout without data.clean.max_pieces can make one.
    """

    def __init__(
        self,
        objective: Objective,
        world: World,
        is_bf16: bool,
        shape: BatchShape | None = None,
        is_sharded: bool = False,
    ) -> None:
        self.objective, self.is_bf16, self.shape = objective, is_bf16, shape
        self.compiled: CompiledObjective | None = None
        self.flat: FlatGradients | None = None
        self.replay: Callable[[], Tensor] | None = None
        self.frozen: list[nn.Parameter] = []
        is_cuda = world.device.type == "cuda"
        if is_sharded and world.size > 1:
            shard_model(objective, world)
        elif (
            is_cuda or world.size > 1
        ):  # a single CPU rank saves a pass over the gradients by having no buffer
            self.flat = FlatGradients(list(objective.parameters()))
        if shape is not None:
            # The table must have its final address before a graph records it.
            objective.model.reserve_positions(shape.longest)
            self.compiled = CompiledObjective(objective, shape, is_one_graph=is_cuda)

    def run(self, batch: Batch, scale: float, seed: int) -> Tensor:
        """Add the gradient of scale * the smoothed loss of `batch`, with dropout drawn from `seed`.
        Return the sums of the smoothed and the plain loss, on the device; the next call may
        overwrite them."""
        has_shape = self.shape is not None and batch.has_shape(self.shape)
        if has_shape and self.compiled is not None and self.replay is None:
            self.record(batch)
        if not has_shape or self.replay is None:
            torch.manual_seed(seed)
            return forward_backward(self.objective, batch, scale, self.is_bf16)
        for recorded, new in zip(self.inputs.tensors, batch.tensors, strict=True):
            recorded.copy_(new)
        self.scale.fill_(scale)
        torch.manual_seed(seed)
        return self.replay()

    def record(self, batch: Batch) -> None:
        """Compile and record the forward and backward pass over batches of this shape. If
        compiling fails, batches run eagerly; if recording fails, the compiled code runs without a
        graph. Either gives a warning.
        """
        compiled, device = self.compiled, batch.labels.device
        assert compiled is not None
        src, tgt = _clone(batch.src), _clone(batch.tgt)
        self.inputs = Batch(src, tgt, batch.labels.clone(), batch.n_tokens)
        self.scale = torch.zeros((), device=device)
        model = self.objective.model
        # The graph reads these tables. Decoding may replace them with longer ones, so the old ones
        # are kept alive here.
        self.tables = model.src_positions.table, model.tgt_positions.table

        def work() -> Tensor:
            return forward_backward(compiled, self.inputs, self.scale, self.is_bf16)

        before = None if self.flat is None else self.flat.buffer.clone()
        try:
            self.replay = capture(work, device)
            if device.type == "cpu":
                work()  # nothing is recorded, but this compiles
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason, self.replay = summarize_error(error), None
            is_dynamo = isinstance(error, torch._dynamo.exc.TorchDynamoException)
            if is_dynamo or not isinstance(error, RuntimeError):
                say(
                    "warning: the model cannot be compiled, so training is much slower: "
                    f"{reason}; {COMPILER_REMEDY}"
                )
                self.compiled = None
            else:
                say(f"warning: the CUDA graph cannot be recorded, so training is slower: {reason}")
                self.replay = work
        if self.flat is not None and before is not None:
            self.flat.buffer.copy_(before)  # recording ran the work, which added to the gradients

    def freeze(self, parts: Collection[str]) -> None:
        """Keep the weights of these parts of the model as they are. Parts are "encoder", "decoder"
        and "embeddings", which are all else: a matrix that is also the projection, and positions.
        """
        for name, parameter in self.objective.model.named_parameters():
            part = name.split(".")[0].removesuffix("_norm")
            if part not in ("encoder", "decoder"):
                part = "embeddings"
            if part in parts:
                self.frozen.append(parameter)

    def sum_gradients(self, world: World) -> None:
        """Make each rank's gradients the sum over all ranks."""
        # Adam moves no weight whose gradient was always zero.
        for parameter in self.frozen:
            if parameter.grad is not None:
                parameter.grad.zero_()
        if self.flat is not None:
            world.sum_in_place(self.flat.buffer)

    def clear_gradients(self) -> None:
        if self.flat is None:
            self.objective.zero_grad()
        else:
            self.flat.buffer.zero_()

    def gradient_norm(self) -> Tensor:
        """Compute the Euclidean norm of all gradients; it is NaN or infinite if any element is, or if one
        is so large that its square is.
        """
        if self.flat is not None:
            # A sum of millions of squares loses digits in fp32, so only short rows are summed in it;
            # in fp64 throughout, torch would first make a copy of all gradients.
            rows = torch.linalg.vector_norm(self.flat.buffer.view(-1, ALIGNMENT), dim=1)
            return torch.linalg.vector_norm(rows, dtype=torch.float64)
        return total_norm([p.grad for p in self.objective.parameters() if p.grad is not None])


def _clone(side: Packed) -> Packed:
    return Packed(side.tokens.clone(), side.offsets.clone(), side.longest, side.n_live)


def make_replica(
    objective: Objective, world: World, training: TrainingConfig, shape: BatchShape | None
) -> Replica:
    """Make the replica of this rank. Make the optimizer afterwards: sharding replaces the
    parameters.
    """
    assert training.precision != "auto"
    replica = Replica(objective, world, training.precision == "bf16", shape, training.shard)
    replica.freeze(training.freeze)
    return replica


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Compute the Euclidean norm of all elements on all ranks; it is NaN or infinite if any element
    is.
    """
    return gather_shards(nn.utils.get_total_norm(tensors))


def shard_model(objective: Objective, world: World) -> None:
    """Split every weight over the ranks. Gradients are summed after each micro-batch, so that no
    rank ever holds all of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in (*objective.model.encoder, *objective.model.decoder):
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    for module in objective.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # the sum over ranks, not its mean
            module.set_gradient_divide_factor(1.0)


@torch.no_grad()
def gather_model(model: Transformer) -> Transformer:
    """Return a copy with unsharded weights, which one rank can use without the others. All ranks
    must call this.
    """
    copy = Transformer(model.config, *model.sizes).to(next(model.parameters()).device)
    for p, share in zip(copy.parameters(), model.parameters(), strict=True):
        p.copy_(gather_shards(share))
    return copy
