"""CUDA graphs: work on a GPU that is recorded once and then launched as a whole.

Each launch of a kernel costs the host some microseconds and a small model needs thousands of them,
so a fast GPU waits for Python. A graph reads and writes the very addresses that it was recorded
with: callers copy its inputs into tensors that stay in place, and its results are overwritten each
time. On any other device the work simply runs, so that tests need no GPU.
"""

import gc
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

Output = TypeVar("Output")
WARM_UPS = 2  # runs that compile, tune, and allocate what stays


def warm_up(work: Callable[[], Output], device: torch.device) -> None:
    """Run `work` as often as it takes before it can be recorded, as torch.cuda.graph requires it: on the
    stream that records.
    """
    if device.type != "cuda":
        work()
        return
    stream, side_stream = torch.cuda.current_stream(device), get_side_stream(device)
    side_stream.wait_stream(stream)
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UPS):
            work()
    stream.wait_stream(side_stream)


def capture(work: Callable[[], Output], device: torch.device) -> Callable[[], Output]:
    """Return a function that repeats `work`, which has been warmed up, as one launch. Recording first
    frees the memory that the warm-up has used, so that there is room for the graph's own.
    """
    if device.type != "cuda":
        return work
    # The stream of the warm-up: cuBLAS keeps a workspace, and hipBLASLt a handle, for each. The loader's
    # thread may pin memory meanwhile, which a recording in mode "global" would not survive.
    graph = torch.cuda.CUDAGraph()
    recording = torch.cuda.graph(
        graph, stream=get_side_stream(device), capture_error_mode="thread_local"
    )
    gc.disable()  # it may free another graph or an event, which would end the recording
    try:
        # The outer context restores the stream, which torch 2.13 does not do where a recording fails.
        with torch.cuda.stream(torch.cuda.current_stream(device)), recording:
            output = work()
    finally:
        gc.enable()

    def replay() -> Output:
        graph.replay()
        return output

    return replay


@cache
def get_side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all warm-ups and recordings."""
    return torch.cuda.Stream(device)
