"""Training that leaves nothing behind: what `nmt-train --profile` and `--plan` time.

The real model, optimizer, loader and `run_update` on the prepared store, but no run folder, no
lock, no checkpoint. On many ranks all run the same number of updates, or rank 0 alone runs some in
a world of its own. Tokens are those of all ranks; memory is this rank's.
"""

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from nmt.checkpoint.run_checkpoints import load_run_config
from nmt.config import RunConfig
from nmt.data.loader import Loader, MicroBatch, Update
from nmt.data.plan import Cursor
from nmt.extras.profile.cost import DeviceTimer, reset_peak_memory
from nmt.system.device import name_machine, read_peak_memory
from nmt.system.progress import Progress, clock, say
from nmt.system.ranks import World
from nmt.train.memory_probe import explain_out_of_memory, make_full_batch
from nmt.train.resolve import resolve
from nmt.train.setup import Setup, open_setup
from nmt.train.update import run_update
from nmt.train.validate import choose_dev_lines
from nmt.translate.translator import Translator

MIN_TIMED_UPDATES = 3
TIMED_LINES = 50  # of the dev set
BUSY = 1.5  # load per core; the preparation that comes before brings it to 1


@dataclass
class Timing:
    """Updates, one after the other."""

    seconds: list[float] = field(default_factory=list)
    waited_s: float = 0.0  # of which for data
    n_src: int = 0
    n_tgt: int = 0
    peak: int = 0  # bytes

    @property
    def n_updates(self) -> int:
        return len(self.seconds)

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.seconds)


class DryRun:
    """A training at its first update, to be timed."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.world = setup, setup.world
        self.step = 0

    def updates(self) -> Loader:
        """Load the updates of the run, from its first on, without BPE-dropout, which would write its
        epochs to disk.
        """
        return self.setup.make_loader(lambda _: self.setup.store)

    def run(self, updates: Loader | Iterator[Update], n: int, what: str) -> Timing:
        """Do `n` updates; all ranks must call this."""
        setup, world = self.setup, self.world
        timing, timer = Timing(), DeviceTimer(world.device)
        progress = Progress(what, n, "updates", is_shown=world.is_main, starts_slowly=True)
        reset_peak_memory(world.device)
        timer.mark()
        with progress, explain_out_of_memory(self.setup.micro_tokens):
            for _ in range(n):
                started_at = clock()
                update = next(updates)
                timing.waited_s += clock() - started_at
                self.step += 1
                run_update(setup.replica, setup.optimizer, update, self.step, setup.config)
                timer.mark()
                timing.n_src += update.n_src
                timing.n_tgt += update.n_tgt
                progress.advance()
            timing.seconds = timer.seconds()
        timing.peak = read_peak_memory(world.device)
        return timing

    def run_batch(self, order: np.ndarray, micro_tokens: int, what: str) -> int:
        """Do an update of micro-batches with as many of the first pairs of `order` as fit, as many as are
        computed at a time, and return its peak memory.
        """
        setup = self.setup
        batch = make_full_batch(setup.store, order, micro_tokens, setup.shape)
        batch = batch.to(self.world.device)
        micros = [MicroBatch(number, batch) for number in range(setup.replica.n_at_once)]
        update = Update(micros, batch.src.n_live, batch.n_tokens, Cursor())
        return self.run(iter([update]), 1, what).peak

    def run_for(self, updates: Loader | Iterator[Update], seconds: float, what: str) -> Timing:
        """Do as many updates as take about `seconds`, after some that warm up. Where three would take too
        long, do one.
        """
        if self.step == 0:
            self.run(updates, 1, what)  # it allocates, compiles and records
        timing = self.run(updates, 1, what)
        # Decided by the main rank, because all ranks must run the same number.
        if self.world.broadcast(timing.mean_s) > seconds / 5:
            return timing
        update_s = min(self.run(updates, 3, what).seconds)
        n = int(self.world.broadcast(max(float(MIN_TIMED_UPDATES), seconds / update_s)))
        return self.run(updates, n, what)

    def dev_seconds(self) -> float:
        """Estimate how long the NLL of the whole dev set takes, from one micro-batch of pairs of middle
        lengths.
        """
        setup = self.setup
        if setup.dev is None:
            return 0.0
        dev = setup.dev.store
        middle = np.argsort(dev.tgt.lengths, kind="stable")[len(dev) // 3 :]
        batch = make_full_batch(dev, middle, setup.micro_tokens).to(self.world.device)
        objective = setup.replica.objective.eval()
        with torch.no_grad():
            for _ in range(2):  # the first one allocates
                started_at = clock()
                objective(batch)[1].item()
                took = clock() - started_at
        objective.train()
        return took * dev.tgt.n_tokens / batch.n_tokens / self.world.size

    def decoding_seconds(self) -> float:
        """Estimate how long the dev set takes to translate, from some of its lines. A model that has
        learned little would write outputs of any length, so they are made as long as their sources.
        """
        setup = self.setup
        config, dev = setup.config, setup.dev
        if dev is None or not config.evaluation.bleu:
            return 0.0
        n_lines = len(choose_dev_lines(len(dev.sources), config.evaluation.sentences))
        chosen = choose_dev_lines(len(dev.sources), min(n_lines, TIMED_LINES))
        decoding = replace(config.dev_decoding, max_ratio=1.0, max_extra=0, min_length=0)
        translator = Translator(setup.model, setup.vocab, decoding, self.world.device)
        lines = [dev.sources[line] for line in chosen]
        translator.translate(lines[:4])  # which loads what the search needs
        started_at = clock()
        translator.translate(lines)
        return (clock() - started_at) * n_lines / len(lines) / self.world.size


def open_dry_run(config: RunConfig, world: World) -> DryRun:
    """Open what the run of a config would train with, at its update 0; say if others use the machine too."""
    load, n_cores = os.getloadavg()[0], os.cpu_count() or 1
    if world.is_main and load > BUSY * n_cores:
        say(
            f"warning: this machine is busy: load {load:.0f} on {n_cores} cores; what is timed now holds "
            "only while it stays so"
        )
    recorded = world.on_main(lambda: load_run_config(config.run_folder))
    return DryRun(open_setup(resolve(config, recorded or config, world), world))


def describe_machine(setup: Setup) -> str:
    config, world = setup.config, setup.world
    machine = name_machine(world.device, world.size)
    text = f"{machine}, {config.training.precision}, torch {torch.__version__}"
    return text + (", BPE-dropout left out" if config.vocab.bpe_dropout else "")


def format_bytes(n: float) -> str:
    return f"{n / 1e9:,.2f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


def format_rows(rows: dict[str, str]) -> str:
    return "\n".join(f"{name:<16} {text}" for name, text in rows.items())
