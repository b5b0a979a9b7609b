"""The ranks of a run, as one value that is passed on and never a global.

Started by torchrun there are many ranks, otherwise there is one; the code above does not ask which. Sums over ranks go
through here, so that a single process pays nothing for them.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor

from nmt.errors import UserError
from nmt.process import quicken_products


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over ranks, on every rank."""
        if self.size > 1:
            tensor = tensor.to(self.device, copy=True)
            torch.distributed.all_reduce(tensor)
        return tensor

    def from_main(self, value: float) -> float:
        """The number that rank 0 holds, on every rank."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(tensor, src=0)
        return tensor.item()

    def on_main(self, work: Callable[[], object]) -> None:
        """Rank 0 does `work` while the others wait; a mistake of the user there ends them all."""
        mistake: UserError | None = None
        if self.is_main:
            try:
                work()
            except UserError as error:
                mistake = error
        if self.from_main(mistake is not None):
            if mistake is not None:
                raise mistake
            raise SystemExit(2)  # the main rank tells why

    def barrier(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()


def device_of(local_rank: int = 0) -> torch.device:
    """The fastest device at hand for this process."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def join() -> Iterator[World]:
    """The world that torchrun describes in the environment, or a world of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of(local_rank)
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"torchrun started {local_rank + 1} or more processes here, but there are "
                            f"{torch.cuda.device_count()} GPUs; lower --nproc-per-node")
        torch.cuda.set_device(device)
    else:
        quicken_products()
    if size == 1:
        yield World(0, 1, device)
        return
    # The others wait while the main rank prepares data or decodes the dev set, longer than the usual ten minutes.
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(hours=6))
    try:
        yield World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)
    finally:
        torch.distributed.destroy_process_group()
