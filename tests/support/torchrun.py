"""Starts by a real torchrun, which cost three times the seconds that torch takes to load."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from support.forks import RANK
from support.waiting import until

# Else ranks started again look for dead ones, for hours
SEPARATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

RUN = """-m torch.distributed.run --standalone --shutdown-timeout=60
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"""


class Torchrun:
    """One start of nmt-train, or another program. All its processes bear a mark in their environment."""

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        size: int = 2,
        options: Sequence[str] = (),
        program: Sequence[str] = ("-m", "nmt.commands.train"),
    ) -> None:
        name, value = "NMT_SOAK_MARK", f"{random.SystemRandom().getrandbits(64):x}"
        self.mark = f"{name}={value}"
        folder.mkdir(parents=True, exist_ok=True)
        self.errors = folder / "torchrun.stderr"
        environment = {key: text for key, text in os.environ.items() if key not in RANK}
        command = [*RUN.split(), f"--nproc-per-node={size}", *options, *program, *argv]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stderr=errors,
                cwd=folder,
                env=environment | SEPARATE | {name: value},
                start_new_session=True,
            )

    def living(self) -> dict[int, list[str]]:
        """The pids of the agent, its ranks and whatever they started, and their environments. Zombies have none."""
        living = {}
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours
                variables = file.read_text(errors="replace").split("\0")
                if self.mark in variables:
                    living[int(file.parent.name)] = variables
        return living

    def rank(self, number: int) -> int:
        """The pid of a rank, 0 where it is not there."""
        ranks = [pid for pid, variables in self.living().items() if f"RANK={number}" in variables]
        return next(iter(ranks), 0)

    def until(self, holds: Callable[[], bool]) -> None:
        until(lambda: holds() or self.process.poll() is not None)
        assert holds(), self.told()

    def until_gone(self) -> None:
        until(lambda: not self.living())

    def told(self) -> str:
        return self.errors.read_text(errors="replace")

    def end(self) -> None:
        """After a test, however it went."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
