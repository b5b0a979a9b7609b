"""What the main rank reports of a run: events to metrics.jsonl and to a listener, and lines for a
person on stderr.

The loop decides what happens; nothing here changes the training.

A resumed run continues metrics.jsonl after the last line that its checkpoint counts. A line that
cannot be written, because the disk is full, waits in memory for the next one. So no line is lost,
doubled or cut in two as long as the process lives, and when it dies the checkpoint says how much of
the file counts.
"""

import json
import os
from pathlib import Path

from nmt.checkpoint.checkpoint import TrainState
from nmt.system.files import has_plain_file, open_plain_file
from nmt.system.progress import say
from nmt.system.run_folder import RunFolder
from nmt.train.events import LONGEST_LINE, Event, Listener, ValidEvent, read_events
from nmt.train.on_track import LearningCheck
from nmt.train.setup import Setup
from nmt.train.update import Throughput, make_train_event
from nmt.train.validate import Validation


class RunLog:
    """The log of a run. Only the main rank has one."""

    def __init__(self, setup: Setup, run: RunFolder, listener: Listener) -> None:
        config, self.listener = setup.config, listener
        self.device = setup.world.device
        self.metrics = MetricsLog(run.metrics, setup.state.metrics_bytes)
        earlier, _ = read_events(run.metrics)
        listener.start(run.path, earlier)
        self.learning = LearningCheck(config.optimizer, config.model.norm, setup.store.tgt, earlier)

    def write(self, event: Event) -> None:
        self.metrics.write(event)
        self.listener.send(event)

    def write_window(
        self, state: TrainState, throughput: Throughput, lr: float, grad_norm: float
    ) -> None:
        """Report the updates since the last log line, at least one of which was applied."""
        self.write(make_train_event(state, throughput, lr, grad_norm, self.device))
        warning = self.learning.check(state.step, state.window.mean_nll)
        if warning is None:
            return
        say(f"warning: {warning.message}")
        if self.learning.is_new(warning):
            self.write(warning)

    def write_validation(self, state: TrainState, result: Validation, is_best: bool) -> None:
        score = result.bleu
        for sample in result.samples:
            self.write(sample)
        self.write(
            ValidEvent(
                step=state.step,
                nll=round(result.nll, 5),
                ppl=round(result.perplexity, 3),
                bleu=score.value if score else None,
                signature=score.signature if score else None,
                chrf=result.chrf,
                elapsed_s=round(state.elapsed_s, 1),
            )
        )
        # aligned, so that the validations of a run read as a table
        bleu = f"  BLEU {score.value:5.2f}" if score else ""
        mark = "  (best)" if is_best else ""
        say(
            f"update {state.step:>6}: dev NLL {result.nll:7.4f}  perplexity {result.perplexity:8.2f}"
            f"{bleu}{mark}"
        )


# ---- the file ------------------------------------------------------------------------------------


class MetricsLog:
    """`metrics.jsonl`, which continues after its first `n_bytes`. Only the main rank has one."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self.path, self.n_bytes = path, n_bytes
        self.waiting = b""  # lines that could not be written yet
        n_found = path.stat().st_size if has_plain_file(path) else 0
        if n_found < n_bytes:
            say(
                f"warning: {path}: {n_found} of {n_bytes} bytes are left; "
                "lines before this update are missing"
            )
            self.n_bytes = _find_last_line_end(path, n_found)
        if n_found:
            with open_plain_file(path, "r+b") as file:
                file.truncate(self.n_bytes)

    def write(self, event: Event) -> None:
        was_fine = not self.waiting
        self.waiting += (json.dumps(event.to_line()) + "\n").encode()
        try:
            self._flush()
        except OSError as error:
            if was_fine:
                say(
                    f"warning: {self.path}: cannot be written ({error.strerror}); "
                    "its lines are kept in memory"
                )

    def sync(self) -> int:
        self._flush(is_synced=True)
        return self.n_bytes

    def _flush(self, is_synced: bool = False) -> None:
        with open_plain_file(self.path, "r+b" if has_plain_file(self.path) else "wb") as file:
            file.seek(self.n_bytes)  # over what a failed attempt may have left
            file.write(self.waiting)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        self.n_bytes += len(self.waiting)
        self.waiting = b""


def _find_last_line_end(path: Path, n_bytes: int) -> int:
    """Return the length of a file without a last line that was cut in two."""
    if not n_bytes:  # there may be no file at all
        return 0
    with open_plain_file(path) as file:
        start = max(0, n_bytes - LONGEST_LINE)
        file.seek(start)
        return start + file.read(LONGEST_LINE).rfind(b"\n") + 1
