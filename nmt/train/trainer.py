"""The training loop.

What must continue after a stop is in `TrainState`, a handful of numbers, because the rest follows from (seed, update):
batch order from the plan, dropout from a seed per micro-batch. So ten updates, a stop and ten more end in the same bits
as twenty in one go, and the pairs of update k are the same on any number of ranks. All ranks decide alike, because they
decide by outcomes that all of them hold.
"""

import contextlib
import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nmt import checkpoint
from nmt.checkpoint import TrainState
from nmt.config import RunConfig, format_config, list_differences, load_config
from nmt.data.epoch_stores import EpochStores
from nmt.data.loader import Loader, Update
from nmt.data.store import open_store
from nmt.data.vocab import Vocab
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.system.files import lock, make_folder, remove_leftovers, verify, write_bytes, write_text
from nmt.system.progress import Progress, clock, format_duration, say
from nmt.system.ranks import World, is_rank_lost
from nmt.system.run_folder import VOCAB_FILE, RunFolder
from nmt.train.checkpoint_writer import Keeper
from nmt.train.loss import Objective
from nmt.train.memory_probe import (
    explained_out_of_memory,
    resolve_micro_tokens,
    run_shape,
    try_worst,
)
from nmt.train.metrics_log import Journal
from nmt.train.nonfinite import SKIPS, explain
from nmt.train.optimizer import make_optimizer
from nmt.train.parallel import make_replica, total_norm, whole_model
from nmt.train.shutdown import INTERRUPTED, PREEMPTED, State, Status, Stop
from nmt.train.update import Outcome, Outcomes, Wishes, run_update
from nmt.train.validate import open_dev, validate
from nmt.translate.translator import Translator

Report = Callable[[Path], object]


@dataclass
class Speed:
    """What this process has done since the last log line."""

    began: float
    n_src: int = 0
    n_tgt: int = 0
    updates: int = 0
    waited_s: float = 0.0

    def add(self, update: Update) -> None:
        self.n_src, self.n_tgt, self.updates = (
            self.n_src + update.n_src,
            self.n_tgt + update.n_tgt,
            self.updates + 1,
        )

    def figures(self) -> dict[str, Any]:
        elapsed = max(clock() - self.began, 1e-9)
        return {
            "src_tokens_per_s": round(self.n_src / elapsed, 1),
            "tgt_tokens_per_s": round(self.n_tgt / elapsed, 1),
            "updates_per_s": round(self.updates / elapsed, 3),
            "waited_s": round(self.waited_s, 3),
        }


class Trainer:
    """A model, its optimizer and where training stands. `train` below runs it."""

    def __init__(
        self,
        config: RunConfig,
        micro_tokens: int,
        world: World,
        run: RunFolder,
        stop: Stop,
        status: Status,
        report: Report,
    ) -> None:
        self.config, self.world, self.run, self.stop, self.status = config, world, run, stop, status
        self.write_report = report
        self.micro_tokens = micro_tokens
        self.store_folder = Path(config.data.store)
        self.vocab = Vocab.load(self.store_folder / VOCAB_FILE)
        self.store = open_store(self.store_folder, "train", self.vocab.digest)
        torch.manual_seed(config.seed)
        self.model = Transformer(config.model, self.vocab.size).to(world.device)
        objective = Objective(self.model, config.training.label_smoothing)
        self.shape = run_shape(config, micro_tokens, self.store, world)
        self.replica = make_replica(objective, world, config.training, self.shape)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.state = self.resume()
        self.dev = open_dev(self.store_folder, self.vocab) if config.data.valid else None
        self.began = clock() - self.state.elapsed_s  # as if there had been one sitting
        self.saved_at, self.saved_step = clock(), self.state.step
        self.speed = Speed(clock())
        self.outcomes = Outcomes(world.device)
        self.norm = 0.0  # of the last gradient
        self.is_late = False
        self.exit_code = 0
        if world.is_main:
            self.journal = Journal(self.run.metrics, self.state.metrics_bytes)
            is_apart = world.device.type == "cuda"
            self.keeper = Keeper(
                self.run, config, self.vocab.model, self.journal, self.state.step, is_apart
            )

    def resume(self) -> TrainState:
        """Load the newest good checkpoint into model and optimizer, if there is one."""
        # On the main rank alone: a digest for every rank would take as many times as long.
        found = self.world.on_main(lambda: checkpoint.find_newest(self.run, self.config))
        step = int(self.world.broadcast(found.step if found else 0))
        if not step:
            return TrainState()
        found = found or checkpoint.open_after_main(self.run, step)
        if found.vocab.digest != self.vocab.digest:
            raise UserError(
                f"{self.store_folder}: its BPE model is not the one of {found.path}; "
                "give the data.store that belongs to this run, or another out=DIR"
            )
        checkpoint.load_weights(found, self.model)
        return checkpoint.load_optimizer(found, self.model, self.optimizer)

    def log(self, figures: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        if self.world.is_main:
            self.journal.add(figures)

    def is_due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    @property
    def is_validation_due(self) -> bool:
        step, training = self.state.step, self.config.training
        is_at = self.is_due(training.validate_every) or step == training.steps
        return self.dev is not None and is_at and self.state.validated < step

    def wishes(self) -> Wishes:
        """What this rank would have all do after this update."""
        minutes = self.config.training.checkpoint_minutes
        is_late = minutes is not None and clock() - self.saved_at >= 60 * minutes
        return Wishes(*self.endings(), is_late, self.world.is_main and self.keeper.is_broken)

    def endings(self) -> tuple[float, float]:
        return self.stop.is_interrupt, self.stop.is_preemption

    def end(self, interrupt: float, preempt: float) -> None:
        if interrupt or preempt:
            self.exit_code = INTERRUPTED if interrupt else PREEMPTED

    def take(self, outcome: Outcome) -> None:
        """Draw the consequences of an update that is behind us."""
        state, update = self.state, outcome.sent.update
        if outcome.is_applied:
            self.norm = outcome.norm
            self.speed.add(update)
            self.state = replace(
                state,
                skipped=0,
                tokens_seen=state.tokens_seen + update.n_tgt,
                window_loss=state.window_loss + outcome.loss,
                window_nll=state.window_nll + outcome.nll,
                window_tokens=state.window_tokens + update.n_tgt,
            )
        else:
            self.norm = 0.0
            self.state = replace(state, skipped=state.skipped + 1)
            self.refuse(outcome)
        wishes = outcome.wishes
        self.end(wishes.interrupt, wishes.preempt)
        self.is_late = self.is_late or wishes.late > 0
        if wishes.broken:
            self.world.on_main(lambda: self.keeper.finish())  # which only the main rank has

    def refuse(self, outcome: Outcome) -> None:
        """An update was not applied: tell which, and stop if that is the rule or it comes too often."""
        sent, training, world = outcome.sent, self.config.training, self.world
        told = explain(outcome, self.run, self.model, self.store, self.vocab, world)
        self.log(
            {
                "kind": "skipped",
                "step": sent.step,
                "loss": str(outcome.loss),
                "grad_norm": str(outcome.norm),
            }
        )
        if training.on_nonfinite == "skip" and self.state.skipped <= SKIPS:
            if world.is_main:
                say(f"warning: {told}")
            return

        def fail() -> None:
            raise Failure(
                f"{told}; the last checkpoint is good: go on from it with training.on_nonfinite=skip, or "
                "begin anew (out=DIR) with a lower optimizer.scale or more optimizer.warmup_steps"
            )

        world.on_main(fail)

    def save(self) -> None:
        """A checkpoint of this update, unless there is one."""
        if (
            self.state.skipped
            and not total_norm([p.detach() for p in self.model.parameters()]).isfinite()
        ):
            return  # it would not be good
        if self.saved_step != self.state.step:
            snapshot = checkpoint.take_snapshot(self.model, self.optimizer, self.world.is_main)

            def write() -> None:
                self.keeper.save(snapshot, self.state)
                self.tell("running")

            self.world.on_main(
                write
            )  # a slow disk must not make the others give up in their next update
            self.saved_step = self.state.step
        elif self.state.best_step == self.state.step:

            def name_best() -> None:
                self.keeper.settle(is_waiting=True)
                self.keeper.order(self.state)

            self.world.on_main(name_best)
        self.saved_at, self.is_late = clock(), False

    def validate(self) -> None:
        """Score the dev set; a new best is kept as a checkpoint. Cut short by a stop, it comes first when the run goes
        on."""
        if self.dev is None or self.exit_code or not self.is_validation_due:
            return
        model = (
            whole_model(self.model, self.vocab.size) if self.config.training.shard else self.model
        )
        translator = Translator(model, self.vocab, self.config.decoding, self.world.device)
        result = validate(
            translator, self.dev, self.config, self.micro_tokens, self.world, self.go_through
        )
        if result is None:
            return
        best, step, score = self.state.best, self.state.step, result.bleu
        goodness = self.world.broadcast(result.goodness)
        is_best = goodness > (-math.inf if best is None else best)
        self.log(
            {
                "kind": "valid",
                "step": step,
                "nll": round(result.nll, 5),
                "ppl": round(result.perplexity, 3),
                "bleu": score and score.value,
                "signature": score and score.signature,
                "elapsed_s": round(self.state.elapsed_s, 1),
            }
        )
        if self.world.is_main:
            told = f", BLEU {score.value:.2f}" if score else ""
            say(
                f"update {step}: dev NLL {result.nll:.4f}, perplexity {result.perplexity:.2f}{told}"
                f"{'  (best)' if is_best else ''}"
            )
        self.state = replace(self.state, validated=step)
        if is_best:
            self.state = replace(self.state, best=goodness, best_step=step)
            self.save()

    def go_through(self, work: Iterable[object]) -> bool:
        """Do all of `work`, unless some rank is asked to stop meanwhile."""
        self.end(*self.world.go_through(work, self.endings))
        return not self.exit_code

    def loop(self) -> None:
        """Updates until the recipe ends or somebody asks for an end."""
        training, world = self.config.training, self.world
        progress = Progress("training", training.steps, "updates", self.state.step, world.is_main)
        epoch_stores = EpochStores(
            self.store_folder,
            self.config.vocab.bpe_dropout,
            self.config.seed,
            self.config.data.clean.max_pieces,
            self.config.data.workers,
        )
        loader = Loader(
            epoch_stores,
            training,
            self.micro_tokens,
            self.config.seed,
            self.state.cursor,
            world,
            self.shape,
        )
        # epoch_stores are closed first: otherwise the loader may wait for an epoch that is no longer needed
        with (
            contextlib.closing(progress),
            explained_out_of_memory(self.micro_tokens),
            loader as updates,
            epoch_stores,
        ):
            if (
                world.device.type == "cuda"
            ):  # before any search records graphs: a graph must not outlive an older one
                try_worst(self.replica, self.store, self.micro_tokens, world)
            self.validate()  # what a stop cut short
            if (
                self.state.step == training.steps and not self.exit_code
            ):  # there is no later one to hold the score
                self.saved_step = -1
                self.save()
            self.speed = Speed(clock())
            while self.state.step < training.steps and not self.exit_code:
                began = clock()
                update = next(updates)
                self.speed.waited_s += clock() - began
                step = self.state.step + 1
                self.outcomes.send(
                    run_update(
                        self.replica, self.optimizer, update, step, self.config, world, self.wishes
                    )
                )
                self.state = replace(
                    self.state, step=step, cursor=update.after, elapsed_s=clock() - self.began
                )
                is_logged = self.is_due(training.log_every) or step in (1, training.steps)
                is_saved = self.is_due(training.checkpoint_every) or step == training.steps
                for outcome in self.outcomes.arrived(
                    is_logged or is_saved or self.is_validation_due
                ):
                    self.take(outcome)
                progress.advance(1, self.report() if is_logged else None)
                began = clock()
                self.validate()
                if is_saved or self.is_late or self.exit_code:
                    for outcome in self.outcomes.arrived(True):
                        self.take(outcome)
                    self.save()
                elif world.is_main:
                    self.keeper.settle()
                self.speed.began += clock() - began  # speeds are those of updates
        if self.state.step == training.steps and not self.is_validation_due:
            self.exit_code = 0  # nothing is left to do
        if world.is_main and not self.exit_code:
            epoch_stores.remove()
        world.on_main(
            self.conclude
        )  # all wait: torchrun ends the others as soon as one has left with a code

    def tell(self, state: State, code: int | None = None, message: str = "") -> None:
        self.status.step = self.keeper.saved
        self.status.tell(state, code, message)

    def conclude(self) -> None:
        """On the main rank: what the next one will find."""
        self.keeper.finish()
        name = (
            signal.Signals(self.stop.signal).name
            if self.stop.signal
            else "a signal to another rank"
        )
        if self.exit_code:
            self.tell(
                "preempted", self.exit_code, f"asked to stop by {name}; the same command goes on"
            )
        else:
            self.tell("done", 0)
        say(
            f"{'stopped' if self.exit_code else 'done'}: {self.state.step} updates in "
            f"{format_duration(self.state.elapsed_s)}; checkpoints in {self.run.checkpoints}"
        )
        try:
            self.write_report(self.run.path)
        except (OSError, UserError) as error:
            say(f"warning: no report: {error}")

    def report(self) -> str:
        """Write the window's figures to metrics.jsonl; the short form for the progress bar."""
        state, n = self.state, self.state.window_tokens
        speed, self.speed = self.speed.figures(), Speed(clock())
        self.state = replace(state, window_loss=0.0, window_nll=0.0, window_tokens=0)
        if not n:  # all were skipped
            return ""
        rate, loss, nll = (
            self.optimizer.param_groups[0]["lr"],
            state.window_loss / n,
            state.window_nll / n,
        )
        self.log(
            {
                "kind": "train",
                "step": state.step,
                "epoch": state.cursor.epoch,
                "loss": round(loss, 5),
                "nll": round(nll, 5),
                "ppl": round(math.exp(min(nll, 50.0)), 3),
                "lr": rate,
                "grad_norm": float(f"{self.norm:.5g}"),
                **speed,
                "elapsed_s": round(state.elapsed_s, 1),
            }
        )
        return f"loss {loss:.3f}, nll {nll:.3f}, lr {rate:.2e}, {speed['tgt_tokens_per_s']:,.0f} target tokens/s"


def _claim(config: RunConfig, run: RunFolder, status: Status, stack: contextlib.ExitStack) -> None:
    """Make the run folder this config's, or refuse by name what differs from the config that began it."""
    verify(Path(config.data.store))
    make_folder(run.path)
    stack.enter_context(lock(run.path, "nmt-train"))
    stack.enter_context(status.failures())
    make_folder(run.checkpoints)
    remove_leftovers(run.checkpoints)
    began = load_config(str(run.config)) if run.config.is_file() else None
    changes = list_differences(began, config) if began else []
    if changes:
        raise UserError(
            f"{run.path}: this run began with other settings ({'; '.join(changes)}); "
            "restore them, choose another out=DIR, or remove the folder to start anew"
        )
    if began != config:
        write_text(run.config, format_config(config))


def _describe(trainer: Trainer) -> None:
    config, store = trainer.config, trainer.store
    size = sum(p.numel() for p in trainer.model.parameters())
    say(
        f"model: {size / 1e6:.1f}M parameters, {trainer.vocab.size:,} pieces; data: {len(store):,} pairs, "
        f"{len(store.tgt.ids):,} target pieces; {config.training.precision} on {trainer.world.size} x "
        f"{trainer.world.device.type}; run folder {trainer.run.path}"
    )
    if trainer.state.step:
        say(f"continuing after update {trainer.state.step}")


def _begin(trainer: Trainer) -> None:
    """On the main rank: say what is about to be trained, and put the run folder in order."""
    _describe(trainer)
    write_bytes(trainer.run.vocab, trainer.vocab.model)
    trainer.keeper.order(trainer.state)
    trainer.tell("running")


def _conclude_alone(error: Exception, status: Status, world: World) -> None:
    """The connection to another rank broke: it has failed and says why, or it was killed."""
    say(
        f"stopped: another rank is gone ({str(error).partition(chr(10))[0]}); the same command goes on from the last "
        "checkpoint"
    )
    if world.is_main and not status.has_failed:
        status.tell("preempted", PREEMPTED, "another rank is gone; the same command goes on")


def train(config: RunConfig, world: World, report: Report = lambda _: None) -> int:
    """Train, or continue, the run in `config.folder`, and `report` on it; returns the exit code."""
    micro_tokens = resolve_micro_tokens(config, world)
    config = replace(config, training=replace(config.training, micro_tokens=micro_tokens))
    run, stop = RunFolder(config.folder), Stop()
    status = Status(run, config.training.steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.listening())
        world.on_main(lambda: _claim(config, run, status, stack))
        if not world.is_main:
            stack.enter_context(status.failures())
        try:
            trainer = Trainer(config, micro_tokens, world, run, stop, status, report)
            if world.is_main:
                stack.callback(trainer.keeper.close)
            world.on_main(lambda: _begin(trainer))
            if trainer.state.step < config.training.steps or trainer.is_validation_due:
                trainer.loop()
            elif world.is_main:
                say(
                    f"nothing to do: {trainer.state.step} updates are done; raise training.steps to go on"
                )
                trainer.tell("done", 0)
        except RuntimeError as error:
            if not is_rank_lost(error, world):
                raise
            _conclude_alone(error, status, world)
            raise SystemExit(
                PREEMPTED
            ) from error  # a return would take down the group, and wait for who is gone
        return trainer.exit_code
