"""Trains several runs at once, each in its own process, so that a crash of one leaves the others alone.

Stop signals are forwarded: each training saves, and the same command continues. If this process dies,
the others end too.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from nmt.config import RunConfig
from nmt.model.size import count_model_bytes
from nmt.sweep.grid import PlannedRun, Sweep
from nmt.sweep.processes import Children
from nmt.sweep.single import make_command, write_run_config
from nmt.system.files import make_folder
from nmt.system.memory import find_free_memory, format_memory
from nmt.system.progress import Progress, clock, say
from nmt.system.runtime import count_cores
from nmt.train.metrics_log import read_events

CHECK_S = 0.2
LOOK_S = 60.0  # between two looks at how far all runs are
LONGEST_REASON = 300  # characters
# What training takes, measured on the demo corpus (docs/sweeps.md).
PROCESS_BYTES = 600 << 20
WEIGHT_TRAINING_BYTES, EMA_BYTES = 16, 4  # of a weight with its gradient and Adam's moments
AUTO_MICRO_TOKENS = 4_096
ENCODER_VALUES, DECODER_VALUES = 16, 26  # kept for each token, times d_model
FFN_VALUES = 3  # times d_ff
VALUE_BYTES = 4


class RunQueue:
    """Runs that wait, runs in progress, and why others failed."""

    def __init__(self, sweep: Sweep, runs: Sequence[PlannedRun], n_jobs: int) -> None:
        self.sweep = sweep
        self.n_jobs = n_jobs
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
        with self.children, closing(self.progress):
            while self.waiting or self.running:
                self.start_waiting()
                time.sleep(CHECK_S)
                ended = self.take_ended()
                if self.children.stop_signal:  # `ended` may have obeyed it
                    break
                for run, code in ended:
                    self.record_end(run, code)
                    on_end(run)
                self.update_progress()
            if self.children.stop_signal:
                say("stopping: each training saves after its update; Ctrl-C again stops at once")
        return self.children.stop_signal

    def start_waiting(self) -> None:
        while self.waiting and len(self.running) < self.n_jobs and not self.children.stop_signal:
            run = self.waiting.pop(0)
            self.running.append((run, self.start(run)))

    def start(self, run: PlannedRun) -> "subprocess.Popen[bytes]":
        log = self.sweep.log_path(run)
        make_folder(log.parent)
        write_run_config(self.sweep, run)
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // self.n_jobs)))
        with open(log, "ab") as output:
            return self.children.start(make_command(self.sweep, run), output, environment)

    def take_ended(self) -> list[tuple[PlannedRun, int]]:
        """Take the runs that have ended from those in progress; return them with their exit codes."""
        ended = []
        for run, process in list(self.running):
            code = process.poll()
            if code is not None:
                self.running.remove((run, process))
                ended.append((run, code))
        return ended

    def record_end(self, run: PlannedRun, code: int) -> None:
        if code:
            self.failures[run.label] = find_reason(self.sweep.log_path(run), code)
        else:
            self.steps[run.label] = run.config.training.steps

    def update_progress(self) -> None:
        """Once a minute, read how far the runs in progress are."""
        if clock() - self.looked_at < LOOK_S:
            return
        self.looked_at = clock()
        for run, _ in self.running:
            self.steps[run.label] = read_step(run)
        self.progress.advance(sum(self.steps.values()) - self.progress.done)


def choose_n_jobs(runs: Sequence[PlannedRun]) -> int:
    """Choose how many runs to train at once: one per core, as far as the memory allows; on a GPU one,
    which uses all of it. Finished runs count too, so that the others keep their threads.
    """
    devices = {run.config.device for run in runs}
    if "auto" in devices and has_gpu():
        say("--jobs auto: 1, which has the GPU to itself")
        return 1
    largest = max(estimate_memory(run.config) for run in runs)
    free = find_free_memory()
    n_jobs = max(1, min(len(runs), count_cores(), int(free // largest)))
    say(
        f"--jobs auto: {n_jobs}, for {count_cores()} cores, and {format_memory(free)} of free memory; "
        f"the largest run needs about {format_memory(largest)}"
    )
    return n_jobs


def has_gpu() -> bool:
    from nmt.system.device import choose_device

    return choose_device().type != "cpu"


def estimate_memory(config: RunConfig) -> int:
    """Estimate what training needs on a CPU: the process, weights with moments and gradients, and what
    a micro-batch keeps for its backward pass.
    """
    model, training = config.model, config.training
    weight_bytes = WEIGHT_TRAINING_BYTES + (EMA_BYTES if training.ema is not None else 0)
    n_bytes = PROCESS_BYTES + count_model_bytes(model, config.vocab.sizes, weight_bytes)
    if isinstance(training.micro_tokens, int):
        micro_tokens = training.micro_tokens
    else:
        micro_tokens = min(AUTO_MICRO_TOKENS, max(training.src_tokens, training.tgt_tokens))
    encoder = model.encoder_depth * (ENCODER_VALUES * model.d_model + FFN_VALUES * model.d_ff)
    decoder = model.decoder_depth * (DECODER_VALUES * model.d_model + FFN_VALUES * model.d_ff)
    return n_bytes + VALUE_BYTES * micro_tokens * (encoder + decoder)


def read_step(run: PlannedRun) -> int:
    """Return the last update that a run has logged."""
    events, _ = read_events(run.folder.metrics)
    return max((event.step for event in events), default=0)


def find_reason(log: Path, code: int) -> str:
    """Return the last line that a failed run printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:LONGEST_REASON] if lines else ""
    if code < 0:
        last = f"killed by {signal.Signals(-code).name}"
    return f"{last} (exit code {code}; {log.parent.name}/{log.name})"
