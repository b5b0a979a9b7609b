"""Divides the work of an update: each rank sums, keeps and updates a share of everything.

Weights and gradients lie end to end in buckets: one for the matrices of each layer, and one for everything
else. While the backward pass is still in the layers below, ranks sum the gradients of a layer, and
each gets its own part of the sum (reduce-scatter). Adam updates that part, the only one for which the rank
has moments. With the next update, ranks collect the new weights (all-gather) while the forward pass
is still in the layers below. In bf16, matrices travel in bf16, which is all that products read.

torch's FSDP2 does the same with hooks that end a compiled graph at each layer, so that it could not
be recorded as one CUDA graph; with other graphs, dropout would depend on the number of ranks. Here a
layer asks for its weights and hands over its gradients by two operations, which the compiler leaves
where they are. Sums always begin in the same order, so they repeat bit by bit where NCCL's own do.

A single GPU has no other rank to share with, but uses the same two operations: each copies all tensors of a
layer by one kernel, where autograd would launch one for each tensor.
"""

import itertools
from collections.abc import Iterator
from copy import copy
from typing import Any
from weakref import WeakValueDictionary, proxy

import torch
from torch import Tensor, nn

from nmt.system.ranks import Share, World, share_nothing
from nmt.system.tensor_files import Tensors
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
        self.dtype = torch.bfloat16 if is_bf16 else torch.float32  # of what forward passes use
        self.gathering: torch.distributed.Work | None = None
        self.is_complete = False  # the gradients of an update
        if world.size == 1:
            return
        self.weights = torch.zeros(self.size, device=device)
        for p, weight in zip(parameters.values(), self.cut(self.weights), strict=True):
            weight.copy_(p.detach())
            p.data = weight
        # what ranks collect and forward passes use: the weights themselves, except in bf16
        self.used = self.weights.to(self.dtype)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat tensor, in the parameter's shape."""
        starts = zip(self.begins, self.parameters.values(), strict=True)
        return [flat[begin : begin + p.numel()].view_as(p) for begin, p in starts]

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

    def wait_for_weights(self) -> list[Tensor]:
        """Return what forward passes use, once it has arrived."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        if self.world.size == 1:
            return [p.detach() for p in self.parameters.values()]
        return self.cut(self.used)

    def gather(self, own: Tensors, shares: dict[str, Share]) -> Tensors:
        """Make whole tensors, on the main rank and in its memory, of what each rank has one of for
        each of its shares. All ranks must call this.
        """
        flat = torch.zeros_like(self.gradients)
        for name, whole in zip(self.parameters, self.cut(flat), strict=True):
            if name in own:
                shares[name].cut_from(whole).copy_(own[name])
        self.world.start_gathering(flat).wait()
        if not self.world.is_main:
            return {}
        return dict(zip(self.parameters, self.cut(flat.cpu()), strict=True))


class Shares:
    """This rank's shares of a model, and what ranks do for each other during a micro-batch. A single
    rank has all of it.
    """

    def __init__(
        self, objective: Objective, world: World, is_bf16: bool, has_sums_apart: bool = False
    ) -> None:
        self.world = world
        # Whether the first micro-batch of an update collects the weights, or somebody has done it before.
        self.collects_within = world.size > 1 and not has_sums_apart
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
                matrices = {f"{side}.{number}.{name}": layer.get_parameter(name) for name in names}
                for name in matrices:
                    del rest[name]
                self.layers.append(Bucket(matrices, world, is_bf16))
                layers.append(SharingLayer(layer, names, self, self.layers[-1]))
            model._modules[side] = layers
        # Vectors and embeddings, which are read in fp32 too, so no rank may see them rounded.
        self.rest = Bucket(rest, world)
        # What no layer hands over, with its part of the flat gradients.
        totals = self.rest.cut(self.rest.gradients)
        self.others = [
            (p, total)
            for (name, p), total in zip(rest.items(), totals, strict=True)
            if not name.startswith(("encoder.", "decoder."))
        ]
        self.buckets = [self.rest, *self.layers]
        self.own = share_nothing(objective.model)
        if world.size > 1:
            self.own = {
                name: share for bucket in self.buckets for name, share in bucket.find_shares()
            }
        # Whether a micro-batch is the first of an update, whose gradients replace those of the last
        # update, and whether it is the last, within which gradients are summed.
        self.is_first = self.is_last = False
        self.waiting = list(self.buckets)  # for their gradients to be complete and then summed
        self.sums: list[torch.distributed.Work] = []

    def start(self, is_first: bool, is_last: bool) -> None:
        """Before a micro-batch of an update: if it is the first, begin to collect new weights."""
        self.is_first, self.is_last, self.waiting = is_first, is_last, list(self.buckets)
        self.sums.clear()  # a micro-batch that failed leaves some
        for bucket in self.layers:
            bucket.is_complete = False
        if is_first:
            for p, _ in self.others:
                p.grad = None  # so that nothing is added to the old gradient
        if is_first and self.collects_within:
            for bucket in self.buckets:
                bucket.start_gathering()
            self.rest.wait_for_weights()

    def add(self, layer: "SharingLayer", matrices: list[Tensor], vectors: list[Tensor]) -> None:
        """Add gradients of a layer to those of the update; begin to sum what is complete."""
        for parameters, gradients in ((layer.matrices, matrices), (layer.vectors, vectors)):
            totals = [p.grad for p in parameters if p.grad is not None]
            # copied by one kernel for all of them
            fill = torch._foreach_copy_ if self.is_first else torch._foreach_add_
            fill(totals, gradients)
        if self.is_last:
            layer.bucket.is_complete = True
            # always from the last layer to the first, because all ranks must sum in one order
            while self.waiting[-1].is_complete:  # the rest is first in the list, and never is
                self.sums.append(self.world.start_sum(self.waiting.pop().gradients))

    def finish(self) -> None:
        """After a micro-batch; if it is the last of an update, wait for all sums."""
        if self.is_first:
            for p, total in self.others:
                total.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
                p.grad = total
        if self.is_last:
            self.sum_gradients()

    def sum_gradients(self) -> None:
        """Sum all gradients that still wait for it, and wait for all sums. Those of the next update wait
        again.
        """
        while self.waiting:
            self.sums.append(self.world.start_sum(self.waiting.pop().gradients))
        for work in self.sums:
            work.wait()
        self.sums.clear()
        self.waiting = list(self.buckets)

    def collect_weights(self) -> None:
        """Collect all new weights, and wait for them."""
        for bucket in self.buckets:
            bucket.start_gathering()
        for bucket in self.buckets:
            bucket.wait_for_weights()

    @property
    def network_bytes(self) -> int:
        """The bytes that a rank sends in an update, and receives: gradients and new weights."""
        sent = sum(bucket.gradients.nbytes + bucket.used.nbytes for bucket in self.buckets)
        return sent * (self.world.size - 1) // self.world.size

    def gather_weights(self) -> None:
        """Give all ranks all current weights, for code that reads the model itself."""
        if self.world.size > 1:
            for bucket in self.buckets:
                self.world.start_gathering(bucket.weights).wait()

    def gather(self, own: Tensors) -> Tensors:
        """Make whole tensors of what each rank has one of for each of its shares, such as moments."""
        if self.world.size == 1:
            return own
        whole: Tensors = {}
        for bucket in self.buckets:
            whole |= bucket.gather(own, self.own)
        return whole


# ---- a layer, compiled or not ------------------------------------------------------------------------------------

# What a compiled graph calls has tensors and numbers as arguments, so here a number is a layer. It is a
# constant of the compiled code: the same numbers find code that was compiled for an earlier model.
_sharing: WeakValueDictionary[int, "SharingLayer"] = WeakValueDictionary()


def _find_free_number() -> int:
    """Return the smallest number that no living layer has."""
    return next(number for number in itertools.count() if number not in _sharing)


class SharingLayer(nn.Module):
    """A layer that computes with collected weights and whose gradients are summed over ranks."""

    def __init__(self, layer: nn.Module, names: list[str], shares: Shares, bucket: Bucket) -> None:
        super().__init__()
        self.layer, self.bucket = layer, bucket
        # not a reference, because the shares have one to this
        self.shares: Shares = proxy(shares)
        vectors = {name: p for name, p in layer.named_parameters() if name not in names}
        self.names = [*names, *vectors]
        self.matrices, self.vectors = list(bucket.parameters.values()), list(vectors.values())
        self.number = _find_free_number()
        _sharing[self.number] = self
        # A compiler drops what has no result, so handing over gradients has one: that of this token.
        self.token = torch.zeros(1, device=self.matrices[0].device, requires_grad=True)

    def forward(self, *args: Any) -> Any:
        used = _UseWeights.apply(
            self.token, self.number, len(self.matrices), *self.matrices, *self.vectors
        )
        return torch.func.functional_call(
            self.layer, dict(zip(self.names, used, strict=True)), args
        )


class _UseWeights(torch.autograd.Function):
    """(matrices and vectors of a layer) -> the same as forward passes use them."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, number: int, n_matrices: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.number, ctx.n_matrices = number, n_matrices
        vectors = [vector.view_as(vector) for vector in parameters[n_matrices:]]
        if torch.compiler.is_compiling():
            matrices = torch.ops.nmt.use_weights(token, number, list(parameters[:n_matrices]))
        else:
            bucket = _sharing[number].bucket
            matrices = [matrix.to(bucket.dtype) for matrix in bucket.wait_for_weights()]
        return (*matrices, *vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_matrices, of_vectors = gradients[: ctx.n_matrices], gradients[ctx.n_matrices :]
        is_compiling = torch.compiler.is_compiling()
        hand_over = torch.ops.nmt.add_gradients if is_compiling else _hand_over
        for_token = hand_over(ctx.number, list(of_matrices), list(of_vectors))
        return for_token, None, None, *[None] * len(gradients)


def _hand_over(number: int, matrices: list[Tensor], vectors: list[Tensor]) -> None:
    layer = _sharing[number]
    layer.shares.add(layer, matrices, vectors)


@torch.library.custom_op("nmt::use_weights", mutates_args=())
def _use_weights(token: Tensor, number: int, matrices: list[Tensor]) -> list[Tensor]:
    bucket = _sharing[number].bucket
    used = bucket.wait_for_weights()
    # Copies, because compiled code may write into the results of an operation.
    copies = [torch.empty_like(matrix, dtype=bucket.dtype) for matrix in used]
    torch._foreach_copy_(copies, used)
    return copies


@_use_weights.register_fake
def _make_empty_weights(token: Tensor, number: int, matrices: list[Tensor]) -> list[Tensor]:
    dtype = _sharing[number].bucket.dtype
    return [torch.empty_like(matrix, dtype=dtype) for matrix in matrices]


@torch.library.custom_op("nmt::add_gradients", mutates_args=())
def _add_gradients(number: int, matrices: list[Tensor], vectors: list[Tensor]) -> Tensor:
    _hand_over(number, matrices, vectors)
    return vectors[0].new_zeros(1)


@_add_gradients.register_fake
def _make_empty_result(number: int, matrices: list[Tensor], vectors: list[Tensor]) -> Tensor:
    return vectors[0].new_empty(1)
