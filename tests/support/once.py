"""Makes a costly folder once for all workers of a test session.

A fixture of a module is made anew in each process that runs a test of the module. What takes many
seconds and is only read is made by the first process that asks; the others wait for it.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pytest import TempPathFactory


def make_once(factory: TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Let `make` fill an empty folder, unless another worker has done so; return the folder."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder, mark = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not mark.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            mark.touch()
    return folder
