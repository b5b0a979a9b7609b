"""Child processes that stop and end with this one.

Stop signals are forwarded to them, so that a training saves. On Linux they also end when this process
is killed.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from nmt.system.runtime import end_with_parent

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PREEMPTED_CODE = 75


class Children:
    """Starts processes, forwards stop signals to them, and waits for them in the end."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.stop_signal = 0  # the first that came

    def __enter__(self) -> "Children":
        self.handlers = {number: signal.signal(number, self.forward) for number in STOP_SIGNALS}
        return self

    def start(
        self,
        command: Sequence[str],
        output: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[bytes]":
        parent = os.getpid()

        def end_with_this() -> None:
            end_with_parent()
            if os.getppid() != parent:  # it has died already
                os._exit(PREEMPTED_CODE)

        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            preexec_fn=end_with_this,
            process_group=0,  # Ctrl-C reaches this process alone, which forwards it
        )
        self.processes.append(process)
        if self.stop_signal:  # it came while the process was started
            process.terminate()
        return process

    def forward(self, number: int, _: FrameType | None) -> None:
        self.stop_signal = self.stop_signal or number
        self.terminate()

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.terminate()
        for process in self.processes:
            process.wait()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
