"""Real starts of nmt-train and other commands by the hundred, each rank a fork of the warm server.

A start costs three seconds because torch is imported. Here each is a fork of a process that has imported
everything and trains nothing (warm_process.py): a process and a group of its own that calls the real
command, with the environment that torchrun would give a rank. test_kills.py shows that it ends in the
bits of a start from the shell. What torchrun itself does is held by test_launch.py, test_rank_failures.py
and test_signals.py.
"""

import atexit
import contextlib
import importlib
import os
import runpy
import shutil
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.faults import Faults
from support.waiting import HANG_S, list_living, until
from support.warm_process import start_fork

RANK = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()


def be_rank(
    command: str, argv: Sequence[str], folder: Path, variables: Mapping[str, str], faults: Faults
) -> None:
    """Be a start from the shell: of a module of nmt/commands, or of a program with its path."""
    os.setsid()
    for number, name in enumerate(("/dev/null", "stdout", "stderr")):
        os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    for name in RANK:
        os.environ.pop(name, None)
    os.environ.update(variables)
    faults.arm(folder)
    if command.endswith(".py"):
        sys.argv = [command, *argv]
        runpy.run_path(command, run_name="__main__")
        return
    sys.exit(importlib.import_module(f"nmt.commands.{command}").main(argv))


class Start:
    """One start of a command on so many ranks. The exit code of one that was killed is -9."""

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        size: int = 1,
        faults: Faults | None = None,
        command: str = "train",
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        port = find_free_port()
        self.folders = [folder / f"rank-{rank}" for rank in range(size)]
        self.processes = []
        for rank, own in enumerate(self.folders):
            own.mkdir(parents=True)
            values = (rank, rank, 0, size, size, "127.0.0.1", port)
            variables = dict(zip(RANK, map(str, values), strict=True)) if size > 1 else {}
            self.processes.append(
                start_fork(be_rank, command, list(argv), own, variables, faults or Faults())
            )
        atexit.register(self.signal, signal.SIGKILL)

    @property
    def codes(self) -> list[int | None]:
        """Of each rank; None while it lives."""
        return [process.exitcode for process in self.processes]

    def wait(self, is_agent: bool = True) -> list[int]:
        """The exit codes. `is_agent`: as torchrun does it, the failure of one rank is the end of
        all.
        """
        deadline, mercy = time.monotonic() + HANG_S, 0.0
        while None in (codes := self.codes):
            assert time.monotonic() < deadline, f"still there:\n{self.told()}"
            if is_agent and any(codes) and not mercy:
                mercy = time.monotonic() + 3.0
                self.signal(signal.SIGTERM)
            elif mercy and time.monotonic() > mercy:
                self.signal(signal.SIGKILL)
            time.sleep(0.005)
        return [code for code in codes if code is not None]

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        if number == signal.SIGKILL:
            # Stopped first, no rank can leave by itself because it lost one that was killed before it.
            self.signal(signal.SIGSTOP, ranks)
        for rank, process in enumerate(self.processes):
            if process.is_alive() and process.pid and (ranks is None or rank in ranks):
                with contextlib.suppress(ProcessLookupError):  # it has just gone
                    os.kill(process.pid, number)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something to come about while the start lives."""
        until(lambda: holds() or {*self.codes} != {None})
        assert holds(), f"{self.codes}\n{self.told()}"

    def is_in(self, what: str) -> bool:
        """Whether rank 0 has come to what was slowed down: save, decode, update."""
        return (self.folders[0] / f"slow-{what}").exists()

    def told(self, name: str = "stderr", ranks: Sequence[int] | None = None) -> str:
        """What ranks wrote, one after the other."""
        files = [
            folder / name
            for rank, folder in enumerate(self.folders)
            if ranks is None or rank in ranks
        ]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def orphans(self) -> list[int]:
        """Processes of the groups that these ranks led."""
        groups = [process.pid for process in self.processes]
        return [pid for pid, group in list_living() if group in groups]


def run_on_ranks(n: int, program: str, script: Path, *arguments: str) -> Start:
    """Write the program to `script` and run it to its end; the failure of one rank is that of all."""
    script.write_text(textwrap.dedent(program))
    start = Start(script.with_suffix(".ranks"), arguments, n, command=str(script))
    start.wait()
    return start


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
