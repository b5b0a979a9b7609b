"""Divides the work of an update: each rank sums, keeps and updates a share of everything.

Weights and gradients lie end to end in two flat buffers: one for the matrices of layers, and one for
everything else. After the last micro-batch of an update, ranks sum the gradients, and each gets its own
part of the sum (reduce-scatter). Adam updates that part, the only one for which the rank has moments.
Before the first micro-batch of the next update, ranks collect the new weights (all-gather). In bf16,
matrices travel in bf16, which is all that products read.

Nothing that waits for another rank is part of a recorded micro-batch, so a rank that is lost ends the
others as it does without graphs. A single GPU has no other rank to share with, but uses the same buffers.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from nmt.model.transformer import Transformer
from nmt.system.ranks import OwnShares, Share, World
from nmt.system.tensor_files import Tensors

# Elements; each gradient starts at a multiple of this in its bucket, so that kernels can use wide
# loads.
ALIGNMENT = 64


class Bucket:
    """Some parameters and their gradients, end to end in flat fp32 buffers whose addresses never
    change. If an update needs one of them `whole`, none is divided.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], world: World, is_bf16: bool, whole: Sequence[str]
    ) -> None:
        self.parameters, self.world = parameters, world
        unit = ALIGNMENT
        sizes = [-(-p.numel() // unit) * unit for p in parameters.values()]
        if parameters.keys() & whole:
            unit = max(sizes)  # of which a rank's part has one or several, each for one parameter
            sizes = [unit] * len(sizes)
        *self.begins, end = accumulate(sizes, initial=0)
        unit *= world.size  # so that all ranks' parts have one size
        self.size = -(-end // unit) * unit
        self.gradients = torch.zeros(self.size, device=world.device)
        self.weights = torch.zeros(self.size, device=world.device)
        weights, gradients = self.cut(self.weights), self.cut(self.gradients)
        for name, p in parameters.items():
            weights[name].copy_(p.detach())
            p.data, p.grad = weights[name], gradients[name]
        self.parts = list(gradients.values())
        # what ranks collect and forward passes read: the weights themselves, except in bf16
        self.collected = self.weights
        self.used: dict[str, Tensor] = dict(parameters)
        if is_bf16:
            self.collected = self.weights.bfloat16()
            for name, rounded in self.cut(self.collected).items():
                self.used[name] = rounded.detach().requires_grad_()

    def cut(self, flat: Tensor) -> Tensors:
        """Return each parameter's part of a flat tensor, in the parameter's shape."""
        begins = zip(self.begins, self.parameters.items(), strict=True)
        return {name: flat[begin : begin + p.numel()].view_as(p) for begin, (name, p) in begins}

    def find_shares(self) -> Iterator[tuple[str, Share]]:
        """Yield what this rank updates of each parameter, if it is anything."""
        n_own = self.size // self.world.size
        first = self.world.rank * n_own
        for at, (name, p) in zip(self.begins, self.parameters.items(), strict=True):
            begin, end = max(at, first), min(at + p.numel(), first + n_own)
            if begin < end:
                weight = p
                if end - begin < p.numel():
                    weight = nn.Parameter(self.weights[begin:end])
                    weight.grad = self.gradients[begin:end]
                yield name, Share(weight, begin - at, end - at)

    def gather(self, own: Tensors, shares: OwnShares) -> Tensors:
        """Make whole tensors, on the main rank and in its memory, of what each rank has one of for
        each of its shares. All ranks must call this.
        """
        flat = torch.zeros_like(self.gradients)
        for name, whole in self.cut(flat).items():
            if name in own:
                shares[name].cut_from(whole).copy_(own[name])
        self.world.gather_parts(flat)
        return self.cut(flat.cpu()) if self.world.is_main else {}


class Shares:
    """This rank's shares of a model, and what ranks do for each other between micro-batches. A single
    rank has all of it.
    """

    def __init__(
        self, model: Transformer, world: World, is_bf16: bool, whole: Sequence[str] = ()
    ) -> None:
        self.world = world
        matrices: dict[str, nn.Parameter] = {}
        # Vectors and embeddings, which are read in fp32 too, so no rank may see them rounded.
        rest: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            is_matrix = name.startswith(("encoder.", "decoder.")) and parameter.dim() > 1
            (matrices if is_matrix else rest)[name] = parameter
        self.buckets = [Bucket(rest, world, False, whole), Bucket(matrices, world, is_bf16, whole)]
        self.own: OwnShares = {}
        # what forward passes read instead of each parameter, by name
        self.used: dict[str, Tensor] = {}
        for bucket in self.buckets:
            self.used |= bucket.used
            self.own |= bucket.find_shares()

    def add_gradients(self, gradients: tuple[Tensor, ...], is_first: bool) -> None:
        """Add the gradients of a micro-batch, in the order of `used`, to those of the update. Those of
        the first replace the last update's.
        """
        totals = [part for bucket in self.buckets for part in bucket.parts]
        # by few kernels for all of them
        fill = torch._foreach_copy_ if is_first else torch._foreach_add_
        fill(totals, gradients)

    def sum_gradients(self) -> None:
        """Sum this rank's part of the gradients over all ranks. All ranks must call this."""
        for bucket in self.buckets:
            self.world.sum_parts(bucket.gradients)

    def collect_weights(self) -> None:
        """Give forward passes all new weights. All ranks must call this."""
        own = self.world.own_part
        for bucket in self.buckets:
            if bucket.collected is not bucket.weights:
                own(bucket.collected).copy_(own(bucket.weights))
            self.world.gather_parts(bucket.collected)

    def gather_weights(self) -> None:
        """Give all ranks all current weights, for code that reads the model itself."""
        for bucket in self.buckets:
            self.world.gather_parts(bucket.weights)

    def gather(self, own: Tensors) -> Tensors:
        """Make whole tensors of what each rank has one of for each of its shares, such as moments."""
        if self.world.size == 1:
            return own
        whole: Tensors = {}
        for bucket in self.buckets:
            whole |= bucket.gather(own, self.own)
        return whole

    @property
    def network_bytes(self) -> int:
        """The bytes that a rank sends in an update, and receives: gradients and new weights."""
        n_bytes = sum(bucket.gradients.nbytes + bucket.collected.nbytes for bucket in self.buckets)
        return n_bytes - n_bytes // self.world.size

    def gradient_norm(self) -> Tensor:
        """Compute the Euclidean norm of this rank's part of the gradients."""
        norms = []
        for bucket in self.buckets:
            # A sum of millions of squares loses digits in fp32, so only short rows are summed in it;
            # in fp64 throughout, torch would first make a copy of all gradients.
            rows = self.world.own_part(bucket.gradients).view(-1, ALIGNMENT)
            norms.append(torch.linalg.vector_norm(rows, dim=1))
        return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
