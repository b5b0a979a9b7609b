"""Runs a program of a test on one rank of this machine, or on two.

The ranks are forks of a process that has imported torch (soaking.py), with the environment that
torchrun would give them: by torchrun itself this would cost three times the seconds that torch takes
to load. What torchrun does is held by test_launch.py and test_signals.py.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from support.soaking import Order, Start


@dataclass(frozen=True)
class Ended:
    """How each rank ended, and what they wrote, one after the other."""

    codes: list[int]
    stdout: str
    stderr: str


def run_on_two_ranks(program: str, script: Path, *arguments: str) -> Ended:
    """Write the program to `script` and run it; the failure of one rank is the end of both."""
    return run_on_ranks(2, program, script, *arguments)


def run_on_ranks(n: int, program: str, script: Path, *arguments: str) -> Ended:
    script.write_text(textwrap.dedent(program))
    start = Start(script.with_suffix(".ranks"), arguments, n, Order([], "", program=str(script)))
    codes = start.wait()
    stdout = "".join((folder / "stdout").read_text() for folder in start.folders)
    return Ended(codes, stdout, start.told())
