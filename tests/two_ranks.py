"""Runs a script on two ranks of this machine by the real torchrun."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_on_two_ranks(
    program: str, script: Path, *arguments: str
) -> "subprocess.CompletedProcess[str]":
    """Write the program to `script` and run it; the ranks share standard output and error."""
    script.write_text(textwrap.dedent(program))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    return subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=100,
    )
