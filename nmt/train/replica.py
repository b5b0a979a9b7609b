"""A model on one rank while it trains: micro-batches add to its gradients, which are summed over ranks.

This is plain torch. On GPUs an engine offers a replica that does the same faster
(nmt/engines/cuda/recorded_replica.py), where ranks divide gradients and moments among them.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from nmt.data.batch import Batch
from nmt.system.ranks import OwnShares, World, share_nothing
from nmt.system.tensor_files import Tensors
from nmt.train.loss import Objective


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
    """An objective on this rank."""

    n_at_once = 1  # micro-batches

    def __init__(self, objective: Objective, world: World, is_bf16: bool) -> None:
        self.objective, self.world, self.is_bf16 = objective, world, is_bf16
        self.frozen: list[nn.Parameter] = []

    @property
    def own(self) -> OwnShares:
        """The shares of the parameters that this rank updates."""
        return share_nothing(self.objective.model)

    @property
    def network_bytes(self) -> int:
        """The bytes that a rank sends in an update, and receives."""
        n_bytes = sum(parameter.nbytes for parameter in self.objective.parameters())
        return 2 * n_bytes * (self.world.size - 1) // self.world.size

    def run(self, batch: Batch, scale: float, seed: int) -> Tensor:
        """Add the gradient of scale * the smoothed loss of `batch`, with dropout drawn from `seed`.
        Return the sums of the smoothed and the plain loss, on the device; the next call may
        overwrite them.
        """
        self.set_seed(seed)
        return forward_backward(self.objective, batch, scale, self.is_bf16)

    def set_seed(self, seed: int) -> None:
        """Have the next pass draw its dropout from this seed."""
        torch.manual_seed(seed)

    def run_micros(self, batches: Sequence[Batch], scale: float, seeds: Sequence[int]) -> Tensor:
        """Do `run` with each micro-batch of an update, and return all their sums, (n, 2)."""
        sums = torch.zeros(len(batches), 2, device=self.world.device)
        for index, (batch, seed) in enumerate(zip(batches, seeds, strict=True)):
            sums[index] = self.run(batch, scale, seed)
        return sums

    def sum_gradients(self) -> None:
        """Give all ranks the sums of their gradients, by one collective over all of them end to end.
        After the last micro-batch of an update all ranks must call this.
        """
        if self.world.size == 1:
            return
        parameters = list(self.objective.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = torch.cat([gradient.flatten() for gradient in gradients])
        self.world.sum_in_place(total)
        sums = total.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, sums, strict=True):
            parameter.grad = part.view_as(parameter)

    def freeze(self, names: Collection[str]) -> None:
        """Keep the weights of these parts of the model as they are. Parts are "encoder", "decoder"
        and "embeddings", which are all else: a matrix that is also the projection, and positions.
        """
        for name, parameter in self.objective.model.named_parameters():
            part = name.split(".")[0].removesuffix("_norm")
            if part not in ("encoder", "decoder"):
                part = "embeddings"
            if part in names:
                self.frozen.append(parameter)

    def drop_frozen_gradients(self) -> None:
        """Zero the gradients of frozen weights, because Adam moves none whose gradient was always
        zero.
        """
        for parameter in self.frozen:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def clear_gradients(self) -> None:
        self.objective.zero_grad()

    def gather_weights(self) -> None:
        """Give the model all weights; after an update a rank may have new ones only for its shares. All
        ranks must call this.
        """

    def gather(self, own: Tensors) -> Tensors:
        """Make whole tensors, on the main rank, of what each rank has one of for each of its shares,
        such as moments. All ranks must call this.
        """
        return own

    def gradient_norm(self) -> Tensor:
        """Compute the Euclidean norm of this rank's share of the gradients; it is NaN or infinite if
        any element is, or if one is so large that its square is.
        """
        norm = nn.utils.get_total_norm(
            [p.grad for p in self.objective.parameters() if p.grad is not None]
        )
        # All ranks have the same sums, which count once.
        return norm if self.world.is_main else torch.zeros_like(norm)
