"""How a run ends: signals, exit codes, and `status.json` for those who see no exit code.

A signal is only recorded: all ranks finish the current update, save, and stop together. A second
signal ends the process at once, unless it comes so soon that it must be the first one, forwarded.
torchrun turns every exit code into 1, so scripts that restart a run read `status.json`. A run that
was killed leaves "running" there, and its lock is free.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from nmt.system.errors import ForeseenError, UserError
from nmt.system.files import read_status, write_json_or_warn
from nmt.system.progress import clock, say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder

FAILED, MISTAKE, PREEMPTED, INTERRUPTED = 1, 2, 75, 130
State = Literal["running", "done", "preempted", "failed"]
# Several may hand on the same request. Slurm sends SIGTERM to every process of a job, of which
# torchrun, nmt-launch and nmt-slurm pass it on; on a busy machine that takes them seconds. A person
# who presses Ctrl-C again means it.
SAME_REQUEST_S, SAME_INTERRUPT_S = 5.0, 0.5


class StopRequest:
    """Records that this process was asked to stop, and what all ranks agreed on.

    A thread listens, because the main one may be waiting for other ranks inside torch.
    """

    def __init__(self) -> None:
        self.signal = 0  # the first stop signal that this process received; 0: none
        self.exit_code = 0  # of the run, once all ranks know that one was asked to stop

    @property
    def votes(self) -> tuple[float, float]:
        """Whether this process was interrupted (Ctrl-C) or preempted (any other signal)."""
        is_interrupt = self.signal == signal.SIGINT
        return is_interrupt, self.signal != 0 and not is_interrupt

    def agree(self, n_interrupted: float, n_preempted: float) -> None:
        """Set the exit code if any rank was asked to stop; all ranks pass the same sums."""
        if n_interrupted:
            self.exit_code = INTERRUPTED
        elif n_preempted:
            self.exit_code = PREEMPTED

    def run_in_step(self, work: Iterable[object], world: World) -> bool:
        """Go through `work` in step with the other ranks; return False if one was asked to stop
        meanwhile.
        """
        sums = world.run_in_step(work, lambda: self.votes)
        self.agree(*sums)
        return not self.exit_code

    @property
    def reason(self) -> str:
        return signal.Signals(self.signal).name if self.signal else "a signal to another rank"

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        # Python writes the number of each signal into this pipe, whatever the main thread is doing.
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        thread = threading.Thread(target=self._listen, args=(read_end, numbers), daemon=True)
        old_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        thread.start()
        old_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_wakeup)
            os.close(write_end)
            thread.join()
            os.close(read_end)

    def _listen(self, read_end: int, numbers: list[signal.Signals]) -> None:
        received_at = 0.0
        while data := os.read(read_end, 1):
            number = data[0]
            if number not in numbers:
                continue
            if not self.signal:
                self.signal, received_at = number, clock()
                say("asked to stop: saving after this update; a second signal stops at once")
                continue
            same_s = SAME_INTERRUPT_S if number == signal.SIGINT else SAME_REQUEST_S
            if clock() - received_at > same_s:
                os._exit(128 + number)


@dataclass
class StatusFile:
    """Writes `status.json`; failing to write it never stops a run."""

    run: RunFolder
    steps: int
    machine: str = ""
    step: int = 0  # the update of the last good checkpoint

    @property
    def has_failed(self) -> bool:
        """Whether another rank has already written that the run failed."""
        return read_status(self.run).get("state") == "failed"

    def write(self, state: State, code: int | None = None, message: str = "") -> None:
        status = {
            "state": state,
            "step": self.step,
            "steps": self.steps,
            "exit_code": code,
            "message": message,
            "host": socket.gethostname(),
            "machine": self.machine,
            "pid": os.getpid(),
            "updated": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        write_json_or_warn(self.run.status, status)

    @contextlib.contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Record an error that passes through as the run's failure."""
        try:
            yield
        except SystemExit:  # the main rank has written why
            raise
        except BaseException as error:
            message = str(error)
            if not isinstance(error, ForeseenError):
                message = f"{type(error).__name__}: {error}"
            code = MISTAKE if isinstance(error, UserError) else FAILED
            self.write("failed", code, message.partition("\n")[0])
            raise
