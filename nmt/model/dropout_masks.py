"""The random masks of dropout on a CPU: which elements are kept, a function of a seed and the place.

Each place is scrambled with both halves of the seed: the multiplications and shifts of a hash spread
every bit of the input over all bits of the output, and a processor does sixteen places at once. numba
compiles the loop, six times as fast as numpy's quickest generator. Where numba cannot be used, numpy
computes the same masks, seven times as slowly as that.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nmt.system.progress import say

BITS = 32  # a place is dropped if its hash, of so many bits, is below the threshold
WEYL = np.uint32(0x9E3779B9)  # odd, so that no two places of a block start alike
# of Wellons' hash with the least bias known for two rounds
FIRST_FACTOR, SECOND_FACTOR = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
SHORT, LONG = np.uint32(15), np.uint32(16)

MaskArray = np.ndarray[Any, np.dtype[Any]]
Fill = Callable[[MaskArray, Any, np.uint32, np.uint32, np.uint32], None]


def fill_masked(out: MaskArray, value: MaskArray, seed: int, threshold: int) -> None:
    """Set each element of `out` (N,) to 0 with probability threshold / 2^32, else to the element of
    `value` (1,).
    """
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    find_fill()(out, value[0], low, high, np.uint32(threshold))


@functools.cache
def find_fill() -> Fill:
    try:
        import numba

        # Its work may go on while Python does something else.
        compiled: Fill = numba.njit(nogil=True, cache=True)(fill_by_loop)
        for dtype in (np.int16, np.int32, np.int64):
            compiled(np.zeros(1, dtype), dtype(1), *np.ones(3, np.uint32))
        return compiled
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        say(f"warning: numba cannot compile dropout ({reason}); training goes on more slowly")
        return fill_by_arrays


def fill_by_loop(out: MaskArray, value: Any, low: Any, high: Any, threshold: Any) -> None:
    zero = out.dtype.type(0)
    for i in range(out.size):
        # numba computes with 64 bits unless it is told otherwise
        x = np.uint32(np.uint32(i) * WEYL + low)
        x = np.uint32((x ^ (x >> LONG)) * FIRST_FACTOR)
        x = np.uint32((x ^ (x >> SHORT)) * SECOND_FACTOR)
        x = np.uint32((x ^ (x >> LONG)) + high)
        x = np.uint32((x ^ (x >> LONG)) * FIRST_FACTOR)
        x = np.uint32((x ^ (x >> SHORT)) * SECOND_FACTOR)
        x = np.uint32(x ^ (x >> LONG))
        out[i] = value if x >= threshold else zero


def fill_by_arrays(out: MaskArray, value: Any, low: Any, high: Any, threshold: Any) -> None:
    x = np.arange(out.size, dtype=np.uint32) * WEYL + low
    for added in (high, np.uint32(0)):
        x = (x ^ (x >> LONG)) * FIRST_FACTOR
        x = (x ^ (x >> SHORT)) * SECOND_FACTOR
        x = (x ^ (x >> LONG)) + added
    out[:] = np.where(x >= threshold, value, 0)
