"""The training loop.

Each turn takes an update's data, runs the update, handles the outcomes of earlier ones, validates
and saves. All ranks make the same decisions, because they base them on outcomes that are summed over
all ranks.
"""

import contextlib
import math
from dataclasses import replace

from torch import nn

from nmt.checkpoint.checkpoint import Window
from nmt.system.errors import Failure
from nmt.system.progress import Progress, clock, format_duration, say
from nmt.train.checkpoint_writer import CheckpointWriter, Mirror
from nmt.train.events import Listener, SkippedEvent
from nmt.train.memory_probe import explain_out_of_memory, probe_peak_memory
from nmt.train.nonfinite import MAX_SKIPPED, advise_after_failure, report_nonfinite
from nmt.train.optimizer import find_idle_weights, take_snapshot
from nmt.train.run_log import RunLog
from nmt.train.setup import Setup
from nmt.train.shutdown import State, StatusFile, StopRequest
from nmt.train.update import (
    Outcomes,
    StopVotes,
    Throughput,
    UpdateOutcome,
    add_to_window,
    run_update,
)
from nmt.train.validate import Validation, validate
from nmt.translate.translator import Translator

MOMENTS_SHARE = 0.1  # of checkpoint_minutes: how old the last checkpoint with moments may become
# Target tokens of an update; with fewer, all units of a small layer may be off, and its gradients zero.
ENOUGH_TOKENS = 100
SECONDS_BETWEEN_LINES = 1.0  # of losses in a log, so that a small model does not flood it


class Trainer:
    """Runs the loop on what `open_setup` opened. Of several ranks, only the main one has a log and
    a writer.
    """

    def __init__(
        self,
        setup: Setup,
        stop: StopRequest,
        status: StatusFile,
        listener: Listener,
        mirror: Mirror,
    ) -> None:
        self.setup, self.stop, self.status, self.listener = setup, stop, status, listener
        self.config, self.world = setup.config, setup.world
        self.run = status.run
        self.model, self.optimizer = setup.model, setup.optimizer
        self.state = setup.state

        # The rest belongs to this process and is not saved.
        # Time is counted as if this process had run the earlier updates too.
        self.started_at = clock() - self.state.elapsed_s
        self.saved_at, self.saved_step = clock(), self.state.step
        # of the last checkpoint from which training can continue, which has Adam's moments
        self.moments_step = self.state.step
        self.moments_at = clock() if self.state.step else -math.inf
        self.throughput = Throughput()
        self.outcomes = Outcomes(self.world.device)
        self.grad_norm = 0.0  # of the last update
        self.sound_step = -1  # the last update after which the model was seen to predict text
        self.is_save_due = False  # set when checkpoint_minutes have passed on some rank
        max_hours = self.config.training.max_hours
        max_s = math.inf if max_hours is None else 3600 * max_hours
        self.ends_at = self.started_at + max_s
        # Later the main rank decides, because the ranks' clocks differ.
        self.is_time_up = self.state.elapsed_s >= max_s
        if self.world.is_main:
            self.log = RunLog(setup, self.run, listener)
            self.writer = CheckpointWriter(
                self.run, self.config, setup.vocab, self.log.metrics, self.state.step, mirror
            )

    def train(self) -> None:
        """Run updates until the run is over or a stop is requested."""
        training, world = self.config.training, self.world
        progress = Progress(
            "training",
            self.expected_steps,
            "updates",
            self.state.step,
            world.is_main,
            SECONDS_BETWEEN_LINES,
            self.ends_at,
            starts_slowly=True,
        )
        epoch_stores = self.setup.make_epoch_stores()
        with (
            progress,
            explain_out_of_memory(self.setup.micro_tokens),
            self.setup.make_loader(epoch_stores) as updates,
        ):
            self.prepare_loop()
            while not self.end_reason and not self.stop.exit_code:
                self.listener.enter("training")
                # wait for the next update's data
                step = self.state.step + 1
                started_at = clock()
                update = next(updates)
                self.throughput.waited_s += clock() - started_at

                # forward, backward, one step
                is_log_step = step % training.log_every == 0 or step in (1, training.steps)
                pending = run_update(
                    self.setup.replica, self.optimizer, update, step, self.config, self.cast_votes
                )
                self.listener.hear_update(step, update, pending.micro_sums)
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
                progress.total = self.expected_steps
                news = self.describe_window()
                progress.advance(1, news, may_print=is_log_step and news is not None)
                if is_log_step:
                    self.log_window()

                # validate
                started_at = clock()
                self.validate()

                # save
                if is_save_step or self.is_save_due or self.stop.exit_code or self.end_reason:
                    self.apply_outcomes(wait_for_newest=True)
                    self.save()
                # validating and saving do not count for the speed, but for the time left
                took_s = clock() - started_at
                self.throughput.started_at += took_s
                progress.started_at += took_s
                if self.state.validated == step:
                    n_left = math.ceil((self.expected_steps - step) / training.validate_every)
                    progress.other_s = took_s * n_left

        self.listener.enter("end")
        if self.end_reason and not self.is_validation_due:
            self.stop.exit_code = 0  # a stop was requested, but the run is complete anyway
        if world.is_main and not self.stop.exit_code:
            epoch_stores.remove()
        # All ranks wait for this: torchrun kills the others as soon as one exits with a nonzero
        # code.
        world.on_main(self.finish)

    def prepare_loop(self) -> None:
        """Before the first update of this process, probe peak memory, finish an interrupted validation,
        and score the model that a new run begins with.
        """
        if self.world.device.type == "cuda":
            probe_peak_memory(self.setup)
        self.validate()
        if self.end_reason and not self.stop.exit_code:
            # No later checkpoint will record this score, so rewrite the last one.
            self.saved_step = -1  # makes save() write although this step is already saved
            self.save()
        self.throughput = Throughput()

    # ---- what is due -----------------------------------------------------------------------------

    @property
    def end_reason(self) -> str | None:
        """The setting that has ended training; None if it continues."""
        training, state = self.config.training, self.state
        if state.step >= training.steps:
            return "training.steps"
        if training.max_epochs is not None and state.cursor.epoch >= training.max_epochs:
            return "training.max_epochs"
        n_without_best = (state.validated - state.best_step) // training.validate_every
        if training.patience is not None and n_without_best >= training.patience:
            return "training.patience"
        return "training.max_hours" if self.is_time_up else None

    @property
    def expected_steps(self) -> int:
        """Return after how many updates the run will end, as far as that is known: epochs have about
        as many updates each, but only a finished one tells how many.
        """
        training, cursor = self.config.training, self.state.cursor
        if training.max_epochs is None or not cursor.epoch:
            return training.steps
        n_in_epochs = self.state.step - cursor.update
        return min(training.steps, n_in_epochs * training.max_epochs // cursor.epoch)

    @property
    def is_validation_due(self) -> bool:
        state = self.state
        if self.setup.dev is None:
            return False
        if state.step == 0:  # of a model that was trained before, to see what this run gains
            return self.config.training.init_from is not None and state.best is None
        if state.validated >= state.step:
            return False
        is_step = state.step % self.config.training.validate_every == 0
        return is_step or self.end_reason is not None

    def cast_votes(self) -> StopVotes:
        """Return what this rank asks all ranks to do after this update."""
        minutes = self.config.training.checkpoint_minutes
        is_checkpoint_due = minutes is not None and clock() - self.saved_at >= 60 * minutes
        is_finished = self.world.is_main and clock() >= self.ends_at
        return StopVotes(*self.stop.votes, is_checkpoint_due, is_finished)

    # ---- outcomes of updates ------------------------------------------------------------------------------------

    def apply_outcomes(self, wait_for_newest: bool) -> None:
        for outcome in self.outcomes.take_completed(wait_for_newest):
            if outcome.is_applied:
                self.refuse_idle_weights(outcome)
                self.add_up(outcome)
            else:
                self.reject_update(outcome)
            self.act_on(outcome.votes)

    def add_up(self, outcome: UpdateOutcome) -> None:
        """Add an update's results to the running totals."""
        state, update, stats = self.state, outcome.pending.update, outcome.stats
        self.grad_norm = stats.grad_norm
        # A loss above a uniform guess means the weights have diverged, long before they are infinite.
        if stats.nll / update.n_tgt < math.log(self.model.n_vocab) + 1:
            self.sound_step = outcome.pending.step - 1
        self.throughput.add(update.n_src, update.n_tgt)
        self.state = replace(
            state,
            skipped=0,
            tokens_seen=state.tokens_seen + update.n_tgt,
            window=add_to_window(state.window, outcome),
        )

    def act_on(self, votes: StopVotes) -> None:
        """Do what the ranks have asked for, once all know of it."""
        self.stop.agree(votes.interrupt, votes.preempt)
        self.is_save_due = self.is_save_due or votes.checkpoint > 0
        self.is_time_up = self.is_time_up or votes.finish > 0

    def refuse_idle_weights(self, outcome: UpdateOutcome) -> None:
        """Fail if all gradients are zero, or after the first update of a run those of one weight. Some
        releases of torch compile code whose losses are right and whose gradients are zero.
        """
        fault = None
        if not outcome.stats.grad_norm:
            fault = "all gradients are zero, so the model learns nothing"
        elif not self.state.tokens_seen and outcome.pending.update.n_tgt >= ENOUGH_TOKENS:
            idle = find_idle_weights(self.optimizer, self.setup.replica.gather)
            if idle and not self.config.training.freeze:
                fault = f"the gradients of {idle[0]} are zero, so it learns nothing"
        else:
            return
        remedy = "try training.compile=off, or another version of torch"
        self.world.fail_if(Failure(f"{fault}: {remedy}") if fault else None)

    def reject_update(self, outcome: UpdateOutcome) -> None:
        """Report an update that was not applied; fail if the config says so or too many in a row
        were skipped.
        """
        setup = self.setup
        self.grad_norm = 0.0
        self.state = replace(self.state, skipped=self.state.skipped + 1)
        setup.replica.gather_weights()
        summary = report_nonfinite(
            outcome, self.run, self.model, setup.store, setup.vocab, self.world
        )
        may_skip = self.config.training.on_nonfinite == "skip"
        is_fatal = not may_skip or self.state.skipped > MAX_SKIPPED
        error = None
        if self.world.is_main:
            loss, grad_norm = str(outcome.stats.loss), str(outcome.stats.grad_norm)
            self.log.write(SkippedEvent(step=outcome.pending.step, loss=loss, grad_norm=grad_norm))
            saved_step = self.writer.saved_step
            is_sound = saved_step <= self.sound_step
            advice = advise_after_failure(saved_step, is_sound, self.config.optimizer)
            if is_fatal:
                error = Failure(f"{summary}; {advice}")
            else:
                say(f"warning: {summary}")
        self.world.fail_if(error)

    def describe_window(self) -> str | None:
        """Describe the updates since the last log line for the progress bar; None if none was
        applied. All figures are on the host already, so no device waits for the bar.
        """
        window, throughput = self.state.window, self.throughput
        if not window.tokens:
            return None
        lr = self.optimizer.param_groups[0]["lr"]
        return (
            f"loss {window.mean_loss:.3f}, nll {window.mean_nll:.3f}, "
            f"{throughput.n_tgt / throughput.seconds:,.0f} target tokens/s, lr {lr:.2e}"
        )

    def log_window(self) -> None:
        """Log the updates since the last log line, unless all of them were skipped."""
        state, throughput = self.state, self.throughput
        self.throughput = Throughput()
        self.state = replace(state, window=Window())
        if not state.window.tokens or not self.world.is_main:
            return
        lr = self.optimizer.param_groups[0]["lr"]
        self.log.write_window(state, throughput, lr, self.grad_norm)

    # ---- validation and checkpoints --------------------------------------------------------------------------------

    def validate(self) -> None:
        """Score the dev set if validation is due, and save a checkpoint if the score is the best so
        far.

        If a stop interrupts it, the next start validates before it trains.
        """
        if self.stop.exit_code or not self.is_validation_due:
            return
        average = self.optimizer.average
        weights = contextlib.nullcontext() if average is None else average.in_place_of_weights()
        with weights:
            result = self.score()
        if result is None:
            return
        selection_score = self.world.broadcast(result.selection_score)
        best = -math.inf if self.state.best is None else self.state.best
        is_best = selection_score > best
        if self.world.is_main:
            self.log.write_validation(self.state, result, is_best)
        self.state = replace(self.state, validated=self.state.step)
        if is_best:
            self.state = replace(self.state, best=selection_score, best_step=self.state.step)
            if self.state.step:  # what the run began with is saved elsewhere
                self.save()

    def score(self) -> Validation | None:
        setup, world, config = self.setup, self.world, self.config
        assert setup.dev is not None
        self.listener.enter("validating")
        setup.replica.gather_weights()
        translator = Translator(self.model, setup.vocab, config.dev_decoding, world.device)
        step, evaluation = self.state.step, config.evaluation
        return validate(
            translator, setup.dev, step, evaluation, setup.micro_tokens, world, self.stop
        )

    def save(self) -> None:
        """Write a checkpoint for the current update unless it already has one. It has only weights
        if one with Adam's moments, three times as large, was written a moment ago.
        """
        self.listener.enter("saving")
        self.setup.replica.gather_weights()
        if self.state.skipped and not self.has_finite_weights():
            return  # a run cannot be resumed from NaN or infinite weights
        has_moments = self.must_save_moments()
        is_new = self.saved_step != self.state.step
        lacks_moments = has_moments and self.moments_step != self.state.step
        if is_new or lacks_moments:
            gather = self.setup.replica.gather
            snapshot = take_snapshot(self.model, self.optimizer, has_moments, gather)

            def write() -> None:
                self.writer.save(snapshot, self.state)
                self.write_status("running")

            # All ranks wait, so that a slow disk on the main rank cannot time out the others' next
            # collective.
            self.world.on_main(write)
            self.saved_step = self.state.step
            if has_moments:
                self.moments_step, self.moments_at = self.state.step, clock()
        elif self.state.best_step == self.state.step:
            # It was written before it was scored, so only the link is new.
            self.world.on_main(lambda: self.writer.link_and_prune(self.state))
        self.saved_at, self.is_save_due = clock(), False

    def must_save_moments(self) -> bool:
        """Whether training must be able to continue from a checkpoint written now; the main rank decides."""
        minutes = self.config.training.checkpoint_minutes
        is_last = bool(self.stop.exit_code) or self.end_reason is not None
        is_old = minutes is None or clock() - self.moments_at >= MOMENTS_SHARE * 60 * minutes
        # Weights alone might fit where the checkpoint that failed did not, and hide that it did.
        has_failed = self.world.is_main and self.writer.failures > 0
        return bool(self.world.broadcast(float(is_last or is_old or has_failed)))

    def has_finite_weights(self) -> bool:
        weights = [p.detach() for p in self.model.parameters()]
        return bool(nn.utils.get_total_norm(weights).isfinite())

    # ---- the end, on the main rank -------------------------------------------------------------------------

    def write_status(self, state: State, code: int | None = None, message: str = "") -> None:
        self.status.step = self.writer.saved_step
        self.status.write(state, code, message)

    def finish(self) -> None:
        """Record in status.json how the run ended."""
        self.writer.finish()
        code = self.stop.exit_code
        if code:
            end = "stopped"
            message = f"stopped by {self.stop.reason}; run the same command again to continue"
            self.write_status("preempted", code, message)
        else:
            end = "done"
            self.write_status("done", 0)
            self.warn_if_start_is_best()
        cause = ""
        if self.end_reason not in (None, "training.steps"):
            cause = f", ended by {self.end_reason}"
        if self.end_reason == "training.patience":
            cause += f" (no validation was better than that of update {self.state.best_step})"
        say(
            f"{end}: {self.state.step} updates in {format_duration(self.state.elapsed_s)}{cause}; "
            f"checkpoints in {self.run.checkpoints}"
        )

    def warn_if_start_is_best(self) -> None:
        if self.state.best is not None and self.state.best_step == 0:
            start, score = self.config.training.init_from, self.config.evaluation.best_by
            say(
                f"warning: no validation had a better {'nll' if self.state.best < 0 else score} than {start}, with "
                "which this run began; use that, or train longer, with a lower rate or more text"
            )

    def confirm_end(self) -> None:
        """Say that a run is already over, and how it can continue."""
        how = f"raise {self.end_reason} to continue"
        if self.end_reason == "training.steps" and self.config.optimizer.schedule == "cosine":
            how = "begin another run with training.init_from to train further"
        say(f"nothing to do: {self.state.step} updates are done; {how}")
        # left if the run was killed at its very end
        self.setup.make_epoch_stores().remove()
        self.write_status("done", 0)

    def close(self) -> None:
        """Let the listener and the writer finish, whatever ended the training."""
        if self.world.is_main:
            self.listener.finish()
            self.writer.close()
