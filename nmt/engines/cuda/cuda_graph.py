"""CUDA graphs: work on a GPU that is recorded once and then launched as a whole.

Each launch of a kernel costs the host some microseconds and a small model needs thousands of them,
so a fast GPU waits for Python. A graph reads and writes the very addresses that it was recorded
with: callers copy its inputs into tensors that stay in place, and its results are overwritten each
time. On any other device the work simply runs, so that tests need no GPU.
"""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Output = TypeVar("Output")
WARM_UPS = 2  # runs that compile, tune, and allocate what stays


def capture(
    work: Callable[[], Output], device: torch.device, pool: Any = None
) -> Callable[[], Output]:
    """Return a function that repeats `work` as one launch. `work` runs `WARM_UPS` times before: the
    caller undoes its effects.

    Graphs with one `pool` (`torch.cuda.graph_pool_handle()`) share memory and must not run at the
    same time.
    """
    if device.type != "cuda":
        return work
    # warm up on another stream, as torch.cuda.graph requires
    stream = torch.cuda.current_stream(device)
    side_stream = get_side_stream(device)
    side_stream.wait_stream(stream)
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UPS):
            work()
    stream.wait_stream(side_stream)
    # record; the loader's thread may pin memory meanwhile, which a recording in mode "global" would
    # not survive
    graph = torch.cuda.CUDAGraph()
    recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    gc.disable()  # it may free another graph or an event, which would end the recording
    try:
        # The outer context restores the stream, which torch 2.13 does not do where a recording fails.
        with torch.cuda.stream(stream), recording:
            output = work()
    finally:
        gc.enable()

    def replay() -> Output:
        graph.replay()
        return output

    return replay


@cache
def get_side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all warm-ups: cuBLAS keeps a workspace of many megabytes for each stream that
    it has seen.
    """
    return torch.cuda.Stream(device)
