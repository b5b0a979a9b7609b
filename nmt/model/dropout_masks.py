"""Dropout masks on the CPU, as a pure function of a seed and the index of an element.

A 32-bit hash mixes the index with both halves of the seed, and the element is dropped if the result is
below a threshold. numba compiles the loop for the processor's vector registers, on one core: 0.27 ms for
4,096 x 512 elements, where numpy's fastest generator and the comparison took 1.6 ms. Without numba, numpy
computes the same masks, several times slower than that generator.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nmt.system.caches import retry_without_cache
from nmt.system.extras import warn_uncompiled

BITS = 32  # of the hash
STRIDE = np.uint32(0x9E3779B9)  # odd, so the map is one-to-one; neighbours then differ in many bits
# multipliers and shifts of Chris Wellons' lowbias32 (github.com/skeeto/hash-prospector)
FIRST_FACTOR, SECOND_FACTOR = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
SHIFT_15, SHIFT_16 = np.uint32(15), np.uint32(16)

MaskArray = np.ndarray[Any, np.dtype[Any]]
Fill = Callable[[MaskArray, Any, np.uint32, np.uint32, np.uint32], None]


def fill_masked(out: MaskArray, value: MaskArray, seed: int, threshold: int) -> None:
    """Set each element of `out` (N,) to 0 with probability threshold / 2^32, else to the element of
    `value` (1,).
    """
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    load_fill(out.dtype)(out, value[0], low, high, np.uint32(threshold))


@functools.cache
def load_fill(dtype: np.dtype[Any]) -> Fill:
    """Return the compiled loop for elements of this type, or numpy's substitute."""
    try:
        import numba

        # nogil: other Python threads may run meanwhile
        compiled: Fill = numba.njit(nogil=True, cache=True)(fill_by_loop)
        ones = np.ones(3, np.uint32)
        retry_without_cache(lambda: compiled(np.zeros(1, dtype), dtype.type(1), *ones))
        return compiled
    except Exception as error:
        warn_uncompiled(error)
        return fill_by_arrays


def fill_by_loop(out: MaskArray, value: Any, low: Any, high: Any, threshold: Any) -> None:
    zero = out.dtype.type(0)
    for i in range(out.size):
        # numba promotes to 64 bits, so each step casts its result back to 32
        x = np.uint32(np.uint32(i) * STRIDE + low)
        x = np.uint32((x ^ (x >> SHIFT_16)) * FIRST_FACTOR)
        x = np.uint32((x ^ (x >> SHIFT_15)) * SECOND_FACTOR)
        x = np.uint32((x ^ (x >> SHIFT_16)) + high)
        x = np.uint32((x ^ (x >> SHIFT_16)) * FIRST_FACTOR)
        x = np.uint32((x ^ (x >> SHIFT_15)) * SECOND_FACTOR)
        x = np.uint32(x ^ (x >> SHIFT_16))
        out[i] = value if x >= threshold else zero


def fill_by_arrays(out: MaskArray, value: Any, low: Any, high: Any, threshold: Any) -> None:
    x = np.arange(out.size, dtype=np.uint32) * STRIDE + low
    for added in (high, np.uint32(0)):
        x = (x ^ (x >> SHIFT_16)) * FIRST_FACTOR
        x = (x ^ (x >> SHIFT_15)) * SECOND_FACTOR
        x = (x ^ (x >> SHIFT_16)) + added
    out[:] = np.where(x >= threshold, value, 0)
