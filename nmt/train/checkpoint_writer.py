"""Writes, links and prunes the checkpoints of a run, and tolerates a disk that is full for a while.

Training waits until a checkpoint is written; a mirror then copies it beside the training. If one cannot be
written, there is a warning, and the next is attempted when it is due; the third failure in a row ends the
run. The last good checkpoint is never touched before its successor is complete.
"""

import shutil
from dataclasses import replace

from nmt.checkpoint import checkpoint
from nmt.checkpoint.checkpoint import Snapshot, TrainState
from nmt.checkpoint.run_checkpoints import link_checkpoint
from nmt.config import RunConfig
from nmt.data.vocab import Vocabulary
from nmt.system.errors import Failure, UserError
from nmt.system.progress import say
from nmt.system.run_folder import RunFolder
from nmt.train.kept_checkpoints import find_resumable_steps, prune_checkpoints
from nmt.train.run_log import MetricsLog

MAX_FAILURES = 3  # in a row
SPARE_BYTES = 1 << 24  # for the small files, and for other programs that write to the same disk


class Mirror:
    """Keeps a second copy of a run elsewhere. This one does nothing; nmt/extras/mirror.py overrides it."""

    def fetch(self) -> RunConfig | None:
        """Bring what is newer there to this machine; return the config that a fetched run began with."""
        return None

    def copy(self) -> None:
        """Copy the run now, and fail if that is impossible."""

    def start_copy(self) -> None:
        """Copy what has changed while training goes on."""

    def wait(self, step: int) -> None:
        """Wait at update `step` until the last copy has ended."""

    def close(self) -> None:
        """Copy what has changed, and wait for it."""


class CheckpointWriter:
    """Writes the checkpoints of a run; only the main rank has one."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        vocab: Vocabulary,
        metrics: MetricsLog,
        saved_step: int,
        mirror: Mirror,
    ) -> None:
        self.run, self.config, self.vocab, self.metrics = run, config, vocab, metrics
        self.saved_step = saved_step  # of the last good checkpoint
        self.mirror = mirror
        self.failures = 0  # in a row
        self._tried_step = saved_step
        self._failure_reason = ""  # of the last failure

    def save(self, snapshot: Snapshot, state: TrainState) -> None:
        """Write a checkpoint; raise a `Failure` if it is the last in a row that could not be written."""
        self.mirror.wait(state.step)
        self._tried_step = state.step
        try:
            state = replace(state, metrics_bytes=self.metrics.sync())
            self._write(snapshot, state)
        except (OSError, Failure) as error:
            self._count_failure(error)
            if self.failures == MAX_FAILURES:
                self.finish()
        else:
            self.failures, self.saved_step = 0, state.step
        self.mirror.start_copy()

    def finish(self) -> None:
        """Raise a `Failure` if the last checkpoint could not be written."""
        if self.failures:
            rest = "starts from the beginning"
            resumable = find_resumable_steps(self.run, self.saved_step)
            if resumable:
                rest = f"continues from the last good checkpoint, of update {resumable[-1]}"
            remedy = "free some disk space"
            if not self.run.path.is_dir():
                remedy = f"move {self.run.path} back"
                rest = "continues from its last checkpoint, if it has one"
            raise Failure(
                f"the checkpoint of update {self._tried_step} could not be written: {self._failure_reason}; "
                f"{remedy} and run the same command again; it {rest}"
            )

    def link_and_prune(self, state: TrainState) -> None:
        """Update the links `last` and `best` and remove old checkpoints, including those that a
        killed process left behind.
        """
        best_link = self.run.checkpoints / "best"
        try:
            if self.run.checkpoint(state.step).exists():
                link_checkpoint(self.run, "last", state.step)
            if self.run.checkpoint(state.best_step).exists():
                link_checkpoint(self.run, "best", state.best_step)
            best_step = 0
            if best_link.is_symlink():
                # A stranger's link may have any name in it.
                best_step = checkpoint.parse_step(best_link.readlink().name) or 0
            prune_checkpoints(self.run, self.config.training, best_step, state.step)
        except (OSError, UserError) as error:
            say(
                f"warning: {self.run.checkpoints}: could not update the links or remove old checkpoints "
                f"({_describe(error)})"
            )

    def close(self) -> None:
        """Let the mirror finish, because the run's lock is released next."""
        self.mirror.close()

    def _write(self, snapshot: Snapshot, state: TrainState) -> None:
        n_free = shutil.disk_usage(self.run.checkpoints).free
        n_needed = snapshot.size + SPARE_BYTES
        if n_free < n_needed:
            raise Failure(
                f"{self.run.checkpoints}: {n_needed:,} bytes are needed, but only {n_free:,} are free"
            )
        path = self.run.checkpoint(state.step)
        checkpoint.save_checkpoint(path, snapshot, state, self.config, self.vocab)
        self.link_and_prune(state)

    def _count_failure(self, error: Exception) -> None:
        self.failures += 1
        self._failure_reason = _describe(error)
        say(
            f"warning: the checkpoint of update {self._tried_step} could not be written: "
            f"{self._failure_reason}; training will try again (failure {self.failures} in a row; after "
            f"{MAX_FAILURES} the run ends)"
        )


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
