"""The training loop.

Besides weights and Adam's moments, a run is resumed from `TrainState`, a handful of numbers.
Everything else is derived from (seed, update): the plan gives the batch order, and each micro-batch
has its own dropout seed. So ten updates, a stop and ten more give bit-identical weights to twenty
in one go, and update k has the same pairs on any number of ranks. All ranks make the same
decisions, because they base them on outcomes that are summed over all ranks.
"""

import contextlib
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nmt import checkpoint
from nmt.checkpoint import Snapshot, TrainState
from nmt.config import RunConfig, format_config, list_differences, load_recorded_config
from nmt.corpus.ledger import describe_mixture, read_mixture
from nmt.data.epoch_stores import EpochStores
from nmt.data.loader import Loader, Update
from nmt.data.store import open_store
from nmt.data.vocab import format_size, is_extension, load_vocab, write_vocab
from nmt.model.transformer import Transformer
from nmt.paper import find_dev_reference
from nmt.system.device import name_machine, read_peak_memory
from nmt.system.errors import Failure, UserError
from nmt.system.files import (
    check_own_folder,
    has_plain_file,
    lock,
    make_folder,
    remove_leftovers,
    verify,
    write_text,
)
from nmt.system.progress import Progress, clock, format_duration, say
from nmt.system.ranks import World, is_rank_lost
from nmt.system.run_folder import MANIFEST_FILE, MODEL_FILE, RunFolder
from nmt.train.checkpoint_writer import CheckpointWriter
from nmt.train.events import (
    Event,
    LayerEvent,
    SkippedEvent,
    TrainEvent,
    ValidEvent,
)
from nmt.train.layer_norms import LayerNorms
from nmt.train.loss import Objective
from nmt.train.memory_probe import (
    choose_batch_shape,
    explain_out_of_memory,
    probe_peak_memory,
    resolve_micro_tokens,
)
from nmt.train.metrics_log import MetricsLog, read_events, round_digits
from nmt.train.mirror import Mirror, claim_mirror
from nmt.train.nonfinite import MAX_SKIPPED, report_nonfinite
from nmt.train.on_track import LearningCheck, smoothed_loss_floor
from nmt.train.optimizer import make_optimizer
from nmt.train.parallel import gather_model, make_replica, total_norm
from nmt.train.precision import resolve_precision
from nmt.train.reference_curve import find_reference
from nmt.train.samples import mean_entropies
from nmt.train.shutdown import PREEMPTED, State, StatusFile, StopRequest
from nmt.train.tracking import Trackers
from nmt.train.update import Outcomes, StopVotes, UpdateOutcome, run_update
from nmt.train.validate import DevSet, Validation, open_dev, validate
from nmt.translate.translator import Translator


@dataclass
class Throughput:
    """Counts updates and tokens since the last log line, for rates per second."""

    started_at: float
    n_src: int = 0
    n_tgt: int = 0
    updates: int = 0
    waited_s: float = 0.0  # for data

    def add(self, update: Update) -> None:
        self.n_src += update.n_src
        self.n_tgt += update.n_tgt
        self.updates += 1


class Trainer:
    """Holds the model, the optimizer and the training state, and runs the loop. The entry point is
    `train` below.
    """

    def __init__(
        self,
        config: RunConfig,
        micro_tokens: int,
        world: World,
        run: RunFolder,
        stop: StopRequest,
        status: StatusFile,
    ) -> None:
        self.config, self.micro_tokens, self.world = config, micro_tokens, world
        self.run, self.stop, self.status = run, stop, status

        # data
        self.store_folder = Path(config.data.store)
        self.vocab = load_vocab(self.store_folder)
        self.store = open_store(self.store_folder, "train", self.vocab)
        self.shape = choose_batch_shape(config, micro_tokens, self.store, world)
        self.mixture = read_mixture(self.store_folder, config.data, len(self.store))
        self.dev = open_dev(self.store_folder, self.vocab) if config.data.valid else None

        # model and optimizer, initialised from the seed or restored from the newest checkpoint
        torch.manual_seed(config.seed)
        self.model = Transformer(config.model, *self.vocab.sizes).to(world.device)
        objective = Objective(self.model, config.training.label_smoothing)
        self.replica = make_replica(objective, world, config.training, self.shape)
        self.optimizer = make_optimizer(
            self.model, config.optimizer, self.replica.frozen, config.training.ema
        )
        self.state = self.resume()

        # state of this process only, not checkpointed
        # as if this process had run the earlier updates too
        self.started_at = clock() - self.state.elapsed_s
        self.saved_at, self.saved_step = clock(), self.state.step
        self.throughput = Throughput(clock())
        self.outcomes = Outcomes(world.device)
        self.grad_norm = 0.0  # of the last update
        self.layers = LayerNorms(self.model, self.optimizer, config.training.shard)
        self.layer_norms: Tensor | None = None  # of the last update, if it is one to log
        self.sound_step = -1  # the last update after which the model was seen to predict text
        self.is_save_due = False  # set when checkpoint_minutes have passed on some rank
        # Later the main rank decides, because the ranks' clocks differ.
        max_hours = config.training.max_hours
        self.is_time_up = max_hours is not None and self.state.elapsed_s >= 3600 * max_hours
        if world.is_main:
            self.metrics = MetricsLog(run.metrics, self.state.metrics_bytes)
            earlier, _ = read_events(run.metrics)
            self.trackers = Trackers(run.path, config.training.track, earlier)
            self.learning = LearningCheck(config, self.store.tgt, earlier)
            self.reference = find_reference(config, self.store_folder) if self.dev else None
            self.writer = CheckpointWriter(
                run,
                config,
                self.vocab,
                self.metrics,
                self.state.step,
                in_background=world.device.type == "cuda",
                mirror=Mirror(config.training, self.store_folder, run)
                if config.training.mirror
                else None,
            )

    def resume(self) -> TrainState:
        """Load the newest valid checkpoint, if there is one, into the model and the optimizer."""
        # Only the main rank verifies it: if all N ranks hashed the same files, that would take N
        # times as long.
        found = self.world.on_main(lambda: checkpoint.find_newest(self.run, self.config))
        step = int(self.world.broadcast(found.step if found else 0))
        average = self.optimizer.average
        if not step:
            if self.config.training.init_from is not None:
                self.load_initial_weights(Path(self.config.training.init_from))
                if average is not None:
                    average.restart()
            return TrainState()
        found = found or checkpoint.open_verified_by_main(self.run, step)
        if found.vocab.digest != self.vocab.digest:
            raise UserError(
                f"{self.store_folder}: its BPE model differs from the one in {found.path}; "
                "set data.store to the store this run was trained on, or choose another out=DIR"
            )
        checkpoint.load_weights(found, self.model)
        if average is not None:
            average.restart()  # those were the averages; the weights follow
        return checkpoint.load_optimizer(found, self.model, self.optimizer)

    def load_initial_weights(self, path: Path) -> None:
        """Load the weights that another run ended with; nothing else is taken from it."""
        found = self.world.on_main(lambda: checkpoint.open_for_average(path))
        step = int(self.world.broadcast(found.step if found else 0))
        if found is None:
            # The main rank has chosen one, of a run that may still be saving others.
            is_run = (path / "checkpoints").is_dir()
            found = checkpoint.open_for_average(
                RunFolder(path).checkpoint(step) if is_run else path
            )
        is_grown = is_extension(self.vocab, found.vocab)
        if found.vocab.digest != self.vocab.digest and not is_grown:
            keys = zip(("vocab.model", "vocab.tgt_model"), found.vocab.files, strict=False)
            models = " ".join(f"{key}={path / name}" for key, name in keys)
            raise UserError(
                f"training.init_from={path}: its BPE model differs from that of {self.store_folder}; "
                f"give another data.store=DIR, to be prepared with {models}"
            )
        # dropout has no weights
        shape = replace(found.config.model, dropout=self.config.model.dropout)
        changes = list_differences(replace(self.config, model=shape), self.config)
        if changes:
            raise UserError(
                f"training.init_from={path}: is another model ({'; '.join(changes)}); "
                "give these settings, or start from another"
            )
        if is_grown and "embeddings" in self.config.training.freeze:
            raise UserError(
                f"training.freeze names embeddings, but {self.store_folder} has pieces that "
                f"{path} has not, and they must be learned; leave embeddings out"
            )
        if is_grown:
            if self.world.is_main:
                say(
                    f"the vocabulary has grown from {format_size(found.vocab)} to "
                    f"{format_size(self.vocab)} pieces; new ones begin as the mean of the others"
                )
            checkpoint.load_grown_weights(found, self.model)
        else:
            checkpoint.load_weights(found, self.model)
        if self.world.is_main:
            digest = found.sha256[MODEL_FILE]
            say(
                f"starting from the weights of {found.path}, update {step:,} (sha256 {digest[:16]})"
            )

    # ---- the loop --------------------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Run updates until training.steps is reached or a stop is requested."""
        training, world = self.config.training, self.world
        progress = Progress("training", training.steps, "updates", self.state.step, world.is_main)
        epoch_stores = self.make_epoch_stores()
        # epoch_stores is last so that it is closed first: otherwise the loader could block on an
        # epoch nobody needs
        with (
            contextlib.closing(progress),
            explain_out_of_memory(self.micro_tokens),
            self.make_loader(epoch_stores) as updates,
            epoch_stores,
        ):
            self.prepare_loop()
            while not self.end_reason and not self.stop.exit_code:
                # wait for the next update's data
                step = self.state.step + 1
                started_at = clock()
                update = self.take(updates)
                self.throughput.waited_s += clock() - started_at

                # forward, backward, one step
                is_log_step = step % training.log_every == 0 or step in (1, training.steps)
                pending = run_update(
                    self.replica,
                    self.optimizer,
                    update,
                    step,
                    self.config,
                    world,
                    self.cast_votes,
                    self.layers if is_log_step else None,
                )
                self.outcomes.add(pending)
                elapsed_s = clock() - self.started_at
                self.state = replace(
                    self.state, step=step, cursor=update.next_cursor, elapsed_s=elapsed_s
                )

                # handle the outcomes of earlier updates
                is_save_step = training.is_checkpoint_step(step)
                self.apply_outcomes(
                    wait_for_newest=is_log_step or is_save_step or self.is_validation_due
                )
                is_log_step = is_log_step or self.end_reason is not None
                progress.advance(1, self.log_window() if is_log_step else None)

                # validate
                started_at = clock()
                self.validate()

                # save
                if is_save_step or self.is_save_due or self.stop.exit_code or self.end_reason:
                    self.apply_outcomes(wait_for_newest=True)
                    self.save()
                elif world.is_main:
                    self.writer.poll()
                # validating and saving do not count
                self.throughput.started_at += clock() - started_at

        if self.end_reason and not self.is_validation_due:
            self.stop.exit_code = 0  # a stop was requested, but the run is complete anyway
        if world.is_main and not self.stop.exit_code:
            epoch_stores.remove()
        # All ranks wait for this: torchrun kills the others as soon as one exits with a nonzero
        # code.
        world.on_main(self.finish)

    def take(self, updates: Loader) -> Update:
        """Return the next update. If the store was damaged meanwhile, save first what is done."""
        try:
            return next(updates)
        except UserError:
            self.save_alone()
            raise

    def make_epoch_stores(self) -> EpochStores:
        config = self.config
        return EpochStores(
            self.store_folder,
            config.vocab.bpe_dropout,
            config.seed,
            config.data.clean.max_pieces,
            config.data.workers,
            self.vocab,
        )

    def make_loader(self, epoch_stores: EpochStores) -> Loader:
        return Loader(
            epoch_stores,
            self.config.training,
            self.micro_tokens,
            self.config.seed,
            self.state.cursor,
            self.world,
            self.shape,
            self.mixture,
        )

    def prepare_loop(self) -> None:
        """Probe peak memory and finish an interrupted validation, before the first update of this
        process.
        """
        # Training's CUDA graph must be recorded before those of validation's search, which are
        # freed earlier: a CUDA graph must not outlive one that was recorded before it.
        if self.world.device.type == "cuda":
            probe_peak_memory(self.replica, self.store, self.micro_tokens, self.world)
        self.validate()  # if a stop interrupted the last validation
        if self.end_reason and not self.stop.exit_code:
            # No later checkpoint will record this score, so rewrite the last one.
            self.saved_step = -1  # makes save() write although this step is already saved
            self.save()
        self.throughput = Throughput(clock())

    def is_due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    @property
    def end_reason(self) -> str | None:
        """The setting by which the training is over; None if it goes on."""
        training, state = self.config.training, self.state
        if state.step >= training.steps:
            return "training.steps"
        if training.max_epochs is not None and state.cursor.epoch >= training.max_epochs:
            return "training.max_epochs"
        n_without_best = (state.validated - state.best_step) // training.validate_every
        if training.patience is not None and n_without_best >= training.patience:
            return "training.patience"
        return "training.max_hours" if self.is_time_up else None

    def advise_at_end(self) -> str:
        """Say how a run that is over can go on."""
        if self.end_reason == "training.steps" and self.config.optimizer.schedule == "cosine":
            return "begin another run with training.init_from to train further"
        return f"raise {self.end_reason} to continue"

    @property
    def is_validation_due(self) -> bool:
        if self.dev is None or self.state.validated >= self.state.step:
            return False
        return self.is_due(self.config.training.validate_every) or self.end_reason is not None

    def cast_votes(self) -> StopVotes:
        """Return what this rank asks all ranks to do after this update."""
        minutes = self.config.training.checkpoint_minutes
        is_checkpoint_due = minutes is not None and clock() - self.saved_at >= 60 * minutes
        is_broken = self.world.is_main and self.writer.is_broken
        hours = self.config.training.max_hours
        is_time_up = hours is not None and clock() - self.started_at >= 3600 * hours
        is_finished = self.world.is_main and is_time_up
        return StopVotes(*self.stop.votes, is_checkpoint_due, is_broken, is_finished)

    # ---- outcomes of updates ------------------------------------------------------------------------------------

    def apply_outcomes(self, wait_for_newest: bool) -> None:
        for outcome in self.outcomes.take_completed(wait_for_newest):
            self.apply_outcome(outcome)

    def apply_outcome(self, outcome: UpdateOutcome) -> None:
        """Add an update's results to the running totals, and act on the ranks' votes."""
        state, update, stats = self.state, outcome.pending.update, outcome.stats
        if outcome.is_applied:
            self.grad_norm = stats.grad_norm
            self.layer_norms = outcome.pending.layer_norms
            # Weights that have blown up are worse than a guess, long before they are infinite.
            if stats.nll / update.n_tgt < math.log(self.model.n_vocab) + 1:
                self.sound_step = outcome.pending.step - 1
            self.throughput.add(update)
            self.state = replace(
                state,
                skipped=0,
                tokens_seen=state.tokens_seen + update.n_tgt,
                window_loss=state.window_loss + stats.loss,
                window_nll=state.window_nll + stats.nll,
                window_tokens=state.window_tokens + update.n_tgt,
            )
        else:
            self.grad_norm = 0.0
            self.layer_norms = None
            self.state = replace(state, skipped=state.skipped + 1)
            self.reject_update(outcome)
        votes = outcome.votes
        self.stop.agree(votes.interrupt, votes.preempt)
        self.is_save_due = self.is_save_due or votes.checkpoint > 0
        self.is_time_up = self.is_time_up or votes.finish > 0
        if votes.broken:
            # finish() raises the writer's Failure, which on_main passes to all ranks; only the main
            # rank has a writer, hence the lambda.
            self.world.on_main(lambda: self.writer.finish())

    def reject_update(self, outcome: UpdateOutcome) -> None:
        """Report an update that was not applied; fail if the config says so or too many in a row
        were skipped.
        """
        world, stats = self.world, outcome.stats
        summary = report_nonfinite(outcome, self.run, self.model, self.store, self.vocab, world)
        self.log(
            SkippedEvent(
                step=outcome.pending.step, loss=str(stats.loss), grad_norm=str(stats.grad_norm)
            )
        )
        may_skip = self.config.training.on_nonfinite == "skip"
        if may_skip and self.state.skipped <= MAX_SKIPPED:
            if world.is_main:
                say(f"warning: {summary}")
            return

        def fail() -> None:
            raise Failure(f"{summary}; {self.advise_after_failure(self.writer.saved_step)}")

        world.on_main(fail)

    def advise_after_failure(self, saved_step: int) -> str:
        """Say what can be done after the failure of an update, given the last checkpoint's."""
        rate, _ = self.config.optimizer.rate_setting
        start_over = (
            f"start over in another out=DIR with a lower {rate} or more optimizer.warmup_steps"
        )
        if not saved_step:
            return f"there is no checkpoint yet: {start_over}"
        skip = "continue from it with training.on_nonfinite=skip"
        if saved_step <= self.sound_step:
            return f"the last checkpoint is intact: {skip}, or {start_over}"
        return f"the last checkpoint may be no better: {skip} or, if that fails too, {start_over}"

    def log(self, event: Event) -> None:
        if self.world.is_main:
            self.metrics.write(event)
            self.trackers.send(event)

    def log_window(self) -> str:
        """Log a summary of the updates since the last log line; return a short form of it for the
        progress bar.
        """
        state, n_tokens = self.state, self.state.window_tokens
        speed, now = self.throughput, clock()
        self.throughput = Throughput(now)
        seconds = max(now - speed.started_at, 1e-9)
        self.state = replace(state, window_loss=0.0, window_nll=0.0, window_tokens=0)
        if not n_tokens:  # all were skipped
            return ""
        lr = self.optimizer.param_groups[0]["lr"]
        loss, nll = state.window_loss / n_tokens, state.window_nll / n_tokens
        self.log_layers()
        event = TrainEvent(
            step=state.step,
            epoch=state.cursor.epoch,
            loss=round(loss, 5),
            nll=round(nll, 5),
            ppl=round(math.exp(min(nll, 50.0)), 3),
            lr=lr,
            grad_norm=round_digits(self.grad_norm),
            src_tokens_per_s=round(speed.n_src / seconds, 1),
            tgt_tokens_per_s=round(speed.n_tgt / seconds, 1),
            updates_per_s=round(speed.updates / seconds, 3),
            waited_s=round(speed.waited_s, 3),
            memory_bytes=read_peak_memory(self.world.device),
            elapsed_s=round(state.elapsed_s, 1),
        )
        self.log(event)
        if self.world.is_main:
            self.warn_if_not_learning(state.step, nll)
        return (
            f"loss {loss:.3f}, nll {nll:.3f}, lr {lr:.2e}, "
            f"{event.tgt_tokens_per_s:,.0f} target tokens/s"
        )

    def log_layers(self) -> None:
        """Log the norms of each layer's gradients and step in the last update; none if it was
        skipped.
        """
        if self.layer_norms is None or not self.world.is_main:
            return
        by_figure = []
        for norms in self.layer_norms.tolist():
            layers = zip(self.layers.layers, norms, strict=True)
            by_figure.append({layer: round_digits(norm) for layer, norm in layers})
        grad_norm, update_norm = by_figure
        self.log(LayerEvent(step=self.state.step, grad_norm=grad_norm, update_norm=update_norm))

    def warn_if_not_learning(self, step: int, nll: float) -> None:
        """On the main rank: warn if this log line shows that the run is not on track."""
        warning = self.learning.check(step, nll)
        if warning is None:
            return
        say(f"warning: {warning.message}")
        if self.learning.is_new(warning):
            self.log(warning)

    # ---- validation and checkpoints --------------------------------------------------------------------------------

    def validate(self) -> None:
        """Score the dev set if validation is due, and save a checkpoint if the score is the best so
        far.

        If a stop interrupts it, the next start validates before it trains.
        """
        if self.dev is None or self.stop.exit_code or not self.is_validation_due:
            return
        average = self.optimizer.average
        with contextlib.nullcontext() if average is None else average.in_place_of_weights():
            result = self.score(self.dev)
        if result is None:
            return
        selection_score = self.world.broadcast(result.selection_score)
        best = -math.inf if self.state.best is None else self.state.best
        is_best = selection_score > best
        self.log_validation(result, is_best)
        self.state = replace(self.state, validated=self.state.step)
        if is_best:
            self.state = replace(self.state, best=selection_score, best_step=self.state.step)
            self.save()

    def score(self, dev: DevSet) -> Validation | None:
        model = self.model
        if self.config.training.shard:
            model = gather_model(self.model)
        translator = Translator(model, self.vocab, self.config.dev_decoding, self.world.device)
        return validate(
            translator,
            dev,
            self.state.step,
            self.config.evaluation,
            self.micro_tokens,
            self.world,
            self.stop,
        )

    def log_validation(self, result: Validation, is_best: bool) -> None:
        step, score = self.state.step, result.bleu
        judgement = None
        if self.world.is_main and self.reference is not None:
            judgement = self.reference.judge(step, result.nll.value, score.value if score else None)
        for sample in result.samples:
            self.log(sample.event)
        by_length = {name: round(nll, 5) for name, nll in result.nll.by_length.items()}
        entropies = mean_entropies(result.samples)
        event = ValidEvent(
            step=step,
            nll=round(result.nll.value, 5),
            ppl=round(result.perplexity, 3),
            bleu=score.value if score else None,
            signature=score.signature if score else None,
            chrf=result.chrf,
            nll_by_length=by_length,
            entropy={layer: round_digits(value) for layer, value in entropies.items()},
            elapsed_s=round(self.state.elapsed_s, 1),
        )
        self.log(judgement.add_to(event) if judgement else event)
        if self.world.is_main:
            bleu = f", BLEU {score.value:.2f}" if score else ""
            mark = "  (best)" if is_best else ""
            beside = f"; {judgement.describe()}" if judgement else ""
            say(
                f"update {step}: dev NLL {result.nll.value:.4f}, perplexity {result.perplexity:.2f}"
                f"{bleu}{mark}{beside}"
            )

    def save(self) -> None:
        """Write a checkpoint for the current update unless it already has one."""
        if self.state.skipped and not self.has_finite_weights():
            return  # a run cannot be resumed from NaN or infinite weights
        if self.saved_step != self.state.step:
            snapshot = self.take_snapshot()

            def write() -> None:
                self.writer.save(snapshot, self.state)
                self.write_status("running")

            # All ranks wait, so that a slow disk on the main rank cannot time out the others' next
            # collective.
            self.world.on_main(write)
            self.saved_step = self.state.step
        elif (
            self.state.best_step == self.state.step
        ):  # already written, but it has just become the best: relink only

            def link_best() -> None:
                self.writer.wait()
                self.writer.link_and_prune(self.state)

            self.world.on_main(link_best)
        self.saved_at, self.is_save_due = clock(), False

    def save_alone(self) -> None:
        """Write a checkpoint of the last update while the other ranks are at another place: of a
        model that the main rank holds whole, nobody else is needed.
        """
        self.apply_outcomes(wait_for_newest=True)
        is_saved = self.saved_step == self.state.step
        if not self.world.is_main or is_saved or self.config.training.shard:
            return
        if self.state.skipped and not self.has_finite_weights():
            return
        self.writer.save(self.take_snapshot(), self.state)
        self.writer.wait()
        self.saved_step = self.state.step
        self.status.step = self.writer.saved_step

    def take_snapshot(self) -> Snapshot:
        """Collect what a checkpoint holds; all ranks must call this if the model is sharded."""
        average = self.optimizer.average
        averages = None if average is None else average.averages
        return checkpoint.take_snapshot(self.model, self.optimizer, self.world.is_main, averages)

    def has_finite_weights(self) -> bool:
        weights = [p.detach() for p in self.model.parameters()]
        return bool(total_norm(weights).isfinite())

    def write_status(self, state: State, code: int | None = None, message: str = "") -> None:
        self.status.step = self.writer.saved_step
        self.status.write(state, code, message)

    def finish(self) -> None:
        """On the main rank: wait for the last checkpoint, and record in status.json how the run
        ended.
        """
        self.writer.finish()
        code = self.stop.exit_code
        if code:
            message = f"stopped by {self.stop.reason}; run the same command again to continue"
            self.write_status("preempted", code, message)
        else:
            self.write_status("done", 0)
        reason = self.end_reason
        cause = f", ended by {reason}" if reason not in (None, "training.steps") else ""
        say(
            f"{'stopped' if code else 'done'}: {self.state.step} updates in "
            f"{format_duration(self.state.elapsed_s)}{cause}; checkpoints in {self.run.checkpoints}"
        )


# ---- entry point ---------------------------------------------------------------------------------


def train(config: RunConfig, world: World) -> int:
    """Start or continue the run in `config.folder`; return its exit code."""
    config = resolve_precision(config, world)
    micro_tokens = resolve_micro_tokens(config, world)
    config = replace(config, training=replace(config.training, micro_tokens=micro_tokens))
    run, stop = RunFolder(config.folder), StopRequest()
    machine = name_machine(world.device, world.size)
    status = StatusFile(run, config.training.steps, machine)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.listening())
        world.on_main(lambda: _claim_folder(config, run, status, stack))
        if not world.is_main:
            stack.enter_context(status.recording_failures())
        try:
            trainer = Trainer(config, micro_tokens, world, run, stop, status)
            if world.is_main:
                stack.callback(trainer.writer.close)
                stack.callback(trainer.trackers.finish)
            world.on_main(lambda: _announce_run(trainer))
            if not trainer.end_reason or trainer.is_validation_due:
                trainer.loop()
            elif world.is_main:
                say(
                    f"nothing to do: {trainer.state.step} updates are done; {trainer.advise_at_end()}"
                )
                # left if the run was killed at its very end
                with trainer.make_epoch_stores() as epoch_stores:
                    epoch_stores.remove()
                trainer.write_status("done", 0)
        except RuntimeError as error:
            if not is_rank_lost(error, world):
                raise
            _report_lost_rank(error, status, world)
            # Returning would destroy the process group, which waits for the rank that was lost.
            raise SystemExit(PREEMPTED) from error
        return stop.exit_code


def _claim_folder(
    config: RunConfig, run: RunFolder, status: StatusFile, stack: contextlib.ExitStack
) -> None:
    """Lock the run folder and record the config there; raise UserError with the differences if
    another is recorded.
    """
    verify(Path(config.data.store))
    make_folder(run.path)
    stack.enter_context(lock(run.path, "nmt-train"))
    stack.enter_context(status.recording_failures())
    for folder in (run.checkpoints, *(run.path / name for name in config.training.track)):
        check_own_folder(folder, inside=run.path)
    make_folder(run.checkpoints)
    remove_leftovers(run.checkpoints)
    if check_same_run(config) != config:
        write_text(run.config, format_config(config))
    claim_mirror(config, run)


def check_same_run(config: RunConfig) -> RunConfig | None:
    """Return the config that is recorded in the run folder, if there is one; raise UserError if it
    is that of another run.
    """
    run = RunFolder(config.folder)
    _check_run_folder(run, Path(config.data.store))
    if not has_plain_file(run.config):
        _check_unused(run)
        return None
    recorded = load_recorded_config(run.config)
    changes = list_differences(recorded, config)
    if changes:
        raise UserError(
            f"{run.path}: this run was started with different settings ({'; '.join(changes)}); "
            "restore them, choose another out=DIR, or remove the folder to start over"
        )
    return recorded


def _check_run_folder(run: RunFolder, store: Path) -> None:
    """Refuse a folder that is something else than a run, or has a config that the user wrote."""
    if run.path.resolve() == store.resolve():
        raise UserError(f"{run.path}: is both out and data.store; choose another out=DIR")
    if os.path.lexists(run.path / MANIFEST_FILE):
        raise UserError(
            f"{run.path}: is a checkpoint, a store or an export, not a run; choose another out=DIR"
        )
    was_begun = run.checkpoints.exists() or os.path.lexists(run.path / ".lock")
    if os.path.lexists(run.config) and not was_begun:
        raise UserError(
            f"{run.config}: exists, but its folder is not that of a run; "
            "choose another out=DIR, or move the file away"
        )


def _check_unused(run: RunFolder) -> None:
    """Refuse a folder of no run in which training would replace a file."""
    if run.path.resolve() == Path("/"):
        raise UserError(f"out={run.path}: is the root folder; choose another out=DIR")
    if checkpoint.list_steps(run):
        return
    for path in (run.metrics, *run.vocabs, run.report, run.results, run.curve):
        if os.path.lexists(path):
            raise UserError(
                f"{path}: exists, but its folder is not that of a run; "
                "choose another out=DIR, or move the file away"
            )


def _announce_run(trainer: Trainer) -> None:
    """On the main rank: print what is trained, and update the vocabulary, links and status in the
    run folder.
    """
    config, store = trainer.config, trainer.store
    n_parameters = sum(p.numel() for p in trainer.model.parameters())
    say(
        f"model: {n_parameters / 1e6:.1f}M parameters, {format_size(trainer.vocab)} pieces; data: "
        f"{len(store):,} pairs, {len(store.tgt.ids):,} target pieces; {config.training.precision} "
        f"on {trainer.status.machine}; run folder {trainer.run.path}"
    )
    if trainer.mixture is not None:
        say(describe_mixture(trainer.mixture, config.data))
    floor = smoothed_loss_floor(config.training.label_smoothing, trainer.model.n_vocab)
    say(
        "yardsticks: a model that knows only how often each piece occurs has an NLL of "
        f"{trainer.learning.unigram_nll:.2f} nats per target token; no smoothed loss is below {floor:.2f}"
    )
    if config.training.ema is not None:
        say(
            f"training.ema: validation and checkpoints use the moving average of the weights, of "
            f"decay {config.training.ema:g}"
        )
    for reference in (find_dev_reference(config), trainer.reference):
        if reference is not None:
            say(reference.describe())
    if trainer.state.step:
        say(f"continuing after update {trainer.state.step}")
    write_vocab(trainer.run.path, trainer.vocab)
    trainer.writer.link_and_prune(trainer.state)
    trainer.write_status("running")


def _report_lost_rank(error: Exception, status: StatusFile, world: World) -> None:
    """Report a broken connection to another rank, which was killed or failed (then it reports why
    itself).
    """
    first_line = str(error).partition("\n")[0]
    say(
        f"stopped: lost the connection to another rank ({first_line}); "
        "run the same command again to continue from the last checkpoint"
    )
    if world.is_main and not status.has_failed:
        status.write(
            "preempted", PREEMPTED, "lost another rank; run the same command again to continue"
        )
