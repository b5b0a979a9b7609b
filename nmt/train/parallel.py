"""What is applied to a model from outside to train it fast: compiled code, CUDA graphs, replicas over ranks.

The model knows nothing of it. Compiled code wants constant shapes, which the loader gives (`TrainingConfig.room`); one
GPU alone replays forward and backward of a micro-batch as one graph for each shape, into gradients that stay where they
are. Over ranks, DDP sums gradients in a few large buckets during the backward pass of an update's last micro-batch; or
FSDP2 has each rank hold a share of weights, gradients and moments, and gathers a layer's weights when it is its turn.
"""

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nmt.batch import Batch, Packed
from nmt.dist import World, whole
from nmt.model.attention_triton import WIDEST, triton
from nmt.model.transformer import Transformer
from nmt.progress import say
from nmt.train.loss import Objective

BUCKET_MB = 64
BACKEND = "inductor"


class Compiled(nn.Module):
    """An objective (Batch -> sums) as compiled code for each shape; `is_whole`: with kernels, as one graph."""

    def __init__(self, objective: nn.Module, is_whole: bool) -> None:
        super().__init__()
        self.objective = objective
        self.sums = torch.compile(self.plain_sums, fullgraph=is_whole, dynamic=False, backend=BACKEND)

    def plain_sums(self, src: tuple[Tensor, Tensor], longest_src: int, tgt: tuple[Tensor, Tensor], longest_tgt: int,
                   labels: Tensor) -> tuple[Tensor, Tensor]:
        sides = [Packed(tokens, offsets, longest, tokens.numel())
                 for (tokens, offsets), longest in ((src, longest_src), (tgt, longest_tgt))]
        return self.objective(Batch(sides[0], sides[1], labels, 0))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        src, tgt = batch.src, batch.tgt
        return self.sums((src.tokens, src.offsets), src.longest, (tgt.tokens, tgt.offsets), tgt.longest, batch.labels)


class Graph:
    """Forward and backward over one shape, captured; gradients are added to those that the parameters have."""

    def __init__(self, objective: nn.Module, batch: Batch, is_fast: bool) -> None:
        src, tgt = (Packed(side.tokens.clone(), side.offsets.clone(), side.longest, side.n_live)
                    for side in (batch.src, batch.tgt))
        self.batch = Batch(src, tgt, batch.labels.clone(), batch.n_tokens)
        self.scale = torch.zeros((), device=batch.labels.device)
        grads = [p.grad for p in objective.parameters() if p.grad is not None]
        kept = [grad.clone() for grad in grads]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(3):  # compile, tune and allocate
                forward_backward(objective, self.batch, self.scale, is_fast)
        torch.cuda.current_stream().wait_stream(side_stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.sums = forward_backward(objective, self.batch, self.scale, is_fast)
        for grad, before in zip(grads, kept, strict=True):
            grad.copy_(before)

    def replay(self, batch: Batch, scale: float) -> Tensor:
        for mine, given in ((self.batch.src, batch.src), (self.batch.tgt, batch.tgt)):
            mine.tokens.copy_(given.tokens)
            mine.offsets.copy_(given.offsets)
        self.batch.labels.copy_(batch.labels)
        self.scale.fill_(scale)
        self.graph.replay()
        return self.sums


class Captured(Compiled):
    """A compiled objective whose micro-batches are replayed as CUDA graphs."""

    def __init__(self, objective: nn.Module, is_whole: bool) -> None:
        super().__init__(objective, is_whole)
        self.graphs: dict[tuple[object, ...], Graph] = {}
        self.is_off = False

    def run(self, batch: Batch, scale: float, seed: int, is_fast: bool) -> Tensor:
        """As `forward_backward`, with dropout drawn from `seed`."""
        for p in self.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        src, tgt = batch.src, batch.tgt
        key = (src.tokens.shape, src.offsets.shape, src.longest, tgt.tokens.shape, tgt.offsets.shape, tgt.longest)
        if key not in self.graphs and not self.is_off:
            try:
                self.graphs[key] = Graph(self, batch, is_fast)
            except RuntimeError as error:
                self.is_off = True
                say(f"no CUDA graphs, which costs speed: {str(error).splitlines()[0]}")
        torch.manual_seed(seed)
        if self.is_off:
            return forward_backward(self, batch, torch.tensor(scale, device=batch.labels.device), is_fast)
        return self.graphs[key].replay(batch, scale)


def forward_backward(objective: nn.Module, batch: Batch, scale: Tensor | float, is_fast: bool) -> Tensor:
    """Add the gradient of scale * the smoothed loss; returns the (smoothed, plain) sums, on the device."""
    with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=is_fast):
        loss, nll = objective(batch)
    (loss * scale).backward()
    return torch.stack((loss.detach(), nll))


def micro_step(objective: nn.Module, batch: Batch, scale: float, seed: int, is_last: bool, is_fast: bool) -> Tensor:
    """`forward_backward` the way that suits the objective, with dropout drawn from `seed`."""
    if isinstance(objective, Captured):
        return objective.run(batch, scale, seed, is_fast)
    torch.manual_seed(seed)
    with held(objective, is_last):
        return forward_backward(objective, batch, scale, is_fast)


def spread(objective: Objective, world: World, is_compiled: bool = False, is_shared: bool = False) -> nn.Module:
    """`objective` as compiled code, if asked for, and as one replica or share of many, if there are ranks. To be called
    before there is an optimizer, for the parameters of a share are others."""
    is_cuda, config = world.device.type == "cuda", objective.model.config
    if is_shared and world.size > 1:
        return _shared(objective, world)
    module: nn.Module = objective
    if is_compiled:
        is_whole = is_cuda and triton is not None and max(config.key_size, config.value_size) <= WIDEST
        module = (Captured if is_cuda and world.size == 1 else Compiled)(objective, is_whole)
    if world.size == 1:
        return module
    ids = [world.device.index] if is_cuda else None
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of broadcast_buffers' coming name
        return DistributedDataParallel(module, device_ids=ids, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True,
                                       broadcast_buffers=False)  # positions may have grown on one rank


def _shared(objective: Objective, world: World) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in (*objective.model.encoder, *objective.model.decoder):
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


@torch.no_grad()
def whole_model(model: Transformer, vocab_size: int) -> Transformer:
    """A copy with whole weights, which can be used apart from the other ranks."""
    copy = Transformer(model.config, vocab_size).to(next(model.parameters()).device)
    for p, share in zip(copy.parameters(), model.parameters(), strict=True):
        p.copy_(whole(share))
    return copy


def held(module: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Keep gradients local unless this is the update's last micro-batch."""
    hold: Callable[[bool], None] | None = getattr(module, "set_requires_gradient_sync", None)  # of FSDP2
    if hold is not None:
        hold(is_last)
    if is_last or not isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext()
    return module.no_sync()
