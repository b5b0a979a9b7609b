"""Trains several runs at once, each in its own process, so that a crash of one leaves the others alone.

Stop signals are forwarded: each training saves, and the same command continues. If this process dies,
the others end too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from nmt.config_files import format_config
from nmt.extras.sweep.grid import PlannedRun, Sweep
from nmt.system.files import make_folder, open_plain_file, read_bytes, write_text
from nmt.system.progress import Progress, say
from nmt.system.runtime import count_cores, end_with_parent

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PREEMPTED_CODE = 75
CHECK_S = 0.2
LONGEST_REASON = 300  # characters


class RunQueue:
    """The waiting runs, the runs in progress, and the reasons why others failed."""

    def __init__(self, sweep: Sweep, runs: Sequence[PlannedRun], n_jobs: int) -> None:
        self.sweep, self.n_jobs = sweep, n_jobs
        self.waiting = list(runs)
        self.running: list[tuple[PlannedRun, subprocess.Popen[bytes]]] = []
        self.failures: dict[str, str] = {}  # by label
        self.stop_signal = 0  # the first that came
        self.progress = Progress("sweep", len(runs), "runs")

    def finish_runs(self, on_end: Callable[[PlannedRun], None]) -> int:
        """Finish all runs; `on_end` is called after each. Return the signal that stopped them, or 0."""
        with self.forwarding_signals(), self.progress:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.n_jobs and not self.stop_signal:
                    self.start(self.waiting.pop(0))
                time.sleep(CHECK_S)
                ended = [job for job in self.running if job[1].poll() is not None]
                if self.stop_signal:  # then a run may have ended because it was stopped
                    say(
                        "stopping: each training saves after its update; Ctrl-C again stops at once"
                    )
                    break
                for run, process in ended:
                    self.running.remove((run, process))
                    if process.returncode:
                        log = self.sweep.log_path(run)
                        self.failures[run.label] = find_reason(log, process.returncode)
                    self.progress.advance()
                    on_end(run)
        return self.stop_signal

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Forward stop signals to the runs, and in the end, whatever ended it, wait for them."""
        handlers = {number: signal.signal(number, self.forward) for number in STOP_SIGNALS}
        try:
            yield
        except BaseException:
            self.terminate()
            raise
        finally:
            for _, process in self.running:
                process.wait()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def forward(self, number: int, _: FrameType | None) -> None:
        self.stop_signal = self.stop_signal or number
        self.terminate()

    def terminate(self) -> None:
        for _, process in self.running:
            process.terminate()

    def start(self, run: PlannedRun) -> None:
        # what the process reads, because the grid may be edited meanwhile
        config = self.sweep.config_path(run)
        write_text(make_folder(config.parent) / config.name, format_config(run.config))
        log = self.sweep.log_path(run)
        make_folder(log.parent)
        threads = str(max(1, count_cores() // self.n_jobs))
        parent = os.getpid()

        def end_with_this() -> None:
            end_with_parent()
            if os.getppid() != parent:  # it has died already
                os._exit(PREEMPTED_CODE)

        with open_plain_file(log, "a+b") as output:
            process = subprocess.Popen(
                make_command(self.sweep, run),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"OMP_NUM_THREADS": threads} | os.environ,
                preexec_fn=end_with_this,
                process_group=0,  # Ctrl-C reaches this process alone, which forwards it
            )
        self.running.append((run, process))
        if self.stop_signal:  # it came while the process was started
            process.terminate()


def make_command(sweep: Sweep, run: PlannedRun) -> list[str]:
    """Return the command that finishes this run in a process of its own."""
    task = {
        "folder": str(sweep.folder),
        "config": str(sweep.config_path(run)),
        "average": sweep.average,
        "score": sweep.score,
    }
    return [sys.executable, "-m", "nmt.extras.sweep.run_one", json.dumps(task)]


def find_reason(log: Path, code: int) -> str:
    """Return the last line that a failed run printed."""
    lines = read_bytes(log).decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    reason = last[:LONGEST_REASON] if code > 0 else f"killed by {signal.Signals(-code).name}"
    return f"{reason} (exit code {code}; {log.parent.name}/{log.name})"
