"""Where a process computes: on a GPU if there is one, on a CPU only if there is none or the user
asks for it.

torch falls back to the CPU silently when its build and the driver do not fit each other. A run
would then take weeks instead of hours, and nothing but its speed would show it. So such a machine
is refused, with a message that says what to do.
"""

import fnmatch
import functools
import os
import platform
import re
import resource
import sys
import warnings
from pathlib import Path
from typing import Literal

import torch

from nmt.system.errors import UserError
from nmt.system.runtime import choose_matmul_library, read_cpu_info

DEVICES = Path("/dev")  # NVIDIA's are nvidia0, nvidia1, ...
DRIVER = Path("/proc/driver/nvidia/version")
WSL_DRIVER = Path(
    "/usr/lib/wsl/lib/libcuda.so.1"
)  # of Windows: Linux shows neither of the others there
NO_DEVICES = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that also ask for the CPU

# What the kernel calls the instructions for products, the fastest first, and what people call them.
INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
# Those that multiply bf16; the last is what the kernel calls ARM's.
AVX512_BF16 = "AVX512-BF16"
BF16_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": AVX512_BF16, "bf16": "ARM's BF16"}
BF16_CAPABILITY = (8, 0)  # of NVIDIA's GPUs: older ones compute bf16 by way of fp32
# AMD's that multiply bf16; their numbers cannot be compared with NVIDIA's capability
BF16_ARCHITECTURES = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")

Precision = Literal["bf16", "fp32"]


def choose_device(requested: Literal["auto", "cpu"] = "auto", local_rank: int = 0) -> torch.device:
    """Return the GPU of this rank, or the CPU if the user asked for it or there is no GPU.

    Whoever chooses the CPU, for training, scoring or translation, also gets the library that multiplies
    fp32 there: a model has the same scores in every command.
    """
    device = _find_device(requested, local_rank)
    if device.type == "cpu":
        choose_matmul_library()
    return device


def _find_device(requested: Literal["auto", "cpu"], local_rank: int) -> torch.device:
    if requested == "cpu":
        return torch.device("cpu")
    # An old driver makes torch warn at length; it is refused below.
    with warnings.catch_warnings(action="ignore"):
        is_usable = torch.cuda.is_available()
    if is_usable:
        n_gpus = torch.cuda.device_count()
        if local_rank >= n_gpus:
            raise UserError(
                f"torchrun started {local_rank + 1} or more processes here, but there are {n_gpus} "
                "GPUs; lower --nproc-per-node"
            )
        device = torch.device("cuda", local_rank)
        _check_architecture(device)
        return device
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in NO_DEVICES
    if not has_nvidia() or is_hidden:
        return torch.device("cpu")
    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built for the CPU only"
    raise UserError(
        f"this machine has an NVIDIA GPU ({read_driver_version()}) that torch {torch.__version__}, "
        f"{build}, cannot use; install the torch wheel for this driver (see pytorch.org) or a newer "
        "driver, make the GPUs visible in the container if this is one, or choose device=cpu"
    )


def _check_architecture(device: torch.device) -> None:
    """Refuse a GPU for which this torch has no code: its first kernel would find `no kernel image`."""
    with warnings.catch_warnings(action="ignore"):  # torch warns of such a GPU at length
        capability = torch.cuda.get_device_capability(device)
    names = " ".join(torch.cuda.get_arch_list())
    architectures = re.findall(r"(sm|compute)_(\d+)(\d)", names)  # AMD's have other names
    for kind, major, minor in architectures:
        version = int(major), int(minor)
        # sm_XY runs on its own family of GPUs; the driver compiles compute_XY for any later one
        if capability >= version and (kind == "compute" or capability[0] == version[0]):
            return
    if architectures:
        raise UserError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}, and torch "
            f"{torch.__version__} is built for {names} only; install a torch wheel that is built "
            "for it (see pytorch.org), or choose device=cpu"
        )


def choose_precision(device: torch.device) -> tuple[Precision, str]:
    """Choose the precision in which a device computes faster, and say why.

    It depends on the kind of device, never on a trial, whose result would depend on what else the
    machine was doing: the same command on the same machine must train the same model.
    """
    if device.type == "cuda" and torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        if architecture.startswith(BF16_ARCHITECTURES):
            return "bf16", f"the GPU is an AMD {architecture}"
        return "fp32", f"an AMD {architecture} does not multiply bf16"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        shown = ".".join(str(number) for number in capability)
        if capability >= BF16_CAPABILITY:
            return "bf16", f"the GPU has compute capability {shown}"
        return "fp32", f"a GPU of compute capability {shown} does not multiply bf16"
    instructions = find_bf16_instructions()
    if instructions is None:
        return "fp32", "this processor has no instructions for bf16"
    if not is_fast_in_bf16():
        return "fp32", f"{instructions} of this processor is slower than fp32"
    return "bf16", f"this processor has {instructions}"


@functools.cache
def has_bf16_products() -> bool:
    """Whether torch's oneDNN multiplies bf16 here at all, fast or not."""
    has_onednn = torch.backends.mkldnn.is_available()
    return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def find_bf16_instructions() -> str | None:
    """Name the instructions with which this processor multiplies bf16; None if it has none."""
    flags = f"{read_cpu_field('flags')} {read_cpu_field('Features')}".split()
    for flag, instructions in BF16_INSTRUCTIONS.items():
        if flag in flags:
            return instructions
    return None


def is_fast_in_bf16() -> bool:
    """Whether this processor multiplies bf16 faster than fp32. Intel's AVX512-BF16 without AMX takes twice
    as long (docs/benchmarks.md).
    """
    instructions = find_bf16_instructions()
    is_intel = "GenuineIntel" in read_cpu_info()
    return instructions is not None and not (instructions == AVX512_BF16 and is_intel)


def has_nvidia() -> bool:
    """Whether the kernel, or Windows below it, knows of an NVIDIA GPU."""
    return DRIVER.exists() or WSL_DRIVER.exists() or any(DEVICES.glob("nvidia[0-9]*"))


def read_driver_version() -> str:
    """For people, from a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module 550.54.15 Tue
    Mar ...`.
    """
    try:
        version = re.search(r"\d+(\.\d+)+", DRIVER.read_text(errors="replace"))
    except OSError:
        version = None
    return f"driver {version[0]}" if version else "driver of unknown version"


def read_peak_memory(device: torch.device) -> int:
    """Return the peak of bytes so far: of tensors on a GPU, otherwise those of the process in
    memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def name_machine(device: torch.device, n_ranks: int) -> str:
    """Name what a run computes on, for people: 8 x NVIDIA H200 and what decides how they sum, or the
    threads, and the processor's model with its fastest instructions for products.
    """
    if device.type == "cuda":
        parts = [f"{n_ranks} x {torch.cuda.get_device_name(device)}"]
        if n_ranks > 1:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            settings = fnmatch.filter(os.environ, "NCCL_*")
            parts += [f"NCCL {version}", *(f"{name}={os.environ[name]}" for name in settings)]
        return ", ".join(parts)
    n_threads = n_ranks * torch.get_num_threads()
    threads = "1 thread" if n_threads == 1 else f"{n_threads} threads"
    model = read_cpu_field("model name") or platform.machine()
    machine = f"{threads} on {model}"
    flags = read_cpu_field("flags").split()
    for flag, instructions in INSTRUCTIONS.items():
        if flag in flags:
            return f"{machine} with {instructions}"
    return machine


def read_cpu_field(name: str) -> str:
    """Read what the kernel says about the first core; empty if it says nothing."""
    match = re.search(rf"^{name}\s*:\s*(.+)$", read_cpu_info(), re.MULTILINE)
    return match[1].strip() if match else ""
