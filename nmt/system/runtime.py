"""What the process asks of the C library before torch is imported, so that nobody has to export anything.

glibc returns each large block when it is freed and faults it in again, page by page, at the next allocation: a few per
cent of a training step on CPU. Huge pages take most of the faults from the rest.
And OpenMP's threads wait for each other by spinning, which on a machine that anything else uses can make a step several
times slower, while falling asleep at once costs up to 12 %: they spin for some microseconds (docs/benchmarks.md).
"""

import ctypes
import os
import signal
import socket
import stat
import sys

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
MOST_COMPILERS = 32  # torch's own limit for one process
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # of <malloc.h>


def settle() -> None:
    """Unless the user's environment says otherwise: spin but shortly, and keep freed memory and compiled code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", f"{cache}/nmt/inductor"
    )  # so that a second start is quick
    os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/nmt/triton")
    n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if n_ranks > 1:  # else each rank would start as many compilers as the machine has cores
        share = min(MOST_COMPILERS, count_cores() // n_ranks)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, share)))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(TOP_PAD, 64 << 20)


def count_cores() -> int:
    """How many cores this process may use, which a batch system may have made fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def quicken_products() -> None:
    """On AMD, let oneDNN do fp32 matrix products, for MKL takes a slow path there: half the speed.

    torch gives them to oneDNN only where bf16 arithmetic is allowed, which oneDNN uses where the processor has
    instructions for whole bf16 tiles. So a product tells whether fp32 stays fp32; if not, all is left as it was.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    if "AuthenticAMD" not in _processor() or before != "highest":
        return
    torch.set_float32_matmul_precision("medium")
    x = torch.full((256, 256), 1.0 + 2.0**-12)  # no bf16 number
    if not torch.equal(x @ torch.eye(256), x):
        torch.set_float32_matmul_precision(before)


def end_with_parent() -> None:
    """Have this process asked to end, by SIGTERM, when the process that started it dies."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def limit_silence(seconds: int) -> None:
    """End the connections that are open now when the other side has been silent for so long: nobody else does."""
    if sys.platform != "linux":
        return
    tcp = {
        socket.TCP_KEEPIDLE: seconds // 4,
        socket.TCP_KEEPINTVL: seconds // 8,
        socket.TCP_KEEPCNT: 6,
        socket.TCP_USER_TIMEOUT: seconds * 1_000,
    }
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as link:
                    if (
                        link.family in (socket.AF_INET, socket.AF_INET6)
                        and link.type == socket.SOCK_STREAM
                    ):
                        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                        for option, value in tcp.items():
                            link.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError:  # closed meanwhile
            continue


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read(4_096)
    except OSError:
        return ""
