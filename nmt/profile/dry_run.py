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

from nmt.config import RunConfig
from nmt.data.loader import Loader, Update
from nmt.data.plan import Cursor
from nmt.data.store import TokenStore, open_store
from nmt.data.vocab import Vocab
from nmt.model.transformer import Transformer
from nmt.profile.cost import Ticks, forget_peak, peak_memory
from nmt.profile.parts import UPDATE
from nmt.system.progress import Progress, clock
from nmt.system.ranks import World
from nmt.system.run_folder import VOCAB_FILE
from nmt.train.loss import Objective
from nmt.train.memory_probe import explain_out_of_memory, load_excerpt, run_shape
from nmt.train.optimizer import make_optimizer
from nmt.train.parallel import make_replica
from nmt.train.update import run_update


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

    def add(self, update: Update, store: TokenStore) -> None:
        self.n_src += update.n_src
        self.n_tgt += update.n_tgt
        for micro in update.micros:
            for packed, side in ((micro.batch.src, store.src), (micro.batch.tgt, store.tgt)):
                self.live += packed.n_live
                self.rows += packed.tokens.numel()
                if micro.number < len(update.pairs):  # not a blank one
                    pairs = update.pairs[micro.number]
                    self.cells += len(pairs) * int(side.lengths[pairs].max())

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.seconds)


class Rehearsal:
    def __init__(self, config: RunConfig, micro_tokens: int, world: World) -> None:
        self.config, self.world, self.step = config, world, 0
        self.micro_tokens = micro_tokens
        self.folder = Path(config.data.store)
        self.vocab = Vocab.load(self.folder / VOCAB_FILE)
        self.store = open_store(self.folder, "train", self.vocab.digest)
        torch.manual_seed(config.seed)
        self.model = Transformer(config.model, self.vocab.size).to(world.device)
        self.objective = Objective(self.model, config.training.label_smoothing)
        self.shape = run_shape(config, micro_tokens, self.store, world)
        self.replica = make_replica(self.objective, world, config.training, self.shape)
        self.optimizer = make_optimizer(self.model, config.optimizer)

    def updates(self) -> Loader:
        """Those of the recipe, from its first on; BPE-dropout would write its epochs, so it is left out."""
        return Loader(
            lambda _: self.store,
            self.config.training,
            self.micro_tokens,
            self.config.seed,
            Cursor(),
            self.world,
            self.shape,
        )

    def run(
        self, updates: Loader, n: int, what: str = "warming up", is_alone: bool = False
    ) -> Timing:
        """`n` updates, on all ranks or on this one `is_alone`."""
        world = self.lone if is_alone else self.world
        timing, ticks = Timing(), Ticks(world.device)
        progress = Progress(what, n, "updates", is_shown=world.is_main)
        forget_peak(world.device)
        ticks.mark()
        with contextlib.closing(progress), explain_out_of_memory(self.micro_tokens):
            for _ in range(n):
                began = clock()
                update = next(updates)
                timing.waited_s += clock() - began
                self.step += 1
                with record_function(UPDATE):
                    run_update(self.replica, self.optimizer, update, self.step, self.config, world)
                ticks.mark()
                timing.add(update, self.store)
                progress.advance()
            timing.seconds = ticks.seconds()
        timing.peak = peak_memory(world.device)
        return timing

    def run_for(self, updates: Loader, seconds: float, what: str) -> Timing:
        """As many updates as take about so long, at least three, after some that warm up."""
        first = self.run(updates, 1).mean_s
        if self.shape is not None:
            first = self.run(updates, 1).mean_s  # the very first one has compiled and recorded
        is_slow = self.world.broadcast(first) > seconds / 5  # the same for all ranks
        took = first if is_slow else min(self.run(updates, 3).seconds)
        return self.run(updates, int(self.world.broadcast(max(3.0, seconds / took))), what)

    @property
    def lone(self) -> World:
        return replace(self.world, rank=0, size=1)

    def dev_seconds(self) -> float:
        """What the NLL of the whole dev set takes, from one micro-batch of its middle lengths."""
        if self.config.data.valid is None:
            return 0.0
        dev = open_store(self.folder, "valid", self.vocab.digest)
        middle = np.argsort(dev.tgt.lengths, kind="stable")[len(dev) // 3 :]
        updates, _ = load_excerpt(dev, middle, self.micro_tokens, self.world.device)
        self.model.eval()
        with updates, torch.no_grad():
            update = next(updates)
            took = []
            for _ in range(2):  # the first one allocates
                began = clock()
                for micro in update.micros:
                    self.objective(micro.batch)[1].item()
                took.append(clock() - began)
        self.model.train()
        return took[-1] * dev.tgt.n_tokens / update.n_tgt / self.world.size
