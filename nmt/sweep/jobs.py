"""Trains several runs at once, each in its own process, so that a crash of one leaves the others alone.

Stop signals are forwarded: each training saves, and the same command continues. If this process dies,
the others end too.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nmt.sweep.grid import PlannedRun, Sweep
from nmt.sweep.processes import Children
from nmt.sweep.run_one import make_command, write_run_config
from nmt.system.files import make_folder, open_plain_file, read_bytes
from nmt.system.progress import Progress, clock, say
from nmt.system.runtime import count_cores
from nmt.train.events import read_events

CHECK_S = 0.2
LOOK_S = 60.0  # between two looks at how far all runs are
LONGEST_REASON = 300  # characters


class RunQueue:
    """The waiting runs, the runs in progress, and the reasons why others failed."""

    def __init__(self, sweep: Sweep, runs: Sequence[PlannedRun], n_jobs: int) -> None:
        self.sweep, self.n_jobs = sweep, n_jobs
        self.waiting = list(runs)
        self.running: list[tuple[PlannedRun, subprocess.Popen[bytes]]] = []
        self.failures: dict[str, str] = {}  # by label
        self.children = Children()
        self.steps = {run.label: read_step(run) for run in runs}
        n_updates = sum(run.config.training.steps for run in runs)
        self.progress = Progress("sweep", n_updates, "updates", sum(self.steps.values()))
        self.looked_at = clock()

    def finish_runs(self, on_end: Callable[[PlannedRun], None]) -> int:
        """Finish all runs; `on_end` is called after each. Return the signal that stopped them, or 0."""
        with self.children, self.progress:
            while self.waiting or self.running:
                self.start_waiting()
                time.sleep(CHECK_S)
                ended = [one for one in self.running if one[1].poll() is not None]
                if self.children.stop_signal:  # then a run may have ended because it was stopped
                    break
                for run, process in ended:
                    self.running.remove((run, process))
                    self.record_end(run, process.returncode)
                    on_end(run)
                self.update_progress()
            if self.children.stop_signal:
                say("stopping: each training saves after its update; Ctrl-C again stops at once")
        return self.children.stop_signal

    def start_waiting(self) -> None:
        while self.waiting and len(self.running) < self.n_jobs and not self.children.stop_signal:
            self.start(self.waiting.pop(0))

    def start(self, run: PlannedRun) -> None:
        log = self.sweep.log_path(run)
        make_folder(log.parent)
        write_run_config(self.sweep, run)
        threads = str(max(1, count_cores() // self.n_jobs))
        environment = {"OMP_NUM_THREADS": threads} | os.environ
        with open_plain_file(log, "a+b") as output:
            process = self.children.start(make_command(self.sweep, run), output, environment)
        self.running.append((run, process))

    def record_end(self, run: PlannedRun, code: int) -> None:
        if code:
            self.failures[run.label] = find_reason(self.sweep.log_path(run), code)
        else:
            self.steps[run.label] = run.config.training.steps

    def update_progress(self) -> None:
        """Once a minute, read how far the runs in progress are."""
        if clock() - self.looked_at >= LOOK_S:
            self.looked_at = clock()
            self.steps |= {run.label: read_step(run) for run, _ in self.running}
            self.progress.advance(sum(self.steps.values()) - self.progress.done)


def read_step(run: PlannedRun) -> int:
    """Return the last update that a run has logged."""
    events, _ = read_events(run.folder.metrics)
    return max((event.step for event in events), default=0)


def find_reason(log: Path, code: int) -> str:
    """Return the last line that a failed run printed."""
    lines = read_bytes(log).decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    reason = last[:LONGEST_REASON] if code > 0 else f"killed by {signal.Signals(-code).name}"
    return f"{reason} (exit code {code}; {log.parent.name}/{log.name})"
