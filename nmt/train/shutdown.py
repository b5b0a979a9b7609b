"""How a run ends: signals, exit codes, and `status.json`, which says it to those who see no exit code.

A signal is only remembered; the loop leaves at the next update boundary, together with all ranks, and saves. A second
one ends the process at once. torchrun turns every exit code into 1, so scripts that start a run again read
`status.json`. A run that was killed leaves "running" there and nobody who holds its lock.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Literal

from nmt.system.errors import Failure, UserError
from nmt.system.files import read_json, write_json
from nmt.system.progress import clock, say
from nmt.system.run_folder import RunFolder

FAILED, MISTAKE, PREEMPTED, INTERRUPTED = 1, 2, 75, 130
State = Literal["running", "done", "preempted", "failed"]
SAME_S = 0.5  # torchrun and Slurm may each pass on the same request


class Stop:
    """Remembers that someone asked for an end.

    A thread listens, since the main one may be waiting for other ranks inside of torch.
    """

    def __init__(self) -> None:
        self.signal = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        heard, told = os.pipe()
        os.set_blocking(told, False)
        thread = threading.Thread(target=self._listen, args=(heard, numbers), daemon=True)
        before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        thread.start()
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(told)
            thread.join()
            os.close(heard)

    def _listen(self, heard: int, numbers: list[signal.Signals]) -> None:
        began = 0.0
        while data := os.read(heard, 1):
            number = data[0]
            if number not in numbers:
                continue
            if not self.signal:
                self.signal, began = number, clock()
                say(
                    "asked to stop: saving at the end of this update; asked once more, it ends at once"
                )
            elif clock() - began > SAME_S:
                os._exit(128 + number)

    @property
    def is_interrupt(self) -> bool:
        return self.signal == signal.SIGINT

    @property
    def is_preemption(self) -> bool:
        return self.signal not in (0, signal.SIGINT)


def code_of(error: BaseException) -> int:
    """The exit code that an error leads to."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    return MISTAKE if isinstance(error, UserError) else FAILED


class Status:
    """Writes `status.json`; to fail in that ends no run."""

    def __init__(self, run: RunFolder, steps: int) -> None:
        self.run, self.steps, self.step = run, steps, 0

    @property
    def has_failed(self) -> bool:
        """Whether it says so already, for another rank."""
        try:
            return read_json(self.run.status)["state"] == "failed"
        except (UserError, KeyError, TypeError):
            return False

    def tell(self, state: State, code: int | None = None, message: str = "") -> None:
        try:
            write_json(
                self.run.status,
                {
                    "state": state,
                    "step": self.step,
                    "steps": self.steps,
                    "exit_code": code,
                    "message": message,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "updated": time.strftime("%Y-%m-%d %H:%M:%S"),
                },
            )
        except OSError as error:
            say(f"warning: {self.run.status}: cannot be written ({error.strerror})")

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """What escapes is told."""
        try:
            yield
        except SystemExit:  # the main rank has told why
            raise
        except BaseException as error:
            text = (
                str(error)
                if isinstance(error, UserError | Failure)
                else f"{type(error).__name__}: {error}"
            )
            self.tell("failed", code_of(error), text.partition("\n")[0])
            raise
