"""Runs a program of a test on two ranks of this machine.

The ranks are forks of a process that has imported torch (soaking.py), with the environment that
torchrun would give them: by torchrun itself this would cost three times the seconds that torch takes
to load. What torchrun does is held by test_launch.py, test_rank_failures.py and test_signals.py.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from support.soaking import Order, Start


@dataclass(frozen=True)
class TwoRanks:
    """How both ended, and what they wrote, one after the other."""

    codes: list[int]
    stdout: str
    stderr: str


def run_on_two_ranks(program: str, script: Path, *arguments: str) -> TwoRanks:
    """Write the program to `script` and run it; the failure of one rank is the end of both."""
    script.write_text(textwrap.dedent(program))
    start = Start(script.with_suffix(".ranks"), arguments, 2, Order([], "", program=str(script)))
    codes = start.wait()
    stdout = "".join((folder / "stdout").read_text() for folder in start.folders)
    return TwoRanks(codes, stdout, start.told())
