"""The training loop.

What must continue after a stop is in `TrainState`, a handful of integers, because the rest follows from (seed, update):
batch order from the plan, dropout from a seed per micro-batch. So ten updates, a stop and ten more end in the same bits
as twenty in one go, and the pairs of update k are the same on any number of ranks.
"""

import contextlib
import hashlib
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmt import checkpoint
from nmt.checkpoint import TrainState
from nmt.config import RunConfig, differences, dump, load_config
from nmt.data.loader import Loader, Update
from nmt.data.segmentation import Segmentations
from nmt.data.store import open_store
from nmt.data.vocab import Vocab
from nmt.decode.translator import Translator
from nmt.dist import World
from nmt.errors import UserError
from nmt.files import RunFolder, lock, make_folder, sweep, verify, write_bytes, write_text
from nmt.model.transformer import Transformer
from nmt.progress import Progress, clock, duration, say
from nmt.train.loss import Objective
from nmt.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from nmt.train.parallel import Captured, micro_step, spread
from nmt.train.validate import DevSet, validate

AGREE_EVERY = 10  # updates between questions among ranks


def micro_seed(seed: int, step: int, number: int) -> int:
    """What seeds the dropout of micro-batch `number` of an update, wherever it runs."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=7).digest())


def run_update(objective: nn.Module, optimizer: torch.optim.Adam, update: Update, step: int, config: RunConfig,
               world: World) -> Tensor:
    """One optimizer update; returns this rank's (smoothed loss, NLL) sums, still on the device."""
    sums = torch.zeros(2, device=world.device)
    scale = world.size / update.n_tgt  # DDP averages over ranks; we want the sum
    for index, micro in enumerate(update.micros):
        seed, is_last = micro_seed(config.seed, step, micro.number), index + 1 == len(update.micros)
        sums += micro_step(objective, micro.batch, scale, seed, is_last, config.training.precision == "bf16")
    set_learning_rate(optimizer, learning_rate(step, config.model.d_model, config.optimizer))
    optimizer.step()
    optimizer.zero_grad(set_to_none=not isinstance(objective, Captured))  # a graph adds to gradients in their place
    return sums


@dataclass
class Window:
    """What has happened since the last log line."""

    sums: Tensor
    began: float
    n_src: int = 0
    n_tgt: int = 0
    updates: int = 0
    waited_s: float = 0.0

    def add(self, sums: Tensor, update: Update, waited_s: float) -> None:
        self.sums += sums
        self.n_src, self.n_tgt = self.n_src + update.n_src, self.n_tgt + update.n_tgt
        self.updates, self.waited_s = self.updates + 1, self.waited_s + waited_s

    def figures(self, state: TrainState, rate: float, world: World) -> dict[str, Any]:
        """The line of metrics.jsonl; losses are per target piece, `nll` without smoothing."""
        loss, nll = (world.sum(self.sums) / self.n_tgt).tolist()
        elapsed = max(clock() - self.began, 1e-9)
        return {"kind": "train", "step": state.step, "epoch": state.cursor.epoch, "loss": round(loss, 5),
                "nll": round(nll, 5), "ppl": round(math.exp(min(nll, 50.0)), 3), "lr": rate,
                "src_tokens_per_s": round(self.n_src / elapsed, 1),
                "tgt_tokens_per_s": round(self.n_tgt / elapsed, 1),
                "updates_per_s": round(self.updates / elapsed, 3), "waited_s": round(self.waited_s, 3),
                "elapsed_s": round(state.elapsed_s, 1)}


class Stop:
    """Remembers that someone asked for an end; the loop leaves at the next update boundary."""

    def __init__(self) -> None:
        self.signal = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        def heard(number: int, _: object) -> None:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            self.signal = number  # a second one ends at once

        old = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


class Trainer:
    """A model, its optimizer and where training stands. `train` below runs it."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.world = config, world
        self.run = RunFolder(config.folder)
        self.store_folder = Path(config.data.store)
        self.vocab = Vocab.load(self.store_folder / "vocab.model")
        self.store = open_store(self.store_folder, "train", self.vocab.digest)
        torch.manual_seed(config.seed)
        self.model = Transformer(config.model, self.vocab.size).to(world.device)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.state = self.resume()
        objective = Objective(self.model, config.training.label_smoothing)
        self.objective = spread(objective, world, config.training.is_compiled(world.device.type))
        self.translator = Translator(self.model, self.vocab, config.decoding, world.device)
        self.dev = _open_dev(self.store_folder, self.vocab) if config.data.valid else None
        self.began = clock() - self.state.elapsed_s  # as if there had been one sitting
        self.saved_at = clock()
        self.saved_step = self.state.step

    def resume(self) -> TrainState:
        """Load the newest good checkpoint into model and optimizer, if there is one."""
        found = checkpoint.newest(self.run)
        if found is None:
            return TrainState()
        if Vocab(found.vocab_model).digest != self.vocab.digest:
            raise UserError(f"{self.store_folder}: its BPE model is not the one of {found.path}; "
                            "give the data.store that belongs to this run, or another out=DIR")
        checkpoint.load_weights(found, self.model)
        return checkpoint.load_optimizer(found, self.model, self.optimizer)

    def log(self, figures: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self.world.is_main:
            with open(self.run.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")

    def is_due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    def agree(self, stop: Stop) -> tuple[bool, bool]:
        """Whether to leave now, and whether the paper's ten minutes have gone by since the last checkpoint.

        Many ranks must leave and save together; asking each other costs time, so they do it now and then.
        """
        minutes = self.config.training.checkpoint_minutes
        flags = torch.tensor([stop.signal != 0, minutes is not None and clock() - self.saved_at >= 60 * minutes])
        if self.world.size > 1:
            if self.state.step % AGREE_EVERY:
                return False, False
            flags = self.world.sum(flags.int()) > 0
        is_stopped, is_late = flags.tolist()
        return is_stopped, is_late

    def save(self) -> None:
        """A checkpoint of this update, unless there is one."""
        if self.saved_step == self.state.step:
            return
        if self.world.is_main:
            size = self.run.metrics.stat().st_size if self.run.metrics.exists() else 0
            self.state = replace(self.state, metrics_bytes=size)
            checkpoint.save(self.run.checkpoint(self.state.step), self.model, self.optimizer, self.state, self.config,
                            self.vocab.model)
            checkpoint.name_checkpoint(self.run, "last", self.state.step)
            if self.state.best_step == self.state.step:
                checkpoint.name_checkpoint(self.run, "best", self.state.step)
            checkpoint.prune(self.run, self.config.training.keep_checkpoints, self.state.best_step)
        self.saved_at, self.saved_step = clock(), self.state.step
        self.world.barrier()

    def validate(self) -> None:
        """Score the dev set; a new best is kept as a checkpoint."""
        if self.dev is None:
            return
        result = validate(self.translator, self.dev, self.config, self.world)
        best = self.state.best
        goodness = self.world.from_main(result.goodness)
        is_best = best is None or goodness > best
        score = result.bleu
        self.log({"kind": "valid", "step": self.state.step, "nll": round(result.nll, 5),
                  "ppl": round(result.perplexity, 3), "bleu": score and round(score.value, 2),
                  "signature": score and score.signature, "elapsed_s": round(self.state.elapsed_s, 1)})
        if self.world.is_main:
            told = f", BLEU {score.value:.2f}" if score else ""
            say(f"update {self.state.step}: dev NLL {result.nll:.4f}, perplexity {result.perplexity:.2f}{told}"
                f"{'  (best)' if is_best else ''}")
        if is_best:
            self.state = replace(self.state, best=goodness, best_step=self.state.step)
            self.save()

    def loop(self, stop: Stop) -> None:
        """Updates until the recipe ends or somebody asks for an end."""
        training, world = self.config.training, self.world
        progress = Progress("training", training.steps, "updates", self.state.step, world.is_main)
        segmentations = Segmentations(self.store_folder, self.config.vocab.bpe_dropout, self.config.seed,
                                      self.config.data.clean.max_pieces, self.config.data.workers)
        # closed first, so that nobody waits for an epoch that nobody wants
        with Loader(segmentations, training, self.config.seed, self.state.cursor, world) as updates, segmentations:
            window = Window(torch.zeros(2, device=world.device), clock())
            while self.state.step < training.steps:
                began = clock()
                update = next(updates)
                waited_s = clock() - began
                step = self.state.step + 1
                sums = run_update(self.objective, self.optimizer, update, step, self.config, world)
                window.add(sums, update, waited_s)
                self.state = replace(self.state, step=step, cursor=update.after,
                                     tokens_seen=self.state.tokens_seen + update.n_tgt,
                                     elapsed_s=clock() - self.began)
                is_logged = self.is_due(training.log_every) or step == 1 or step == training.steps
                progress.advance(1, self.report(window) if is_logged else None)
                if is_logged:
                    window = Window(torch.zeros(2, device=world.device), clock())
                is_stopped, is_late = self.agree(stop)
                is_end = is_stopped or step == training.steps
                began = clock()
                if self.is_due(training.validate_every) or step == training.steps:
                    self.validate()
                if self.is_due(training.checkpoint_every) or is_end or is_late:
                    self.save()
                window.began += clock() - began  # speeds are those of updates
                if is_end:
                    break
        if self.state.step >= training.steps and world.is_main:
            segmentations.remove()
        progress.close()

    def report(self, window: Window) -> str:
        """Write the window's figures to metrics.jsonl; the short form for the progress bar."""
        rate = self.optimizer.param_groups[0]["lr"]
        figures = window.figures(self.state, rate, self.world)
        if not math.isfinite(figures["nll"]):  # the same on every rank
            raise UserError(f"update {self.state.step}: the loss is {figures['nll']}; lower optimizer.scale or raise "
                            f"optimizer.warmup_steps and choose another out=DIR")
        self.log(figures)
        return (f"loss {figures['loss']:.3f}, nll {figures['nll']:.3f}, lr {rate:.2e}, "
                f"{figures['tgt_tokens_per_s']:,.0f} target tokens/s")


def _open_dev(folder: Path, vocab: Vocab) -> DevSet:
    texts = [(folder / f"valid.{side}.txt").read_bytes().decode().split("\n")[:-1] for side in ("src", "tgt")]
    return DevSet(open_store(folder, "valid", vocab.digest), *texts)


def _claim(config: RunConfig, run: RunFolder, stack: contextlib.ExitStack) -> None:
    """Make the run folder this config's, or refuse by name what differs from the config that began it."""
    verify(Path(config.data.store))
    make_folder(run.path)
    stack.enter_context(lock(run.path, "nmt-train"))
    make_folder(run.checkpoints)
    sweep(run.checkpoints)
    began = load_config(str(run.config)) if run.config.is_file() else None
    changes = differences(began, config) if began else []
    if changes:
        raise UserError(f"{run.path}: this run began with other settings ({'; '.join(changes)}); "
                        "restore them, choose another out=DIR, or remove the folder to start anew")
    if began != config:
        write_text(run.config, dump(config))


def _describe(trainer: Trainer) -> None:
    config, store = trainer.config, trainer.store
    size = sum(p.numel() for p in trainer.model.parameters())
    say(f"model: {size / 1e6:.1f}M parameters, {trainer.vocab.size:,} pieces; data: {len(store):,} pairs, "
        f"{len(store.tgt.ids):,} target pieces; {config.training.precision} on {trainer.world.size} x "
        f"{trainer.world.device.type}; run folder {trainer.run.path}")
    if trainer.state.step:
        say(f"continuing after update {trainer.state.step}")


def train(config: RunConfig, world: World) -> int:
    """Train, or continue, the run in `config.folder`; returns the exit code."""
    run = RunFolder(config.folder)
    with contextlib.ExitStack() as stack:
        world.on_main(lambda: _claim(config, run, stack))
        trainer = Trainer(config, world)
        if world.is_main:
            _describe(trainer)
            write_bytes(run.vocab, trainer.vocab.model)
            if run.metrics.exists():  # lines after the checkpoint will be written again
                with open(run.metrics, "r+b") as file:
                    file.truncate(min(run.metrics.stat().st_size, trainer.state.metrics_bytes))
        if trainer.state.step >= config.training.steps:
            if world.is_main:
                say(f"nothing to do: {trainer.state.step} updates are done; raise training.steps to go on")
            return 0
        stop = Stop()
        with stop.listening():
            trainer.loop(stop)
        if world.is_main:
            minutes = duration(trainer.state.elapsed_s)
            say(f"{'stopped' if stop.signal else 'done'}: {trainer.state.step} updates in {minutes}; "
                f"checkpoints in {run.checkpoints}")
    return 128 + stop.signal if stop.signal else 0
