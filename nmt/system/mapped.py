"""Copies out of memory-mapped files, which somebody may cut or rewrite meanwhile.

Python that touches a mapped page which the file no longer has is killed by SIGBUS, and no handler
written in Python can run safely there. So the kernel copies, out of this very process
(process_vm_readv), and reports such a page as an error. It takes thousands of runs in a few calls,
so that a batch costs no more than by indexing. Where there is no such call, pages are touched.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable

import numpy as np

MAX_RUNS = 1024  # of one call: IOV_MAX
MAX_CALL_BYTES = 1 << 30
NO_SUCH_CALL = (errno.ENOSYS, errno.EPERM)  # of old kernels, and of strict sandboxes


class MappedPageLost(Exception):
    """The file behind a mapped array has been cut, or its disk fails."""


def copy_runs(array: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Copy the runs of an array that begin at `starts`, end to end; IndexError if it has no such
    runs.
    """
    n = len(array)
    for values in (starts, lengths):  # first each, because their sum may overflow
        if len(values) and not 0 <= values.min() <= values.max() <= n:
            raise IndexError("runs outside the array")
    if len(starts) and (starts + lengths).max() > n:
        raise IndexError("runs outside the array")
    if isinstance(array, np.memmap) and _read_process is not None:
        copied = _copy_mapped_runs(array, starts, lengths)
        if copied is not None:
            return copied
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)
    return np.asarray(array)[places]


def copy_slice(array: np.ndarray, first: int, end: int) -> np.ndarray:
    """Copy array[first:end]; IndexError if it does not have all of it."""
    block = MAX_CALL_BYTES // array.itemsize
    starts = np.arange(first, end, block, dtype=np.int64)
    return copy_runs(array, starts, np.minimum(block, end - starts))


def _copy_mapped_runs(
    array: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> np.ndarray | None:
    """Return None if this system does not have the call."""
    assert _read_process is not None
    copied = np.empty(int(lengths.sum()), array.dtype)
    # As C has them: rows of an address and a number of bytes.
    sources = np.empty((len(starts), 2), np.uint64)
    sources[:, 0] = array.ctypes.data + starts * array.itemsize
    sources[:, 1] = lengths * array.itemsize
    longest = int(sources[:, 1].max(initial=1))
    n_at_a_time = max(1, min(MAX_RUNS, MAX_CALL_BYTES // max(1, longest)))
    address = copied.ctypes.data
    for first in range(0, len(sources), n_at_a_time):
        some = sources[first : first + n_at_a_time]
        n_bytes = int(some[:, 1].sum())
        target = np.array([[address, n_bytes]], np.uint64)
        n_copied = _read_process(os.getpid(), target.ctypes.data, 1, some.ctypes.data, len(some), 0)
        if n_copied < 0 and ctypes.get_errno() in NO_SUCH_CALL:
            return None
        if n_copied != n_bytes:
            raise MappedPageLost
        address += n_bytes
    return copied


def _find_read_process() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return None
    call.restype = ctypes.c_ssize_t
    number = ctypes.c_ulong
    call.argtypes = (ctypes.c_int, number, number, number, number, number)
    found: Callable[..., int] = call
    return found


_read_process = _find_read_process()
