"""The ranks of a run, as one value that is passed on and never a global.

With torchrun there are many ranks, otherwise one; the code that uses this does not need to know.
Sums over ranks go through here, so that a single process pays nothing for them. A host that
vanishes must not leave the others waiting: every wait has an end, minutes within an update and
hours while rank 0 works for all.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn

from nmt.system.device import choose_device
from nmt.system.errors import ForeseenError, UserError
from nmt.system.runtime import end_with_parent, limit_connection_silence, read_rank_variable

Found = TypeVar("Found")

REPORT_S = 0.5  # in which rank 0 says what went wrong
# After how much silence a host is given up; Linux would wait for 15 minutes or forever.
SILENCE_S = 120
# In an update all ranks do the same work. Their first updates may be minutes apart, because each
# compiles and reads the checkpoint by itself; a rank that is later than this hangs, and the run
# should end instead of holding its GPUs.
UPDATE_TIMEOUT = timedelta(minutes=10)
# While rank 0 works for all of them: preparing WMT14 on few cores takes hours.
MAIN_TIMEOUT = timedelta(hours=6)


@dataclass(frozen=True)
class World:
    """All ranks of the run, as one of them sees them."""

    rank: int
    size: int
    device: torch.device
    # Of many ranks: the group in which they may wait for hours.
    patient: torch.distributed.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over ranks, on every rank. This is for work that takes all
        ranks about the same time.
        """
        if self.size > 1:
            tensor = tensor.to(self.device, copy=True)
            self.sum_in_place(tensor)
        return tensor

    def sum_in_place(self, tensor: Tensor) -> None:
        """Make a tensor the elementwise sum over ranks."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)

    def own_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a flat tensor that the ranks divide among them."""
        return tensor.chunk(self.size)[self.rank]

    def sum_parts(self, tensor: Tensor) -> None:
        """Sum a flat tensor over ranks, in place. Each rank gets its own part of the sum; what the rest
        of the tensor holds then is undefined.
        """
        if tensor.device.type == "cpu":  # gloo's reduce-scatter takes eight times as long as this
            self.sum_in_place(tensor)
        elif self.size > 1:
            _call("reduce_scatter_single", "reduce_scatter_tensor", self.own_part(tensor), tensor)

    def gather_parts(self, tensor: Tensor) -> None:
        """Copy each rank's own part of a flat tensor to all ranks, in place."""
        if self.size > 1:
            own = self.own_part(tensor)
            _call("all_gather_single", "all_gather_into_tensor", tensor, own)

    def broadcast(self, value: float) -> float:
        """Return the number that rank 0 holds, on every rank, however long rank 0 takes to find it."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        torch.distributed.broadcast(tensor, src=0, group=self.patient)
        return tensor.item()

    def collect(self, data: bytes) -> list[bytes]:
        """Return what each rank gives, in the order of ranks, on rank 0; the others get nothing."""
        if self.size == 1:
            return [data]
        # Bytes, because torch's way to gather objects unpickles what comes over the network.
        length = torch.tensor([len(data)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        torch.distributed.all_gather(lengths, length, group=self.patient)
        longest = int(torch.stack(lengths).max())
        padded = torch.frombuffer(bytearray(data.ljust(max(longest, 1), b"\0")), dtype=torch.uint8)
        gathered = [torch.zeros_like(padded) for _ in range(self.size)] if self.is_main else None
        torch.distributed.gather(padded, gathered, dst=0, group=self.patient)
        pairs = zip(gathered or (), lengths, strict=False)
        return [tensor.numpy().tobytes()[: int(n)] for tensor, n in pairs]

    def on_main(self, work: Callable[[], Found]) -> Found | None:
        """Rank 0 does `work` while the others wait; it gets what `work` returns, the others None.
        Its UserError or Failure ends all ranks, and it alone reports it."""
        result: Found | None = None
        error: ForeseenError | None = None
        if self.is_main:
            try:
                result = work()
            except ForeseenError as caught:
                error = caught
        self.fail_if(error)
        return result

    def fail_if(self, error: ForeseenError | None) -> None:
        """End all ranks if rank 0 has an error, which it alone reports. All ranks must call this."""
        if not self.is_main:
            error = None
        code = 0
        if error is not None:
            code = 2 if isinstance(error, UserError) else 1
        code = int(self.broadcast(code))
        if error is not None:
            raise error
        if code:
            # torchrun ends all ranks once one has failed, and rank 0 has yet to say why
            time.sleep(REPORT_S)
            raise SystemExit(code)

    def decide(self, choose: Callable[[], float]) -> float:
        """Return the number that rank 0 chooses, on every rank, as `on_main` does."""
        return self.broadcast(self.on_main(choose) or 0)

    def run_in_step(
        self, work: Iterable[object], votes: Callable[[], Sequence[float]]
    ) -> list[float]:
        """Each rank goes through its own `work`, which may be empty; after each item the ranks sum
        their votes.

        Ends when all ranks are through, or early when any vote is not 0; returns the sums.
        """
        items = iter(work)
        nothing_left = object()
        while True:
            is_through = next(items, nothing_left) is nothing_left
            values = torch.tensor([*votes(), is_through], dtype=torch.float64)
            if self.size > 1:
                torch.distributed.all_reduce(values, group=self.patient)
            *sums, n_through = values.tolist()
            if any(sums) or n_through == self.size:
                return sums


def _call(name: str, old_name: str, output: Tensor, given: Tensor) -> None:
    """Call a function of torch.distributed that torch 2.13 has renamed."""
    function = getattr(torch.distributed, name, None) or getattr(torch.distributed, old_name)
    function(output, given)


@dataclass(frozen=True)
class Share:
    """The elements of a parameter that this rank updates; without other ranks, all of them."""

    weight: nn.Parameter  # these elements alone
    begin: int = 0  # where they are in the flattened parameter
    end: int | None = None

    def cut_from(self, whole: Tensor) -> Tensor:
        """Return the same elements of another tensor of the parameter's size."""
        return whole.flatten()[self.begin : self.end].view_as(self.weight)


OwnShares = dict[str, Share]  # of a rank, by the name of the parameter


def share_nothing(model: nn.Module) -> OwnShares:
    """Return the shares of a rank that updates all parameters, by name."""
    return {name: Share(parameter) for name, parameter in model.named_parameters()}


def is_rank_lost(error: RuntimeError, world: World) -> bool:
    """Whether the error says that the connection to another rank broke."""
    is_distributed = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
    return world.size > 1 and is_distributed


@contextlib.contextmanager
def join_world(requested: Literal["auto", "cpu"] = "auto") -> Iterator[World]:
    """Return the world that torchrun describes in the environment, or a world of one, on the
    requested device.
    """
    size = read_rank_variable("WORLD_SIZE", 1)
    local_rank = read_rank_variable("LOCAL_RANK", 0)
    if size != 1:
        _check_rank_variables(size)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # torchrun leaves orphans when it is killed
    device = choose_device(requested, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(0, 1, device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=UPDATE_TIMEOUT)
    # gloo on GPUs too: ranks that wait in NCCL keep their GPU busy, and its watchdog ends them.
    patient = torch.distributed.new_group(backend="gloo", timeout=MAIN_TIMEOUT)
    limit_connection_silence(SILENCE_S)
    yield World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device, patient)
    # Not after an exception: it waits for collectives in progress, which ranks that are gone will
    # never join.
    torch.distributed.destroy_process_group()


def _check_rank_variables(size: int) -> None:
    """Refuse what would be a traceback of torch, or a wait for ranks that never start."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(
                f"WORLD_SIZE is {size}, but {name} is not set; unset WORLD_SIZE, or start with torchrun"
            )
    read_rank_variable("MASTER_PORT", 0)
    rank = read_rank_variable("RANK", 0)
    if rank >= size:
        raise UserError(
            f"RANK is {rank}, but WORLD_SIZE is {size}; unset both, or start with torchrun"
        )
