"""Waiting for what other processes do."""

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


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for, a zombie, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
