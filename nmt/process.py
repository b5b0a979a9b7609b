"""What the process asks of the C library before torch is imported, so that nobody has to export anything.

glibc returns each large block when it is freed and faults it in again, page by page, at the next allocation: a few per
cent of a training step on CPU. And OpenMP's threads wait for each other by spinning, which on a machine that anything
else uses can make a step several times slower; sleeping costs some 9 % where nothing else runs (docs/benchmarks.md).
"""

import ctypes
import os
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # of <malloc.h>


def settle() -> None:
    """Sleep instead of spin, unless the user's environment says otherwise; keep freed memory, where glibc allocates."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(TOP_PAD, 64 << 20)
