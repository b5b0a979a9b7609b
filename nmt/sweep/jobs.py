"""Runs side by side, each in a process of its own, so that the end of one is not that of the others.

A signal is handed on: each training saves, and the same command continues. Processes end with this
one, however it dies.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from nmt.config import format_config
from nmt.sweep.grid import PlannedRun, Sweep
from nmt.sweep.single import STOP_SIGNALS, end_with, list_words
from nmt.system.files import make_folder, write_text
from nmt.system.progress import Progress, clock, say
from nmt.system.runtime import count_cores
from nmt.train.metrics_log import read_metrics

CHECK_S = 0.2
LOOK_S = 30.0  # between two looks at how far all runs are
LONGEST_REASON = 300  # characters


@dataclass
class SideBySide:
    """The runs that are under way, and what became of the others."""

    sweep: Sweep
    n_jobs: int
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # by label
    signal: int = 0  # the first that asked to stop

    def run(self, runs: Sequence[PlannedRun], tell: Callable[[PlannedRun], None]) -> None:
        """Finish `runs`; `tell` is called after each of them."""
        waiting = list(runs)
        by_label = {run.label: run for run in runs}
        n_updates = sum(run.config.training.steps for run in runs)
        progress = Progress("sweep", n_updates, "updates", sum(map(read_step, runs)))
        looked_at = clock()
        old = {number: signal.signal(number, self.stop) for number in STOP_SIGNALS}
        try:
            while self.running or (waiting and not self.signal):
                while waiting and len(self.running) < self.n_jobs and not self.signal:
                    self.start(waiting.pop(0))
                time.sleep(CHECK_S)
                for label, process in list(self.running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del self.running[label]
                    if code and not self.signal:
                        self.failures[label] = find_reason(self.sweep.log(by_label[label]), code)
                    if not self.signal:
                        tell(by_label[label])
                if clock() - looked_at > LOOK_S:
                    looked_at = clock()
                    progress.advance(sum(map(read_step, runs)) - progress.done)
        finally:
            progress.close()
            for number, handler in old.items():
                signal.signal(number, handler)

    def start(self, run: PlannedRun) -> None:
        make_folder(self.sweep.config(run).parent)
        make_folder(self.sweep.log(run).parent)
        write_text(self.sweep.config(run), format_config(run.config))
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // self.n_jobs)))
        with open(self.sweep.log(run), "ab") as log:
            self.running[run.label] = subprocess.Popen(
                list_words(self.sweep, run),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=end_with(os.getpid()),
                process_group=0,  # Ctrl-C reaches this process alone, which hands it on
            )

    def stop(self, number: int, _: FrameType | None) -> None:
        if not self.signal:
            say(
                "asked to stop: each training saves after its update; a second signal stops at once"
            )
        self.signal = self.signal or number
        for process in self.running.values():
            process.terminate()


def read_step(run: PlannedRun) -> int:
    """Return the last update that a run has logged."""
    lines, _ = read_metrics(run.folder.metrics)
    return max((line.step for line in lines), default=0)


def find_reason(log: Path, code: int) -> str:
    """Return the last line that a failed run printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:LONGEST_REASON] if lines else ""
    if code < 0:
        last = f"killed by {signal.Signals(-code).name}"
    return f"{last} (exit code {code}; {log})"
