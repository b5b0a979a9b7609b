"""Keeps the checkpoints of a run: writes, names and prunes them, and bears with a disk that is full for a while.

From a GPU the tensors are copied to the host, which is all that training waits for; a thread writes them. A checkpoint
that cannot be written costs a warning and is tried again when the next one is due; the third failure in a row ends the
run. The last good one is never touched before its successor is whole.
"""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from safetensors import SafetensorError
from torch import Tensor

from nmt import checkpoint
from nmt.checkpoint import Snapshot, TrainState
from nmt.config import RunConfig
from nmt.system.errors import Failure
from nmt.system.progress import say
from nmt.system.run_folder import RunFolder
from nmt.train.metrics_log import Journal

TRIES = 3
SPARE = 1 << 24  # bytes for the small files, and for whoever else writes


class Keeper:
    """Of the main rank, which alone writes. `is_apart`: training goes on meanwhile."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        vocab_model: bytes,
        journal: Journal,
        saved: int,
        is_apart: bool,
    ) -> None:
        self.run, self.config, self.vocab_model, self.journal = run, config, vocab_model, journal
        self.saved, self.is_apart = saved, is_apart  # the update of the last good one
        self.failures = 0  # in a row
        self._trouble = ""
        self._writer = ThreadPoolExecutor(1)
        self._flying: Future[None] | None = None
        self._host: dict[str, Tensor] = {}  # what the thread reads

    @property
    def is_broken(self) -> bool:
        return self.failures >= TRIES

    def save(self, snapshot: Snapshot, state: TrainState) -> None:
        """Write the checkpoint of `state`, or begin to."""
        self.settle(is_waiting=True)
        if self.is_apart:
            snapshot = Snapshot(self._copied(snapshot.weights), self._copied(snapshot.moments))
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        try:
            state = replace(state, metrics_bytes=self.journal.secured())
        except OSError as error:
            self._fail(state.step, error)
        else:
            self._flying = self._writer.submit(self._write, snapshot, state)
            self.settle(is_waiting=not self.is_apart)

    def settle(self, is_waiting: bool = False) -> None:
        """See what came of the last one, if it is known by now."""
        flying = self._flying
        if flying is None or not (is_waiting or flying.done()):
            return
        self._flying = None
        try:
            flying.result()
        except (OSError, SafetensorError, Failure) as error:
            self._fail(self._step, error)
        else:
            self.failures, self.saved = 0, self._step

    def finish(self) -> None:
        """The end: the last checkpoint must be there."""
        self.settle(is_waiting=True)
        if self.failures:
            raise Failure(
                f"the checkpoint of update {self._step} could not be written: {self._trouble}; make room, "
                "then start the same command again: it goes on from the last good one"
            )

    def order(self, state: TrainState) -> None:
        """Name the last and the best checkpoint and prune, also what a killed predecessor did not come to."""
        best = self.run.checkpoints / "best"
        try:
            if self.run.checkpoint(state.step).exists():
                checkpoint.link_checkpoint(self.run, "last", state.step)
            if self.run.checkpoint(state.best_step).exists():
                checkpoint.link_checkpoint(self.run, "best", state.best_step)
            kept = (
                int(best.readlink().name.removeprefix("step-")) if best.is_symlink() else 0
            )  # the best there is
            checkpoint.prune_checkpoints(
                self.run, self.config.training.keep_checkpoints, kept, state.step
            )
        except OSError as error:
            say(
                f"warning: {self.run.checkpoints}: the old checkpoints are not in order yet ({_told(error)})"
            )

    def close(self) -> None:
        """Wait for what is being written, for the lock of the run goes next."""
        self._writer.shutdown()
        self.settle(is_waiting=True)

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, value in tensors.items():
            if name not in self._host:
                self._host[name] = torch.empty(
                    value.shape, dtype=value.dtype, pin_memory=value.is_cuda
                )
            self._host[name].copy_(value, non_blocking=True)
        return {name: self._host[name] for name in tensors}

    def _write(self, snapshot: Snapshot, state: TrainState) -> None:
        self._step = state.step
        free, needed = shutil.disk_usage(self.run.checkpoints).free, snapshot.size + SPARE
        if free < needed:
            raise Failure(f"{self.run.checkpoints}: {needed:,} bytes are needed, {free:,} are free")
        checkpoint.save_checkpoint(
            self.run.checkpoint(state.step), snapshot, state, self.config, self.vocab_model
        )
        self.order(state)

    def _fail(self, step: int, error: Exception) -> None:
        self.failures += 1
        self._step, self._trouble = step, _told(error)
        say(
            f"warning: the checkpoint of update {step} could not be written: {self._trouble}; training goes on, the "
            f"next one is another try ({self.failures} of {TRIES} failures in a row, which end the run)"
        )


def _told(error: Exception) -> str:
    return (
        f"{error.filename}: {error.strerror}"
        if isinstance(error, OSError) and error.filename
        else str(error)
    )
