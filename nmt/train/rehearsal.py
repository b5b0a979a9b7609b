"""Training that leaves nothing behind: what `nmt-train --profile` and `--plan` time.

The real model, optimizer, loader and `run_update` on the prepared store, but no run folder, no lock, no checkpoint. On
many ranks all run the same number of updates, or rank 0 alone runs some in a world of its own. Tokens are those of all
ranks; memory and padding are this rank's.
"""

import contextlib
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch.autograd.profiler import record_function

from nmt.config import RunConfig, load_config
from nmt.data.loader import Loader, Update
from nmt.data.plan import Cursor
from nmt.data.store import open_store
from nmt.data.vocab import Vocab
from nmt.dist import World
from nmt.errors import UserError
from nmt.files import RunFolder
from nmt.model.transformer import Transformer
from nmt.progress import Progress, clock, say
from nmt.train.cost import Ticks, forget_peak, peak_memory
from nmt.train.loss import Objective
from nmt.train.optimizer import make_optimizer
from nmt.train.parallel import spread
from nmt.train.parts import UPDATE
from nmt.train.update import run_update
from nmt.train.worst import excerpt, roomy, worst_orders

CPU_MICRO_TOKENS = 4_096  # docs/benchmarks.md


@dataclass
class Timing:
    """Updates, one after the other."""

    seconds: list[float] = field(default_factory=list)
    waited_s: float = 0.0  # of which for data
    n_src: int = 0
    n_tgt: int = 0
    live: int = 0  # tokens, both sides
    rows: int = 0  # of the tensors that hold them
    cells: int = 0  # sentences by the longest one's places, which padding would hold
    peak: int = 0  # bytes

    def add(self, update: Update) -> None:
        self.n_src, self.n_tgt = self.n_src + update.n_src, self.n_tgt + update.n_tgt
        for side in (side for micro in update.micros for side in (micro.batch.src, micro.batch.tgt)):
            self.live, self.rows = self.live + side.n_live, self.rows + side.tokens.numel()
            self.cells += side.n_sentences * side.longest

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.seconds)


class Rehearsal:
    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.world, self.step = config, world, 0
        self.folder = Path(config.data.store)
        self.vocab = Vocab.load(self.folder / "vocab.model")
        self.store = open_store(self.folder, "train", self.vocab.digest)
        torch.manual_seed(config.seed)
        self.model = Transformer(config.model, self.vocab.size).to(world.device)
        self.alone = Objective(self.model, config.training.label_smoothing)
        self.objective = spread(self.alone, world, config.training.is_compiled(world.device.type),
                                config.training.shard)
        self.optimizer = make_optimizer(self.model, config.optimizer)

    def updates(self) -> Loader:
        """Those of the recipe, from its first on; BPE-dropout would write its epochs, so it is left out."""
        return Loader(lambda _: self.store, self.config.training, self.config.seed, Cursor(), self.world)

    def run(self, updates: Loader, n: int, what: str = "warming up", is_alone: bool = False) -> Timing:
        """`n` updates, on all ranks or on this one `is_alone`."""
        objective, world = (self.alone, self.lone) if is_alone else (self.objective, self.world)
        timing, ticks = Timing(), Ticks(world.device)
        progress = Progress(what, n, "updates", is_shown=world.is_main)
        forget_peak(world.device)
        ticks.mark()
        with contextlib.closing(progress), roomy(self.config.training.sized):
            for _ in range(n):
                began = clock()
                update = next(updates)
                timing.waited_s += clock() - began
                self.step += 1
                with record_function(UPDATE):
                    run_update(objective, self.optimizer, update, self.step, self.config, world)
                ticks.mark()
                timing.add(update)
                progress.advance()
            timing.seconds = ticks.seconds()
        timing.peak = peak_memory(world.device)
        return timing

    def run_for(self, updates: Loader, seconds: float, what: str) -> Timing:
        """As many updates as take about so long, at least three, after some that warm up."""
        first = self.run(updates, 1).mean_s
        is_slow = self.world.from_main(first) > seconds / 5  # the same for all ranks
        took = first if is_slow else min(self.run(updates, 3).seconds)
        return self.run(updates, int(self.world.from_main(max(3.0, seconds / took))), what)

    @property
    def lone(self) -> World:
        return World(0, 1, self.world.device)

    def dev_seconds(self) -> float:
        """What the NLL of the whole dev set takes, from one micro-batch of its middle lengths."""
        if self.config.data.valid is None:
            return 0.0
        dev = open_store(self.folder, "valid", self.vocab.digest)
        middle = np.argsort(dev.tgt.lengths, kind="stable")[len(dev) // 3:]
        updates, _ = excerpt(dev, middle, self.config.training, self.world.device)
        self.model.eval()
        with updates, torch.no_grad():
            update = next(updates)
            took = []
            for _ in range(2):  # the first one allocates
                began = clock()
                for micro in update.micros:
                    self.alone(micro.batch)[1].item()
                took.append(clock() - began)
        self.model.train()
        return took[-1] * (len(dev.tgt.ids) + len(dev)) / update.n_tgt / self.world.size


def settled(config: RunConfig, world: World) -> RunConfig:
    """`micro_tokens: auto` becomes what the run began with, or else the largest share of an update that fits."""
    training = config.training
    if training.micro_tokens != "auto":
        return config
    size = 0

    def settle() -> None:  # by one rank, for it writes that file while others may not have looked yet
        nonlocal size
        began = RunFolder(config.folder).config
        if began.is_file():
            size = load_config(str(began)).training.sized
        else:
            size = _largest(config, world)
            say(f"training.micro_tokens: auto is {size} here")

    world.on_main(settle)
    size = int(world.from_main(size))
    return replace(config, training=replace(training, micro_tokens=size))


def _largest(config: RunConfig, world: World) -> int:
    """On CPU what is fastest; on a GPU the first of an update's whole, half, third ... whose worst batches fit."""
    update = max(config.training.src_tokens, config.training.tgt_tokens)
    if world.device.type == "cpu":
        return min(update, CPU_MICRO_TOKENS)
    for parts in range(1, 65):
        size = -(-update // parts) if parts == 1 else int(update / parts * 1.03)  # they are not all alike
        trial = replace(config, training=replace(config.training, micro_tokens=size))
        try:
            rehearsal = Rehearsal(trial, replace(world, rank=0, size=1))
            for order in worst_orders(rehearsal.store):
                with excerpt(rehearsal.store, order, trial.training, world.device)[0] as updates:
                    rehearsal.run(updates, 2, "looking for the largest micro-batch")
            return size
        except UserError:  # of roomy
            torch.cuda.empty_cache()
    raise UserError("training.micro_tokens: auto finds nothing that fits; lower model.d_model or model.n_layers")
