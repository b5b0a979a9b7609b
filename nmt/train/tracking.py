"""Starts what hands the figures of a run to TensorBoard, W&B or a sink of the user's.

Each sink of `training.track` gets a process that follows metrics.jsonl (follower.py). Training
starts it, looks at it now and then, and at the end waits ten seconds for it at most: what it has
not read by then, it reads on its own. So nothing a sink does can stop, slow or change a run; if it
fails, there is one warning.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nmt.system.progress import clock, say
from nmt.train.follower import FINAL_S

FINISH_S = 10.0  # for all sinks together
MAX_REASON = 1 << 16
# The modules of this process, wherever it found them, and not those of the current folder.
PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from nmt.train.follower import follow_training
follow_training(sys.argv[2], sys.argv[3], int(sys.argv[4]))
"""


class Trackers:
    """The processes that follow a run. Only the main rank has them."""

    def __init__(self, run: Path, names: Sequence[str]) -> None:
        self.run = run
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in names:
            try:
                self.processes[name] = _start_follower(run, name)
            except OSError as error:
                self._warn(name, f"cannot be started ({error.strerror})")

    def check(self) -> None:
        """Warn of processes that have ended, because it is too early."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[name]
                self._warn(name, _read_reason(process))

    def let_go(self) -> None:
        """Tell the processes that no more lines will come."""
        for process in self.processes.values():
            assert process.stdin is not None
            # A word, because a child of training may have a copy of the pipe and keep it open.
            with contextlib.suppress(OSError):
                process.stdin.write(b"end")
                process.stdin.close()

    def finish(self) -> None:
        """Wait until the last lines are read, but not for long."""
        self.check()
        self.let_go()
        deadline = clock() + FINISH_S
        for name, process in self.processes.items():
            try:
                process.wait(max(0.0, deadline - clock()))
            except subprocess.TimeoutExpired:
                say(
                    f"warning: training.track: {name}: is not done yet; it goes on by itself for at "
                    f"most {FINAL_S // 60} minutes"
                )
                continue
            if process.returncode:
                self._warn(name, _read_reason(process))

    def _warn(self, name: str, reason: str) -> None:
        say(
            f"warning: training.track: {name}: {reason}; the run is not affected, and "
            f"nmt-track {self.run} --to {name} sends all its figures"
        )


@contextlib.contextmanager
def track_run(run: Path, names: Sequence[str]) -> Iterator[Trackers]:
    """Have these sinks follow a run. After an error they finish by themselves."""
    trackers = Trackers(run, names)
    try:
        yield trackers
    except BaseException:
        trackers.let_go()
        raise
    trackers.finish()


def _start_follower(run: Path, name: str) -> "subprocess.Popen[bytes]":
    words = [json.dumps(sys.path), str(run), name, str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        # So Ctrl-C does not reach it. In a session of its own it would get a larger share of the
        # processor: Linux shares that among sessions first (sched_autogroup_enabled).
        process_group=0,
    )


def _read_reason(process: "subprocess.Popen[bytes]") -> str:
    """Say why a follower ended, in its own words if it left any."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    with contextlib.suppress(OSError):
        lines = (process.stderr.read(MAX_REASON) or b"").decode(errors="replace").splitlines()
        if lines:
            return "hung" if lines[0].startswith("Timeout") else lines[-1]
    if process.returncode < 0:
        return f"was ended by {signal.Signals(-process.returncode).name}"
    return f"ended with exit code {process.returncode}"
