"""Waiting for what other processes do."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

HANG_S = 300.0  # what takes so long hangs, on a machine however busy


def until(holds: Callable[[], bool], seconds: float = HANG_S) -> None:
    """Wait until `holds()`, and fail if that takes too long."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def list_living() -> list[tuple[int, int]]:
    """(pid, process group) of all that run; what ended and was not waited for, a zombie, does not."""
    living = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, _, group, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                living.append((int(folder.name), int(group)))
    return living


def is_alive(pid: int) -> bool:
    return pid in dict(list_living())
