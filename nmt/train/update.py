"""One optimizer update, the same on any number of ranks, and what came of it.

After the last micro-batch one sum makes the gradients those of all ranks, and a small one tells all of them the loss
and what any of them wishes: so they stop and save together, at the very next boundary. Where loss or gradient is NaN or
infinite, the optimizer changes nothing. It learns so on the device: on a GPU an outcome is read one update later.
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


class Wishes(NamedTuple):
    """How many ranks wish for what at the end of this update."""

    interrupt: float = 0  # Ctrl-C
    preempt: float = 0  # any other signal that asks for an end
    late: float = 0  # the checkpoint that the clock asks for
    broken: float = 0  # checkpoints cannot be written any more


@dataclass(frozen=True)
class Sent:
    """An outcome on its way from the device."""

    step: int
    update: Update
    micro_sums: Tensor  # (micro-batch, 2): smoothed loss and NLL
    figures: Tensor  # smoothed loss, NLL, gradient norm, wishes, over all ranks


@dataclass(frozen=True)
class Outcome:
    """What came of an update, over all ranks and the same on each."""

    sent: Sent
    loss: float  # sums over the target tokens
    nll: float
    norm: float  # of the gradient
    wishes: Wishes

    @property
    def is_applied(self) -> bool:
        return all(map(math.isfinite, (self.loss, self.nll, self.norm)))


def micro_seed(seed: int, step: int, number: int) -> int:
    """What seeds the dropout of micro-batch `number` of an update, wherever it runs."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=7).digest()
    )


def run_update(
    replica: Replica,
    optimizer: Adam,
    update: Update,
    step: int,
    config: RunConfig,
    world: World,
    wishes: Callable[[], Wishes] = Wishes,
) -> Sent:
    """One optimizer update; nothing of it is waited for. `wishes` are asked for at its end."""
    # forward and backward, micro-batch by micro-batch
    micro_sums = torch.zeros(len(update.micros), 2, device=world.device)
    scale = 1.0 / update.n_tgt
    for index, micro in enumerate(update.micros):
        seed = micro_seed(config.seed, step, micro.number)
        micro_sums[index] = replica.run(micro.batch, scale, seed)

    # what all ranks have found together
    replica.sum_gradients(world)
    norm = (
        replica.gradient_norm() / world.size
    )  # which is equal on all ranks, and summed over them below
    mine = torch.tensor(wishes(), dtype=torch.float64).to(world.device, non_blocking=True)
    figures = world.sum(torch.cat((micro_sums.double().sum(0), norm.double()[None], mine)))

    # one step of the optimizer, unless something is NaN or infinite, on one rank and so on all
    optimizer.found_inf = 1.0 - figures[:3].isfinite().all().float()
    set_learning_rate(optimizer, learning_rate(step, config.model.d_model, config.optimizer))
    optimizer.step()
    replica.clear_gradients()
    return Sent(step, update, micro_sums, figures)


class Outcomes:
    """Those of the updates sent so far. On a GPU the newest is left alone, so that work never waits for its figures."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flying: deque[tuple[Sent, Tensor, torch.cuda.Event | None]] = deque()

    def send(self, sent: Sent) -> None:
        event = None
        figures = sent.figures.to("cpu", non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self.flying.append((sent, figures, event))

    def arrived(self, is_all: bool) -> Iterator[Outcome]:
        """The next ones, in order; `is_all`: wait for the newest too."""
        while len(self.flying) > (0 if is_all or self.device.type == "cpu" else 1):
            sent, figures, event = self.flying.popleft()
            if event is not None:
                event.synchronize()
            loss, nll, norm, *wishes = figures.tolist()
            yield Outcome(sent, loss, nll, norm, Wishes(*wishes))
