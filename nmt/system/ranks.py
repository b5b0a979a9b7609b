"""The ranks of a run, as one value that is passed on and never a global.

Started by torchrun there are many ranks, otherwise there is one; the code above does not ask which. Sums over ranks go
through here, so that a single process pays nothing for them.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed
from torch import Tensor

from nmt.system.device import choose_device
from nmt.system.errors import Failure, UserError
from nmt.system.runtime import end_with_parent, limit_silence, quicken_products

SILENCE_S = (
    120  # after which a host that vanished is given up; Linux would wait for 15 minutes or forever
)

# In an update all ranks do the same work. Their first updates may be minutes apart, because each compiles and reads the
# checkpoint by itself; a rank that is later than this hangs, and the run should end instead of holding its GPUs.
UPDATE_TIMEOUT = timedelta(minutes=10)
# While rank 0 works for all of them: preparing WMT14 on few cores takes hours.
MAIN_TIMEOUT = timedelta(hours=6)


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    patient: torch.distributed.ProcessGroup | None = (
        None  # of many ranks: the group in which they may wait for hours
    )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over ranks, on every rank. For work that takes all ranks about as long."""
        if self.size > 1:
            tensor = tensor.to(self.device, copy=True)
            torch.distributed.all_reduce(tensor)
        return tensor

    def sum_in_place(self, tensor: Tensor) -> None:
        """Make the tensor of each rank the elementwise sum over ranks."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)

    def from_main(self, value: float) -> float:
        """The number that rank 0 holds, on every rank, however long rank 0 takes to find it."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        torch.distributed.broadcast(tensor, src=0, group=self.patient)
        return tensor.item()

    def on_main(self, work: Callable[[], object]) -> None:
        """Rank 0 does `work` while the others wait; a mistake of the user there ends them all."""
        told: UserError | Failure | None = None
        if self.is_main:
            try:
                work()
            except (UserError, Failure) as error:
                told = error
        code = self.from_main(0 if told is None else 2 if isinstance(told, UserError) else 1)
        if told is not None:
            raise told
        if code:
            raise SystemExit(int(code))  # the main rank tells why

    def go_through(
        self, work: Iterable[object], wishes: Callable[[], Sequence[float]]
    ) -> list[float]:
        """Each rank goes through its own `work`, of which some may have none; after each item they sum what they wish.
        Ends when all are through, or early when any wishes for anything; returns the sums."""
        items = iter(work)
        while True:
            is_through = next(items, items) is items
            figures = torch.tensor([*wishes(), is_through], dtype=torch.float64)
            if self.size > 1:
                torch.distributed.all_reduce(figures, group=self.patient)
            *sums, n_through = figures.tolist()
            if any(sums) or n_through == self.size:
                return sums


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which each rank may hold a share (a DTensor); then all ranks must ask."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def put(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one of which this rank may hold a share."""
    if hasattr(target, "device_mesh"):
        from torch.distributed.tensor import (  # half a second, for those who share weights
            DTensor,
            distribute_tensor,
        )

        assert isinstance(target, DTensor)
        value = distribute_tensor(
            value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(value)


def is_lost(error: RuntimeError, world: World) -> bool:
    """Whether the connection to another rank broke."""
    return world.size > 1 and (
        isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
    )


@contextlib.contextmanager
def join(asked: Literal["auto", "cpu"] = "auto") -> Iterator[World]:
    """The world that torchrun describes in the environment, or a world of one, on the device that was asked for."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # torchrun leaves orphans when it is killed
    device = choose_device(asked, local_rank)
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"torchrun started {local_rank + 1} or more processes here, but there are "
                f"{torch.cuda.device_count()} GPUs; lower --nproc-per-node"
            )
        torch.cuda.set_device(device)
    else:
        quicken_products()
    if size == 1:
        yield World(0, 1, device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=UPDATE_TIMEOUT)
    # gloo on GPUs too: ranks that wait in NCCL keep their GPU busy, and its watchdog ends them.
    patient = torch.distributed.new_group(backend="gloo", timeout=MAIN_TIMEOUT)
    limit_silence(SILENCE_S)
    yield World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device, patient)
    # Not after an exception: it waits for collectives under way, which ranks that are gone will never join.
    torch.distributed.destroy_process_group()
