"""What this library sets for the C library, OpenMP, oneDNN and the kernel, so that users need not export it.

glibc returns each large block when it is freed and faults it in again, page by page, at the next
allocation: a few per cent of a training step on CPU. Huge pages avoid most of the other
faults. And OpenMP's threads wait for each other by spinning, which on a machine that anything else
uses can make a step several times slower, while falling asleep at once costs up to 12 %: they spin
for some microseconds (docs/benchmarks.md).
"""

import ctypes
import logging
import os
import re
import signal
import socket
import stat
import sys

from nmt.system.caches import provide_caches
from nmt.system.errors import UserError
from nmt.system.progress import say

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
MAX_COMPILERS = 32  # torch's own limit for one process
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # of <malloc.h>
SPINS = "1000"


def tune_process() -> None:
    """Spin only briefly, and keep freed memory and compiled code. Call it before torch is imported;
    variables that the user has set win."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # compiled code is kept, so that a second start is quick
    provide_caches()
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if not re.fullmatch(r"\s*0*[1-9][\d,\s]*", threads):
        say(f"warning: OMP_NUM_THREADS is {threads!r}, not a number of threads, and is ignored")
        del os.environ["OMP_NUM_THREADS"]
    # torch would tell each start of a toolkit without a GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # otherwise each rank would start as many compilers as the machine has cores
    n_ranks = read_rank_variable("LOCAL_WORLD_SIZE", 1)
    if n_ranks > 1:
        n_compilers = min(MAX_COMPILERS, count_cores() // n_ranks)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, n_compilers)))
    # freed memory is kept
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(TOP_PAD, 64 << 20)


def read_rank_variable(name: str, default: int) -> int:
    """Read one of the numbers that torchrun gives to each rank."""
    text = os.environ.get(name, str(default))
    # ASCII, because Python's int() also reads digits of other scripts
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(f"{name} is {text!r}, not a whole number; unset it, or start with torchrun")
    return int(text)


def count_cores() -> int:
    """Count the cores that this process may use; a batch system may grant fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def choose_matmul_library() -> None:
    """On AMD, let oneDNN do fp32 matrix products, because MKL takes a slow path there: half the speed.

    torch gives them to oneDNN only where bf16 arithmetic is allowed, and oneDNN uses that where the
    processor can multiply whole tiles of bf16. So a trial product shows whether fp32 stays fp32; if
    not, the choice is undone.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    if "AuthenticAMD" not in read_cpu_info() or before != "highest":
        return
    torch.set_float32_matmul_precision("medium")
    x = torch.full((256, 256), 1.0 + 2.0**-12)  # bf16 cannot hold this number
    if not torch.equal(x @ torch.eye(256), x):
        torch.set_float32_matmul_precision(before)


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the process that started it dies."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def limit_connection_silence(seconds: int) -> None:
    """Have the kernel close each TCP connection that is open now once its other side has been
    silent for so long.

    Without this, a host that vanished would be waited for forever.
    """
    if sys.platform != "linux":
        return
    options = {
        socket.TCP_KEEPIDLE: seconds // 4,
        socket.TCP_KEEPINTVL: seconds // 8,
        socket.TCP_KEEPCNT: 6,
        socket.TCP_USER_TIMEOUT: seconds * 1_000,
    }
    for name in os.listdir("/proc/self/fd"):
        try:
            _set_options(int(name), options)
        except OSError:  # closed meanwhile
            continue


def _set_options(descriptor: int, options: dict[int, int]) -> None:
    """Set options on a file descriptor, if it is a TCP connection."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
        if not is_internet or connection.type != socket.SOCK_STREAM:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def read_cpu_info() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read(4_096)
    except OSError:
        return ""
