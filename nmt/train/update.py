"""Runs one optimizer update, identical on any number of ranks, and reads back its outcome.

After the last micro-batch, gradients are summed over all ranks (replica.py). Another, small sum has
the loss and the ranks' votes to stop or save, so all ranks stop or save after the same update.
If the loss or a gradient is NaN or infinite, the optimizer skips the step. That is decided on the
device, so the host does not wait: on a GPU it reads each outcome one update later.

A new figure of each update is a field of `UpdateStats`, of the `Window` that holds its sum
(nmt/checkpoint/checkpoint.py), and of the event that is made of it (events.py).
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.checkpoint.checkpoint import TrainState, Window
from nmt.config import RunConfig
from nmt.data.loader import Update
from nmt.score.score import compute_perplexity
from nmt.system.device import read_peak_memory
from nmt.system.progress import clock
from nmt.train.events import TrainEvent
from nmt.train.optimizer import Adam, learning_rate, set_learning_rate
from nmt.train.replica import Replica


class UpdateStats(NamedTuple):
    """Loss, NLL and gradient norm of an update, over all ranks."""

    loss: float  # label-smoothed, summed over the target tokens
    nll: float  # without label smoothing, summed over the target tokens
    grad_norm: float

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self)


N_STATS = len(UpdateStats._fields)
GRAD_NORM = UpdateStats._fields.index("grad_norm")


class StopVotes(NamedTuple):
    """The requests of one rank after an update, each 0 or 1; once summed, the number of ranks
    making each request.
    """

    interrupt: float = 0  # stop, because of Ctrl-C
    preempt: float = 0  # stop, because of any other signal
    checkpoint: float = 0  # save, because checkpoint_minutes have passed
    finish: float = 0  # end the training, because max_hours have passed


@dataclass(frozen=True)
class PendingOutcome:
    """The outcome of an update, still on the device."""

    step: int
    update: Update
    micro_sums: Tensor  # (micro-batches of this rank, 2): smoothed loss and NLL
    values: Tensor  # (N_STATS + votes,): `UpdateStats`, then `StopVotes`, over all ranks

    @property
    def stats(self) -> Tensor:
        return self.values[:N_STATS]


@dataclass(frozen=True)
class UpdateOutcome:
    """The outcome of an update, copied to the host; the same on every rank."""

    pending: PendingOutcome
    stats: UpdateStats
    votes: StopVotes

    @property
    def is_applied(self) -> bool:
        return self.stats.is_finite


def dropout_seed(seed: int, step: int, number: int) -> int:
    """Return the dropout seed of one micro-batch of an update, the same on whichever rank it runs."""
    text = f"{seed} {step} {number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def run_update(
    replica: Replica,
    optimizer: Adam,
    update: Update,
    step: int,
    config: RunConfig,
    votes: Callable[[], StopVotes] = StopVotes,
) -> PendingOutcome:
    """Run one optimizer update without waiting for its results. `votes` is called late, just before
    they are summed.
    """
    # forward and backward, micro-batch by micro-batch
    batches = [micro.batch for micro in update.micros]
    seeds = [dropout_seed(config.seed, step, micro.number) for micro in update.micros]
    micro_sums = replica.run_micros(batches, 1.0 / update.n_tgt, seeds)

    # combine the results of all ranks
    replica.sum_gradients()
    replica.drop_frozen_gradients()
    square = replica.gradient_norm().double().square()
    own_votes = torch.tensor(votes(), dtype=torch.float64).to(
        replica.world.device, non_blocking=True
    )
    values = replica.world.sum(torch.cat((micro_sums.double().sum(0), square[None], own_votes)))
    values[GRAD_NORM].sqrt_()
    outcome = PendingOutcome(step, update, micro_sums, values)

    # step the optimizer, unless a sum is NaN or infinite; one rank's NaN makes the sum NaN on all
    # ranks
    optimizer.found_inf = 1.0 - outcome.stats.isfinite().all().float()
    clip_norm = config.training.clip_norm
    if clip_norm is not None:  # Adam divides the gradients by this
        norm = outcome.stats[GRAD_NORM]
        optimizer.grad_scale = (norm / clip_norm).clamp(min=1.0).float()
    n_steps = config.training.steps
    rate = learning_rate(step, config.model.d_model, n_steps, config.optimizer)
    set_learning_rate(optimizer, rate)
    optimizer.step()
    if optimizer.average is not None:
        optimizer.average.add(step)
    replica.clear_gradients()
    return outcome


class Outcomes:
    """A queue of outcomes that are being copied from the device to the host.

    On a GPU the newest one stays queued, so that the host never waits for the update that is still
    running.
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

    def take_completed(self, wait_for_newest: bool) -> Iterator[UpdateOutcome]:
        """Yield the completed outcomes, oldest first; with `wait_for_newest`, wait for the newest
        one as well.
        """
        n_left = 0 if wait_for_newest or self.device.type == "cpu" else 1
        while len(self.in_flight) > n_left:
            pending, values, event = self.in_flight.popleft()
            if event is not None:
                event.synchronize()
            numbers = values.tolist()
            stats = UpdateStats(*numbers[:N_STATS])
            yield UpdateOutcome(pending, stats, StopVotes(*numbers[N_STATS:]))


# ---- between two log lines -----------------------------------------------------------------------------


def add_to_window(window: Window, outcome: UpdateOutcome) -> Window:
    """Add the figures of an update that was applied."""
    stats, n_tgt = outcome.stats, outcome.pending.update.n_tgt
    return Window(window.loss + stats.loss, window.nll + stats.nll, window.tokens + n_tgt)


class Throughput:
    """Counts updates and tokens since the last log line, or this process began, for rates per second."""

    def __init__(self) -> None:
        self.started_at = clock()
        self.n_src = self.n_tgt = self.updates = 0
        self.waited_s = 0.0  # for data

    def add(self, n_src: int, n_tgt: int) -> None:
        self.n_src += n_src
        self.n_tgt += n_tgt
        self.updates += 1

    @property
    def seconds(self) -> float:
        return max(clock() - self.started_at, 1e-9)


def make_train_event(
    state: TrainState, throughput: Throughput, lr: float, grad_norm: float, device: torch.device
) -> TrainEvent:
    """Report the window, in which at least one update was applied."""
    window, seconds = state.window, throughput.seconds
    return TrainEvent(
        step=state.step,
        epoch=state.cursor.epoch,
        loss=round(window.mean_loss, 5),
        nll=round(window.mean_nll, 5),
        ppl=round(compute_perplexity(window.mean_nll), 3),
        lr=lr,
        grad_norm=float(f"{grad_norm:.5g}"),
        src_tokens_per_s=round(throughput.n_src / seconds, 1),
        tgt_tokens_per_s=round(throughput.n_tgt / seconds, 1),
        updates_per_s=round(throughput.updates / seconds, 3),
        waited_s=round(throughput.waited_s, 3),
        memory_bytes=read_peak_memory(device),
        elapsed_s=round(state.elapsed_s, 1),
    )
