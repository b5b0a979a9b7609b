"""Work on a GPU that is recorded once and then launched as a whole: a CUDA graph.

A launch costs the host some microseconds and a small model needs thousands of them, so a fast GPU waits for Python.
A graph reads and writes the very addresses that it was recorded with: its inputs are copied into tensors that stay in
place, and its results are overwritten each time. On any other device the work simply runs, so tests need no GPU.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
WARM_UPS = 2  # to compile, to tune, and to allocate what stays


def capture(work: Callable[[], Result], device: torch.device, pool: Any = None) -> Callable[[], Result]:
    """Return what repeats `work` as one launch. `work` runs `WARM_UPS` times before: the caller undoes what that did.

    Graphs with one `pool` (`torch.cuda.graph_pool_handle()`) share memory and must not run at the same time.
    """
    if device.type != "cuda":
        return work
    side_stream = torch.cuda.Stream(device)
    side_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream(device).wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: the loader's thread may pin memory meanwhile, which a recording in mode "global" would not survive
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = work()

    def replay() -> Result:
        graph.replay()
        return result

    return replay
