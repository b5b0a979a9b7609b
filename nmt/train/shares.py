"""Divides the work of an update: each rank sums, keeps and updates a share of everything.

Weights and gradients lie end to end in buckets: one for the matrices of each layer, and one for all
else. While the backward pass is still in the layers below, ranks sum the gradients of a layer, and
each gets its own part of the sum (reduce-scatter). Adam updates that part, for which alone a rank
has moments. With the next update, ranks collect the new weights (all-gather) while the forward pass
is still in the layers below. In bf16, matrices travel in bf16, which is all that products read.

torch's FSDP2 does the same with hooks that end a compiled graph at each layer, so that it could not
be recorded as one CUDA graph; with other graphs, dropout would depend on the number of ranks. Here a
layer asks for its weights and hands over its gradients by two operations, which the compiler leaves
where they are. Sums always begin in the same order, so they repeat bit by bit.
"""

import itertools
from collections.abc import Iterator
from copy import copy
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from nmt.system.ranks import Share, World
from nmt.train.loss import Objective

# Elements; each gradient starts at a multiple of this in its bucket, so that kernels can use wide
# loads.
ALIGNMENT = 64


class Bucket:
    """Some parameters and their gradients, end to end in flat fp32 buffers whose addresses never
    change. A single rank has no need to move its weights there.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], world: World, is_bf16: bool = False
    ) -> None:
        self.parameters, self.world = parameters, world
        self.begins, end = [], 0
        for p in parameters.values():
            self.begins.append(end)
            end += -(-p.numel() // ALIGNMENT) * ALIGNMENT
        unit = ALIGNMENT * world.size  # so that all ranks' parts have one size
        self.size = -(-end // unit) * unit
        device = next(iter(parameters.values())).device
        self.gradients = torch.zeros(self.size, device=device)
        for p, gradient in zip(parameters.values(), self.cut(self.gradients), strict=True):
            p.grad = gradient
        if world.size == 1:
            return
        self.weights = torch.zeros(self.size, device=device)
        for p, weight in zip(parameters.values(), self.cut(self.weights), strict=True):
            weight.copy_(p.detach())
            p.data = weight
        # what ranks collect and forward passes use
        self.used = self.weights
        if is_bf16:
            self.used = torch.zeros(self.size, dtype=torch.bfloat16, device=device)
        self.gathering: torch.distributed.Work | None = None
        self.is_complete = False  # the gradients of an update

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat tensor, in the parameter's shape."""
        places = zip(self.begins, self.parameters.values(), strict=True)
        return [flat[begin : begin + p.numel()].view_as(p) for begin, p in places]

    def find_shares(self) -> Iterator[tuple[str, Share]]:
        """Yield what this rank updates of each parameter, if it is anything."""
        first = self.world.rank * self.size // self.world.size
        end = first + self.size // self.world.size
        for at, (name, p) in zip(self.begins, self.parameters.items(), strict=True):
            own = slice(max(at, first), min(at + p.numel(), end))
            if own.start < own.stop:
                weight = nn.Parameter(self.weights[own])
                weight.grad = self.gradients[own]
                yield name, Share(weight, own.start - at, own.stop - at)

    def start_gathering(self) -> None:
        own = self.world.own_part
        if self.used is not self.weights:
            own(self.used).copy_(own(self.weights))
        self.gathering = self.world.start_gathering(self.used)

    def wait_for_weights(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def gather(self, parts: dict[str, Tensor], shares: dict[str, Share]) -> dict[str, Tensor]:
        """Make whole tensors, on the main rank and in its memory, of what each rank has one of for
        each of its shares. All ranks must call this.
        """
        flat = torch.zeros_like(self.gradients)
        for name, whole in zip(self.parameters, self.cut(flat), strict=True):
            if name in parts:
                shares[name].cut_from(whole).copy_(parts[name])
        self.world.start_gathering(flat).wait()
        if not self.world.is_main:
            return {}
        return dict(zip(self.parameters, self.cut(flat.cpu()), strict=True))


class Shares:
    """This rank's shares of a model, and what ranks do for each other during a micro-batch."""

    def __init__(self, objective: Objective, world: World, is_bf16: bool) -> None:
        self.world = world
        rest = dict(objective.model.named_parameters())
        # A copy of the objective that shares all parameters; only its layers take part.
        self.objective, model = copy(objective), copy(objective.model)
        self.objective._modules = {**objective._modules, "model": model}
        model._modules = dict(model._modules)
        self.layers: list[Bucket] = []
        for side in ("encoder", "decoder"):
            layers = nn.ModuleList()
            for number, layer in enumerate(getattr(model, side)):
                names = [name for name, p in layer.named_parameters() if p.dim() > 1]
                matrices = {name: rest.pop(f"{side}.{number}.{name}") for name in names}
                prefixed = {f"{side}.{number}.{name}": p for name, p in matrices.items()}
                self.layers.append(Bucket(prefixed, world, is_bf16))
                layers.append(SharingLayer(layer, names, self, self.layers[-1]))
            model._modules[side] = layers
        # Vectors and embeddings, which are read in fp32 too, so no rank may see them rounded.
        self.rest = Bucket(rest, world)
        self.buckets = [self.rest, *self.layers]
        self.own = {name: share for bucket in self.buckets for name, share in bucket.find_shares()}
        self.is_last = False  # micro-batch of an update, so that its gradients complete the sums
        self.waiting: list[Bucket] = []  # for their gradients to be complete and then summed
        self.sums: list[torch.distributed.Work] = []

    def start(self, is_first: bool, is_last: bool) -> None:
        """Before a micro-batch of an update: if it is the first, begin to collect new weights."""
        self.is_last, self.waiting = is_last, list(self.layers)
        for bucket in self.layers:
            bucket.is_complete = False
        if is_first:
            for bucket in self.buckets:
                bucket.start_gathering()
            self.rest.wait_for_weights()

    def add(self, bucket: Bucket, gradients: list[Tensor]) -> None:
        """Add gradients of a layer to those of the update; begin to sum what is complete."""
        for total, gradient in zip(bucket.cut(bucket.gradients), gradients, strict=True):
            total.add_(gradient)
        if self.is_last:
            bucket.is_complete = True
            # always from the last layer to the first, because all ranks must sum in one order
            while self.waiting and self.waiting[-1].is_complete:
                self.sums.append(self.world.start_sum(self.waiting.pop().gradients))

    def finish(self) -> None:
        """After a micro-batch; if it is the last of an update, wait for all sums."""
        if not self.is_last:
            return
        self.sums.append(self.world.start_sum(self.rest.gradients))
        for work in self.sums:
            work.wait()
        self.sums.clear()

    @property
    def network_bytes(self) -> int:
        """What a rank sends in an update, and receives: its gradients, and its new weights."""
        sent = sum(bucket.gradients.nbytes + bucket.used.nbytes for bucket in self.buckets)
        return sent * (self.world.size - 1) // self.world.size

    def gather_weights(self) -> None:
        """Give all ranks all weights as they are, for whatever reads the model itself."""
        for bucket in self.buckets:
            self.world.start_gathering(bucket.weights).wait()

    def gather(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make whole tensors of what each rank has one of for each of its shares, such as moments."""
        whole: dict[str, Tensor] = {}
        for bucket in self.buckets:
            whole |= bucket.gather(parts, self.own)
        return whole


# ---- a layer, compiled or not ------------------------------------------------------------------------------------

# What a compiled graph calls has tensors and numbers as arguments, so here a number is a layer.
_sharing: WeakValueDictionary[int, "SharingLayer"] = WeakValueDictionary()
_numbers = itertools.count()


class SharingLayer(nn.Module):
    """A layer that computes with collected weights and whose gradients are summed over ranks."""

    def __init__(self, layer: nn.Module, names: list[str], shares: Shares, bucket: Bucket) -> None:
        super().__init__()
        self.layer, self.names, self.shares, self.bucket = layer, names, shares, bucket
        self.matrices = list(bucket.parameters.values())
        self.number = next(_numbers)
        _sharing[self.number] = self
        # A compiler drops what has no result, so handing over gradients has one: that of this token.
        self.token = torch.zeros(1, device=self.matrices[0].device, requires_grad=True)

    def forward(self, *args: Any) -> Any:
        weights = _UseWeights.apply(self.token, self.number, *self.matrices)
        return torch.func.functional_call(
            self.layer, dict(zip(self.names, weights, strict=True)), args
        )


class _UseWeights(torch.autograd.Function):
    """(matrices of a layer) -> the same as forward passes use them."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, number: int, *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.number = number
        if torch.compiler.is_compiling():
            return tuple(torch.ops.nmt.use_weights(token, number, list(matrices)))
        return tuple(_find_used_weights(number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for_token = None
        if torch.compiler.is_compiling():
            for_token = torch.ops.nmt.add_gradients(ctx.number, list(gradients))
        else:
            _hand_over(ctx.number, list(gradients))
        return for_token, None, *[None] * len(gradients)


def _find_used_weights(number: int) -> list[Tensor]:
    bucket = _sharing[number].bucket
    bucket.wait_for_weights()
    return bucket.cut(bucket.used)


def _hand_over(number: int, gradients: list[Tensor]) -> None:
    layer = _sharing[number]
    layer.shares.add(layer.bucket, gradients)


@torch.library.custom_op("nmt::use_weights", mutates_args=())
def _use_weights(token: Tensor, number: int, matrices: list[Tensor]) -> list[Tensor]:
    # Copies, because compiled code may write into the results of an operation.
    return [weight.clone() for weight in _find_used_weights(number)]


@_use_weights.register_fake
def _make_empty_weights(token: Tensor, number: int, matrices: list[Tensor]) -> list[Tensor]:
    dtype = _sharing[number].bucket.used.dtype
    return [torch.empty_like(matrix, dtype=dtype) for matrix in matrices]


@torch.library.custom_op("nmt::add_gradients", mutates_args=())
def _add_gradients(number: int, gradients: list[Tensor]) -> Tensor:
    _hand_over(number, gradients)
    return gradients[0].new_zeros(1, dtype=torch.float32)


@_add_gradients.register_fake
def _make_empty_result(number: int, gradients: list[Tensor]) -> Tensor:
    return gradients[0].new_empty(1, dtype=torch.float32)
