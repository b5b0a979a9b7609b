"""Makes a model train fast without changing it: compiled code, a CUDA graph, gradients summed over
ranks.

The model knows nothing about it. Every micro-batch of a run has one shape, so its forward and
backward pass is compiled once, recorded as one CUDA graph, and replayed: the same graph on every
rank, with dropout drawn from the micro-batch's own seed. Gradients accumulate in flat fp32 buffers;
those of several ranks are summed with the last micro-batch of an update (shares.py).
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig, TrainingConfig
from nmt.data.batch import Batch, BatchShape, Packed
from nmt.model.attention_triton import WIDEST_HEAD, can_attend
from nmt.system.cuda_graph import capture
from nmt.system.kernels import COMPILER_REMEDY, summarize_error, triton
from nmt.system.memory import is_out_of_memory
from nmt.system.progress import say
from nmt.system.ranks import Share, World, share_nothing
from nmt.train.loss import Objective
from nmt.train.loss_triton import can_compute_loss
from nmt.train.shares import ALIGNMENT, Bucket, Shares

BACKEND = "inductor"


def is_compiled(training: TrainingConfig, device: str) -> bool:
    """Whether the config asks for compiled code on this type of device."""
    if training.compile == "auto":
        return device == "cuda"
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
    ) -> None:
        self.objective, self.is_bf16, self.shape = objective, is_bf16, shape
        self.compiled: CompiledObjective | None = None
        self.shares: Shares | None = None
        self.buckets: list[Bucket] = []
        # What differs by whether a micro-batch is the first and the last of an update.
        self.parts = [(True, True)]
        self.replays: dict[tuple[bool, bool], Callable[[], Tensor]] = {}
        self.frozen: list[nn.Parameter] = []
        is_cuda = world.device.type == "cuda"
        # One memory for all recorded graphs, of which only one runs at a time.
        self.pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self.plain = objective  # what runs where nothing is compiled
        if world.size > 1 or is_cuda:  # a single CPU rank is faster without buffers
            self.shares = Shares(objective, world, is_bf16)
            self.buckets, self.plain = self.shares.buckets, self.shares.objective
            self.parts.append((False, True))
        if world.size > 1:
            self.parts += [(True, False), (False, False)]
        if shape is not None:
            # The table must have its final address before a graph records it.
            objective.model.reserve_positions(shape.longest)
            self.compiled = CompiledObjective(self.plain, shape, is_one_graph=is_cuda)

    @property
    def own(self) -> dict[str, Share]:
        """The shares of the parameters that this rank updates."""
        return share_nothing(self.objective.model) if self.shares is None else self.shares.own

    def run(
        self, batch: Batch, scale: float, seed: int, is_first: bool = True, is_last: bool = True
    ) -> Tensor:
        """Add the gradient of scale * the smoothed loss of `batch`, with dropout drawn from `seed`.
        Return the sums of the smoothed and the plain loss, on the device; the next call may
        overwrite them. With the first micro-batch of an update ranks collect new weights, with the
        last they sum gradients."""
        part = is_first or self.shares is None, is_last or (False, False) not in self.parts
        has_shape = self.shape is not None and batch.has_shape(self.shape)
        if has_shape and self.compiled is not None and part not in self.replays:
            self.record(batch, part)
        if not has_shape or part not in self.replays:
            torch.manual_seed(seed)
            return self.compute(self.plain, batch, scale, part)
        for recorded, new in zip(self.inputs.tensors, batch.tensors, strict=True):
            recorded.copy_(new)
        self.scale.fill_(scale)
        torch.manual_seed(seed)
        return self.replays[part]()

    def compute(
        self, objective: nn.Module, batch: Batch, scale: Tensor | float, part: tuple[bool, bool]
    ) -> Tensor:
        """Run forward and backward, and what ranks do for each other meanwhile."""
        if self.shares is not None:
            self.shares.start(*part)
        sums = forward_backward(objective, batch, scale, self.is_bf16)
        if self.shares is not None:
            self.shares.finish()
        return sums

    def record(self, batch: Batch, part: tuple[bool, bool]) -> None:
        """Compile and record the forward and backward pass over batches of this shape. If
        compiling fails, batches run eagerly; if recording fails, the compiled code runs without a
        graph. Either gives a warning.
        """
        compiled, device = self.compiled, batch.labels.device
        assert compiled is not None
        if not self.replays:
            src, tgt = _clone(batch.src), _clone(batch.tgt)
            self.inputs = Batch(src, tgt, batch.labels.clone(), batch.n_tokens)
            self.scale = torch.zeros((), device=device)
            model = self.objective.model
            # The graph reads these tables. Decoding may replace them with longer ones, so the old
            # ones are kept alive here.
            self.tables = model.src_positions.table, model.tgt_positions.table

        def work() -> Tensor:
            return self.compute(compiled, self.inputs, self.scale, part)

        before = [bucket.gradients.clone() for bucket in self.buckets]
        try:
            if self.shares is not None:
                self.compile_on_all_ranks(compiled, self.shares.world)
            self.replays[part] = capture(work, device, self.pool)
            if device.type == "cpu":
                work()  # nothing is recorded, but this compiles
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = summarize_error(error)
            self.replays.pop(part, None)
            is_dynamo = isinstance(error, torch._dynamo.exc.TorchDynamoException)
            if is_dynamo or not isinstance(error, RuntimeError):
                say(
                    "warning: the model cannot be compiled, so training is much slower: "
                    f"{reason}; {COMPILER_REMEDY}"
                )
                self.compiled = None
            else:
                say(f"warning: the CUDA graph cannot be recorded, so training is slower: {reason}")
                self.replays[part] = work
        for bucket, gradients in zip(self.buckets, before, strict=True):
            bucket.gradients.copy_(gradients)  # recording ran the work, which added to them

    def compile_on_all_ranks(self, compiled: CompiledObjective, world: World) -> None:
        """Compile, before anything waits for other ranks; fail on all ranks if one cannot."""
        found: Exception | None = None
        try:
            self.compute(compiled, self.inputs, self.scale, (False, False))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = error
        n_failed = world.sum(torch.tensor(float(found is not None)))
        if found is not None:
            raise found
        if n_failed:
            raise torch._dynamo.exc.TorchDynamoException("another rank cannot compile it")

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

    def drop_frozen_gradients(self) -> None:
        """Zero the gradients of frozen weights, because Adam moves none whose gradient was always
        zero.
        """
        for parameter in self.frozen:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def clear_gradients(self) -> None:
        if self.shares is None:  # with shares, the next update replaces them
            self.objective.zero_grad()

    def gather_weights(self) -> None:
        """Give the model all weights; after an update a rank has new ones only for its shares. All
        ranks must call this.
        """
        if self.shares is not None:
            self.shares.gather_weights()

    def gradient_norm(self) -> Tensor:
        """Compute the Euclidean norm of this rank's share of the gradients; it is NaN or infinite if
        any element is, or if one is so large that its square is.
        """
        if not self.buckets:
            return nn.utils.get_total_norm(
                [p.grad for p in self.objective.parameters() if p.grad is not None]
            )
        norms = []
        for bucket in self.buckets:
            # A sum of millions of squares loses digits in fp32, so only short rows are summed in it;
            # in fp64 throughout, torch would first make a copy of all gradients.
            rows = bucket.world.own_part(bucket.gradients).view(-1, ALIGNMENT)
            norms.append(torch.linalg.vector_norm(rows, dim=1))
        return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)


def _clone(side: Packed) -> Packed:
    return Packed(side.tokens.clone(), side.offsets.clone(), side.longest, side.n_live)


def make_replica(
    objective: Objective, world: World, training: TrainingConfig, shape: BatchShape | None
) -> Replica:
    """Make the replica of this rank. Make the optimizer afterwards: several ranks move the parameters."""
    assert training.precision != "auto"
    replica = Replica(objective, world, training.precision == "bf16", shape)
    replica.freeze(training.freeze)
    return replica
