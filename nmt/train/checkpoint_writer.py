"""Writes, links and prunes the checkpoints of a run, and tolerates a disk that is full for a while.

On a GPU, training only waits until the tensors are copied to the host; a thread then writes them.
If a checkpoint cannot be written, there is a warning, and the next one is attempted when it is due;
the third failure in a row ends the run. The last good checkpoint is never touched before its
successor is complete.
"""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from nmt import checkpoint
from nmt.checkpoint import Snapshot, TrainState
from nmt.config import RunConfig
from nmt.data.vocab import Vocabulary
from nmt.system.errors import Failure, UserError
from nmt.system.progress import clock, say
from nmt.system.run_folder import RunFolder
from nmt.system.tensor_files import Tensors
from nmt.train.kept_checkpoints import find_resumable_steps, prune_checkpoints
from nmt.train.mirror import copy_run
from nmt.train.run_log import MetricsLog

MAX_FAILURES = 3  # in a row
SLOW_S = 1.0  # that training waits for the disk
SPARE_BYTES = 1 << 24  # for the small files, and for other programs that write to the same disk


class CheckpointWriter:
    """Writes the checkpoints of a run; only the main rank has one. `in_background` lets training
    continue meanwhile.
    """

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        vocab: Vocabulary,
        metrics: MetricsLog,
        saved_step: int,
        in_background: bool,
    ) -> None:
        self.run, self.config, self.vocab, self.metrics = run, config, vocab, metrics
        self.in_background = in_background
        self.saved_step = saved_step  # of the last good checkpoint
        self.failures = 0  # in a row
        self._tried_step = saved_step
        self._is_slow = False  # the disk, as was said
        self._failure_reason = ""  # of the last failure
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._host_copies: Tensors = {}  # read by the thread

    @property
    def is_broken(self) -> bool:
        return self.failures >= MAX_FAILURES

    def save(self, snapshot: Snapshot, state: TrainState) -> None:
        """Write a checkpoint, or start writing it in the background."""
        self._wait_for_disk(state.step)
        if self.in_background:
            snapshot = self._copy_to_host(snapshot)
        try:
            state = replace(state, metrics_bytes=self.metrics.sync())
        except OSError as error:
            self._count_failure(state.step, error)
            return
        self._writing = self._thread.submit(self._write, snapshot, state)
        self._start_copy()
        if not self.in_background:
            self.wait()

    def poll(self) -> None:
        """Record the outcome of the last save if it has finished."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the last save to finish and record its outcome."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except (OSError, Failure) as error:
            self._count_failure(self._tried_step, error)
        else:
            self.failures, self.saved_step = 0, self._tried_step

    def _wait_for_disk(self, step: int) -> None:
        """Wait for the last save to finish, and say once if that holds up the training."""
        started_at = clock()
        self.wait()
        waited_s = clock() - started_at
        if waited_s >= SLOW_S and not self._is_slow:
            self._is_slow = True
            say(
                f"warning: training waited {waited_s:.0f} s at update {step} for the previous checkpoint to be "
                "written; raise training.checkpoint_every, or use a faster disk"
            )

    def finish(self) -> None:
        """Wait for the last checkpoint; raise a `Failure` if it could not be written."""
        self.wait()
        if self.failures:
            rest = "starts from the beginning"
            resumable = find_resumable_steps(self.run, self.saved_step)
            if resumable:
                rest = f"continues from the last good checkpoint, of update {resumable[-1]}"
            raise Failure(
                f"the checkpoint of update {self._tried_step} could not be written: {self._failure_reason}; "
                f"free some disk space and run the same command again; it {rest}"
            )

    def link_and_prune(self, state: TrainState) -> None:
        """Update the links `last` and `best` and remove old checkpoints, including those that a
        killed process left behind.
        """
        best_link = self.run.checkpoints / "best"
        try:
            if self.run.checkpoint(state.step).exists():
                checkpoint.link_checkpoint(self.run, "last", state.step)
            if self.run.checkpoint(state.best_step).exists():
                checkpoint.link_checkpoint(self.run, "best", state.best_step)
            best_step = 0
            if best_link.is_symlink():
                # A stranger's link may have any name in it.
                best_step = checkpoint.parse_step(best_link.readlink().name) or 0
            prune_checkpoints(self.run, self.config.training, best_step, state.step)
        except OSError as error:
            say(
                f"warning: {self.run.checkpoints}: could not update the links or remove old checkpoints "
                f"({_describe(error)})"
            )

    def close(self) -> None:
        """Wait for what is being written, because the run's lock is released next."""
        self._start_copy()
        self._thread.shutdown()
        self.wait()

    def _start_copy(self) -> None:
        """Have the thread copy the run to its mirror, after what it is writing."""
        mirror = self.config.training.mirror
        if mirror is not None:
            self._thread.submit(self._copy_to_mirror, mirror)

    def _copy_to_mirror(self, url: str) -> None:
        try:
            copy_run(url, self.run, Path(self.config.data.store))
        except (Failure, UserError, OSError) as error:
            say(f"warning: {error}; training goes on, and with the next checkpoint copies again")

    def _copy_to_host(self, snapshot: Snapshot) -> Snapshot:
        """Copy the tensors into pinned memory, which is reused each time and which the thread
        writes from.
        """
        copied = Snapshot(self._copy(snapshot.weights), self._copy(snapshot.moments))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, tensors: Tensors) -> Tensors:
        for name, value in tensors.items():
            if name not in self._host_copies:
                self._host_copies[name] = torch.empty(
                    value.shape, dtype=value.dtype, pin_memory=value.is_cuda
                )
            self._host_copies[name].copy_(value, non_blocking=True)
        return {name: self._host_copies[name] for name in tensors}

    def _write(self, snapshot: Snapshot, state: TrainState) -> None:
        self._tried_step = state.step
        n_free = shutil.disk_usage(self.run.checkpoints).free
        n_needed = snapshot.size + SPARE_BYTES
        if n_free < n_needed:
            raise Failure(
                f"{self.run.checkpoints}: {n_needed:,} bytes are needed, but only {n_free:,} are free"
            )
        path = self.run.checkpoint(state.step)
        checkpoint.save_checkpoint(path, snapshot, state, self.config, self.vocab)
        self.link_and_prune(state)

    def _count_failure(self, step: int, error: Exception) -> None:
        self.failures += 1
        self._tried_step, self._failure_reason = step, _describe(error)
        say(
            f"warning: the checkpoint of update {step} could not be written: {self._failure_reason}; "
            f"training will try again (failure {self.failures} in a row; after {MAX_FAILURES} the run ends)"
        )


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
