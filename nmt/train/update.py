"""One optimizer update, the same on any number of ranks, and what came of it.

After the last micro-batch one sum makes the gradients those of all ranks. A second, small one tells every rank the loss
and which ranks vote to stop or to save, so that all stop and save together, after the very same update. Where loss or
gradient is NaN or infinite, the optimizer changes nothing. It learns that on the device, so nothing waits: on a GPU an
outcome is read one update later.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.config import RunConfig
from nmt.data.loader import Update
from nmt.system.ranks import World
from nmt.train.optimizer import Adam, learning_rate, set_learning_rate
from nmt.train.parallel import Replica


class StopVotes(NamedTuple):
    """What a rank asks for after an update and, once summed, how many ranks do."""

    interrupt: float = 0  # stop, because of Ctrl-C
    preempt: float = 0  # stop, because of any other signal
    checkpoint: float = 0  # save, because the clock says so
    broken: float = 0  # fail, because checkpoints cannot be written any more


class Figures(NamedTuple):
    """What an update computed, over all ranks."""

    loss: float  # label-smoothed, summed over the target tokens
    nll: float  # likewise
    grad_norm: float

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self)


N_FIGURES = len(Figures._fields)


@dataclass(frozen=True)
class PendingOutcome:
    """What came of an update, still on the device."""

    step: int
    update: Update
    micro_sums: Tensor  # (micro-batches of this rank, 2): smoothed loss and NLL
    values: Tensor  # (N_FIGURES + votes,): `Figures`, then `StopVotes`, over all ranks

    @property
    def figures(self) -> Tensor:
        return self.values[:N_FIGURES]


@dataclass(frozen=True)
class UpdateOutcome:
    """What came of an update, the same on each rank."""

    pending: PendingOutcome
    figures: Figures
    votes: StopVotes

    @property
    def is_applied(self) -> bool:
        return self.figures.is_finite


def micro_seed(seed: int, step: int, number: int) -> int:
    """The seed for the dropout of micro-batch `number` of an update, wherever it runs."""
    text = f"{seed} {step} {number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def run_update(
    replica: Replica,
    optimizer: Adam,
    update: Update,
    step: int,
    config: RunConfig,
    world: World,
    votes: Callable[[], StopVotes] = StopVotes,
) -> PendingOutcome:
    """Run one optimizer update without waiting for its results. This rank is asked for its `votes` near the end."""
    # forward and backward, micro-batch by micro-batch
    micro_sums = torch.zeros(len(update.micros), 2, device=world.device)
    scale = 1.0 / update.n_tgt
    for index, micro in enumerate(update.micros):
        seed = micro_seed(config.seed, step, micro.number)
        micro_sums[index] = replica.run(micro.batch, scale, seed)

    # what all ranks have found together
    replica.sum_gradients(world)
    # The gradient's norm is the same on all ranks, and the sum below must return it.
    grad_norm = replica.gradient_norm() / world.size
    mine = torch.tensor(votes(), dtype=torch.float64).to(world.device, non_blocking=True)
    values = world.sum(torch.cat((micro_sums.double().sum(0), grad_norm.double()[None], mine)))
    outcome = PendingOutcome(step, update, micro_sums, values)

    # one step of the optimizer, unless something is NaN or infinite, on one rank and so on all
    optimizer.found_inf = 1.0 - outcome.figures.isfinite().all().float()
    set_learning_rate(optimizer, learning_rate(step, config.model.d_model, config.optimizer))
    optimizer.step()
    replica.clear_gradients()
    return outcome


class Outcomes:
    """The outcomes of the updates so far, on their way from the device.

    On a GPU the newest is left alone, so that the host never waits for the update that is running.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.in_flight: deque[tuple[PendingOutcome, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, pending: PendingOutcome) -> None:
        event = None
        values = pending.values.to("cpu", non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self.in_flight.append((pending, values, event))

    def completed(self, is_all: bool) -> Iterator[UpdateOutcome]:
        """The next outcomes, in order; `is_all` waits for the newest too."""
        n_left = 0 if is_all or self.device.type == "cpu" else 1
        while len(self.in_flight) > n_left:
            pending, values, event = self.in_flight.popleft()
            if event is not None:
                event.synchronize()
            numbers = values.tolist()
            figures = Figures(*numbers[:N_FIGURES])
            yield UpdateOutcome(pending, figures, StopVotes(*numbers[N_FIGURES:]))
