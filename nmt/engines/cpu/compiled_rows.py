"""Compiled code for training beside attention: numbers in fp32 or as the bits of bf16, dropout, the softmax of
logits, and threads that share the work. Dropout has the bits of nmt/model/dropout_masks.py.
"""

import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from nmt.engines.cpu.compiled_code import make_compiler
from nmt.engines.cpu.compiled_products import PRODUCT_FILES, exp, find_group_maxima, round_bits
from nmt.engines.cpu.compiled_tiles import read_bits, reinterpret_bits
from nmt.model import dropout_masks
from nmt.model.dropout_masks import count_dropped, find_scale, hash_index, split_seed

ROW_FILES = (__file__, dropout_masks.__file__, *PRODUCT_FILES)
compile_rows = make_compiler(*ROW_FILES)
hash_compiled = compile_rows(hash_index)
MASKED = np.float32(-np.inf)


def view_numbers(x: Tensor) -> Any:
    """Return a tensor as an array; of bf16, which numpy does not have, the bits."""
    return x.numpy() if x.dtype != torch.bfloat16 else x.view(torch.int16).numpy().view(np.uint16)


def widen(number: Any) -> Any:
    """Return a number of a matrix, fp32 or bf16, as fp32."""


@overload(widen, strict=False)
def choose_widening(number: Any) -> Any:
    if number == types.uint16:
        return lambda number: reinterpret_bits(np.int32(np.uint32(number) << np.uint32(16)))
    return lambda number: number


def narrow(number: Any, like: Any) -> Any:
    """Return an fp32 number in the form of `like`, a number of a matrix."""


@overload(narrow, strict=False)
def choose_narrowing(number: Any, like: Any) -> Any:
    if like == types.uint16:
        return lambda number, like: np.uint16(round_bits(read_bits(number)))
    return lambda number, like: number


@compile_rows
def mask_numbers(x: Any, y: Any, low: Any, high: Any, threshold: Any, scale: Any) -> None:
    """As `mask_by_arrays`."""
    nothing = np.float32(0.0)
    for i in range(len(x)):
        factor = scale if hash_compiled(np.uint32(i), low, high) >= threshold else nothing
        y[i] = narrow(widen(x[i]) * factor, x[i])


@functools.cache
def find_factor(rate: float, dtype: torch.dtype) -> np.float32:
    return np.float32(torch.tensor(find_scale(rate), dtype=dtype).item())


def mask_compiled(x: Tensor, rate: float, seed: int) -> Tensor:
    x = x.detach().contiguous()
    y = torch.empty_like(x)
    low, high = split_seed(seed)
    threshold, factor = np.uint32(count_dropped(rate)), find_factor(rate, x.dtype)
    mask_numbers(view_numbers(x.view(-1)), view_numbers(y.view(-1)), low, high, threshold, factor)
    return y


@compile_rows
def softmax_rows(logits: Any, labels: Any, totals: Any, golds: Any, first: int, last: int) -> None:
    """Turn rows of logits into their softmax; note log sum exp and the label's logit of each."""
    n = logits.shape[1]
    row = np.empty(n, np.float32)
    for number in range(first, last):
        numbers = logits[number]
        for i in range(n):
            row[i] = widen(numbers[i])
        golds[number] = row[labels[number]]
        top = find_group_maxima(row).max()  # which leaves out NaN; the total does not
        total = np.float32(0.0)
        for i in range(n):
            row[i] = exp(row[i] - top)
            total += row[i]
        factor = np.float32(1.0) / total
        for i in range(n):
            numbers[i] = narrow(row[i] * factor, numbers[i])
        totals[number] = top + np.log(total)


def softmax_in_place(logits: Tensor, label: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """As that of nmt/train/loss.py."""
    sums = logits.new_empty(2, len(logits), dtype=exact)
    bounds = np.linspace(0, len(logits), torch.get_num_threads() + 1).astype(int).tolist()
    arrays = view_numbers(logits), label[:, 0].numpy(), *sums.numpy()
    share(softmax_rows, bounds, *arrays)
    return sums[0, :, None], sums[1, :, None]


# ---- threads --------------------------------------------------------------------------------------


@functools.cache
def start_threads(n: int, _process: int, _thread: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="compiled")


def share(function: Callable[..., None], bounds: Sequence[int], *arguments: object) -> None:
    """Call a compiled function with `arguments` and two neighbouring bounds, for each two on a thread."""
    mine, *others = itertools.pairwise(bounds)
    running = []
    if others:
        threads = start_threads(len(others), os.getpid(), threading.get_ident())
        running = [threads.submit(function, *arguments, *part) for part in others]
    function(*arguments, *mine)
    for part in running:
        part.result()
