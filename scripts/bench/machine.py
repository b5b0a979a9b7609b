"""What a benchmark says of the machine that it ran on, and what that machine can do."""

import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path


def describe_machine(*packages: str) -> str:
    """The processor, its cores and memory, and the versions of Python and of these packages."""
    cpu_info = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", cpu_info, re.MULTILINE)
    processor = found[1] if found else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {version(name)}" for name in packages]
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB; {', '.join(versions)}"


def measure_products(threads: int, n: int = 2048, n_times: int = 6) -> dict[str, float]:
    """Return the GFLOP/s of one large product, the best of some, by precision and path."""
    import torch  # first here, after tune_process()
    from torch.nn.functional import linear

    torch.set_num_threads(threads)
    is_cuda = torch.cuda.is_available()
    device = "cuda" if is_cuda else "cpu"
    inner = 4 * n if is_cuda else n
    a = torch.randn(2 * inner, inner, device=device)
    b = torch.randn(inner, inner, device=device)
    low = a.bfloat16(), b.bfloat16()
    paths = {"bf16": lambda: linear(*low), "fp32": lambda: linear(a, b)}
    if not is_cuda and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        paths["fp32 oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(
            a, b, None, "none", [], ""
        )
    best = {}
    for name, product in paths.items():
        times = []
        for _ in range(n_times):
            began = time.perf_counter()
            product()
            if is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        best[name] = 4 * inner**3 / min(times) / 1e9
    return best
