"""Work on a GPU that is recorded once and then launched as a whole: a CUDA graph.

A launch costs the host some microseconds and a small model needs thousands of them, so a fast GPU waits for Python.
A graph reads and writes the very addresses that it was recorded with: its inputs are copied into tensors that stay in
place, and its results are overwritten each time. On any other device the work simply runs, so tests need no GPU.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
WARM_UPS = 2  # to compile, to tune, and to allocate what stays


def capture(
    work: Callable[[], Result], device: torch.device, pool: Any = None
) -> Callable[[], Result]:
    """Return what repeats `work` as one launch. `work` runs `WARM_UPS` times before: the caller undoes what that did.

    Graphs with one `pool` (`torch.cuda.graph_pool_handle()`) share memory and must not run at the same time.
    """
    if device.type != "cuda":
        return work
    stream, side_stream = torch.cuda.current_stream(device), warm_up_stream(device)
    side_stream.wait_stream(stream)
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UPS):
            work()
    stream.wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: the loader's thread may pin memory meanwhile, which a recording in mode "global" would not survive.
    recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    with (
        torch.cuda.stream(stream),
        recording,
    ):  # where a recording fails, torch 2.13 does not put the stream back
        result = work()

    def replay() -> Result:
        graph.replay()
        return result

    return replay


@cache
def warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace of many megabytes for each stream that it has ever seen."""
    return torch.cuda.Stream(device)
