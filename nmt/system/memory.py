"""How much memory a process could have at the very most, and whether an error says that it had too
little.

The limit is that of the machine with its swap, of the container or job around the process, of
`ulimit -v`, or of its address space, whichever is lowest. What other processes hold counts as free,
so whatever exceeds the limit can never fit. torch is not imported here, because sizes are refused
before it is.
"""

import contextlib
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADDRESS_SPACE = 1 << 47  # of a process on x86-64
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
CGROUP_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of version 2 and 1
OUT_OF_MEMORY = ("out of memory", "alloc_failed", "allocate memory")  # in different libraries


@dataclass(frozen=True)
class MemoryLimit:
    n_bytes: int
    name: str  # completes "at most 8.0 GiB, ..."


def find_memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryLimit:
    """Find the lowest limit on the memory of this process."""
    limits = [MemoryLimit(ADDRESS_SPACE, "its address space")]
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft_limit != resource.RLIM_INFINITY:
        limits.append(MemoryLimit(soft_limit, "the limit of ulimit -v"))
    if sys.platform == "linux":
        # lines such as `MemTotal:  65536 kB`
        rows = re.findall(r"^(\w+): +(\d+) kB$", _read_text(proc / "meminfo"), re.MULTILINE)
        sizes = {name: 1024 * int(size) for name, size in rows}
        swap = sizes.get("SwapTotal", 0)
        if "MemTotal" in sizes:
            limits.append(MemoryLimit(sizes["MemTotal"] + swap, "all memory of this machine"))
        for n_bytes in _read_cgroup_limits(proc / "self" / "cgroup", cgroups):
            limits.append(MemoryLimit(n_bytes + swap, "the limit of this container or job"))
    return min(limits, key=lambda limit: limit.n_bytes)


def _read_cgroup_limits(cgroup: Path, root: Path) -> Iterator[int]:
    """Yield the limits of this process's control group and of those around it."""
    for line in _read_text(cgroup).splitlines():  # such as `0::/job` or `4:memory:/job`
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        folder = top / name.strip("/")
        while folder.is_relative_to(top):
            for file in CGROUP_LIMITS:
                yield from map(int, re.findall(r"^[0-9]+$", _read_text(folder / file)))
            folder = folder.parent


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def format_memory(n_bytes: float) -> str:
    """Format a size that may be beyond all bounds: 1.5 GiB, 3.1e+29 GiB."""
    n_gib = n_bytes / 2**30
    return f"{n_gib:,.1f} GiB" if n_gib < 1e6 else f"{n_gib:.1e} GiB"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device or the host ran out of memory, as reported by torch's allocator, the
    driver, cuBLAS, or an error that one of them caused."""
    while error is not None:
        # torch has a class of this name for its own.
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        text = str(error).lower()
        if any(sign in text for sign in OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def explain_memory_error(explanation: Exception) -> Iterator[None]:
    """Raise `explanation` in the place of an error that says that memory ran out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises a plain one for host memory
        if not is_out_of_memory(error):
            raise
        raise explanation from None
