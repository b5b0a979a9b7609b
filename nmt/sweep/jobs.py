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

from nmt.config import RunConfig, format_config
from nmt.model.size import count_model_bytes
from nmt.sweep.grid import PlannedRun, Sweep
from nmt.sweep.single import STOP_SIGNALS, end_with, list_words
from nmt.system.files import make_folder, write_text
from nmt.system.memory import find_free_memory, format_memory
from nmt.system.progress import Progress, clock, say
from nmt.system.runtime import count_cores
from nmt.train.metrics_log import read_metrics

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
        steps = {run.label: read_step(run) for run in runs}
        progress = Progress("sweep", n_updates, "updates", sum(steps.values()))
        looked_at = clock()
        is_told = False
        old = {number: signal.signal(number, self.stop) for number in STOP_SIGNALS}
        try:
            while self.running or (waiting and not self.signal):
                while waiting and len(self.running) < self.n_jobs and not self.signal:
                    self.start(waiting.pop(0))
                time.sleep(CHECK_S)
                if self.signal and not is_told:
                    say("asked to stop: each training saves after its update; again: at once")
                    is_told = True
                for label, process in list(self.running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del self.running[label]
                    steps[label] = by_label[label].config.training.steps
                    if code and not self.signal:
                        self.failures[label] = find_reason(self.sweep.log(by_label[label]), code)
                    if not self.signal:
                        tell(by_label[label])
                if clock() - looked_at > LOOK_S:
                    looked_at = clock()
                    steps |= {label: read_step(by_label[label]) for label in self.running}
                    progress.advance(sum(steps.values()) - progress.done)
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
        if self.signal:  # it came while the process was made
            self.running[run.label].terminate()

    def stop(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or number
        for process in self.running.values():
            process.terminate()


def choose_n_jobs(runs: Sequence[PlannedRun]) -> int:
    """Choose how many runs to train side by side: one a core, as many as the memory holds; on a GPU
    one, which uses all of it. It counts finished runs too, so that the others keep their threads.
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
    lines, _ = read_metrics(run.folder.metrics)
    return max((line.step for line in lines), default=0)


def find_reason(log: Path, code: int) -> str:
    """Return the last line that a failed run printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:LONGEST_REASON] if lines else ""
    if code < 0:
        last = f"killed by {signal.Signals(-code).name}"
    return f"{last} (exit code {code}; {log.parent.name}/{log.name})"
