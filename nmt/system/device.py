"""Where a process computes: on a GPU if there is one, and on a CPU only if there is none or the user asks for it.

torch falls back to the CPU without a word when its wheel and the driver do not fit each other. A run would then take
weeks instead of hours, and only its speed would tell. So such a machine is refused, with what to do about it.
"""

import os
import re
import warnings
from pathlib import Path
from typing import Literal

import torch

from nmt.system.errors import UserError

DEVICES = Path("/dev")  # of NVIDIA: nvidia0, nvidia1, ...
DRIVER = Path("/proc/driver/nvidia/version")
OUT_OF_MEMORY = (
    "out of memory",
    "alloc_failed",
    "allocate memory",
)  # how different libraries say it


def choose_device(asked: Literal["auto", "cpu"] = "auto", local_rank: int = 0) -> torch.device:
    """The GPU of this rank; the CPU where it is asked for or where there is no GPU."""
    if asked == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(
        action="ignore"
    ):  # of an old driver, at length; it is refused below
        is_usable = torch.cuda.is_available()
    if is_usable:
        return torch.device("cuda", local_rank)
    if has_nvidia() and os.environ.get("CUDA_VISIBLE_DEVICES") not in (
        "",
        "-1",
    ):  # by which the CPU is asked for, too
        build = (
            f"built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "built for the CPU alone"
        )
        raise UserError(
            f"this machine has an NVIDIA GPU ({driver_version()}) that torch {torch.__version__}, {build}, "
            "cannot use; install the torch wheel for this driver (see pytorch.org) or a newer driver, in a "
            "container pass the GPUs in, or ask for the CPU with device=cpu"
        )
    return torch.device("cpu")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory did not suffice, of the device or of the host, in whosever words: torch's allocator, the driver,
    cuBLAS, or an error that came of one of them."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            sign in words for sign in OUT_OF_MEMORY
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def has_nvidia() -> bool:
    """Whether the kernel knows of an NVIDIA GPU."""
    return DRIVER.exists() or any(DEVICES.glob("nvidia[0-9]*"))


def driver_version() -> str:
    """For people, from a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ...`."""
    try:
        found = re.search(r"\d+(\.\d+)+", DRIVER.read_text(errors="replace"))
    except OSError:
        found = None
    return f"driver {found[0]}" if found else "driver of unknown version"
