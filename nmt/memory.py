"""Freed memory is kept for the next update instead of going back to the kernel.

glibc returns each large block when it is freed and faults it in again, page by page, at the next allocation: a few per
cent of a training step on CPU. The command asks for this itself, so that nobody has to export anything.
"""

import ctypes
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # of <malloc.h>


def keep_freed_memory() -> None:
    """Tell the C allocator, where it is glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(TOP_PAD, 64 << 20)
