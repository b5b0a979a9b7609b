"""Where Triton cannot build or launch a kernel, attention and loss take the plain path, and one line
says what to install.

The faults are real ones: it is Triton's own code that misses a compiler, gets nothing from an
assembler, or finds too little shared memory. Only the GPU is made up.
"""

import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.processor import CPU

from nmt.data.batch import pack
from nmt.engines.cuda import attention_triton, loss_triton
from nmt.engines.cuda.attention_triton import can_attend
from nmt.engines.cuda.backend import CudaBackend
from nmt.engines.cuda.kernels import can_launch
from nmt.engines.cuda.loss_triton import can_compute_loss
from nmt.model.packed_attention import attend
from nmt.system.progress import say_once
from nmt.train.loss import chunked_loss_forward, compute_loss_sums

needs_triton = mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs triton, not interpreted",
)


class Fault:
    """A machine on which Triton finds a GPU and cannot use it."""

    def __init__(self, folder: Path, monkeypatch: MonkeyPatch) -> None:
        from triton.runtime import driver

        self.folder, self.set, self.driver = folder, monkeypatch, driver
        for kernels in (attention_triton, loss_triton):
            for kernel in vars(kernels).values():
                if hasattr(kernel, "device_caches"):
                    fresh: dict[int, Any] = defaultdict(kernel.create_binder)
                    monkeypatch.setattr(kernel, "device_caches", fresh)
        for name in ("_default", "_active"):
            monkeypatch.setattr(driver, name, None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(folder))

    def write(self, name: str, script: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    def compiler_missing(self) -> None:
        self.set.delenv("CC", raising=False)
        self.set.setenv("PATH", str(self.folder))

    def compiler_named_but_missing(self) -> None:
        self.set.setenv("CC", "no-such-compiler")

    def headers_missing(self) -> None:
        say = "echo 'fatal error: Python.h: No such file or directory' >&2; exit 1"
        self.set.setenv("CC", self.write("cc", say))

    def assembler_fails(self) -> None:
        version = '[ "$1" != --version ] || { echo "release 12.8, V12.8.93"; exit 0; }'
        self.set.setenv("TRITON_PTXAS_PATH", self.write("ptxas", f"{version}; exit 1"))
        self.pretend_gpu()

    def shared_memory_is_small(self) -> None:
        self.pretend_gpu()

    def pretend_gpu(self) -> None:
        from triton.backends.compiler import GPUTarget

        gpu = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            launcher_cls=lambda source, metadata: None,
            utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 8}),
        )
        self.set.setattr(self.driver, "_active", gpu)


FAULTS: dict[Callable[[Fault], None], str] = {
    Fault.compiler_missing: "RuntimeError: Failed to find C compiler",
    Fault.compiler_named_but_missing: "FileNotFoundError: ",
    Fault.headers_missing: "cc failed",
    Fault.assembler_fails: "PTXASError: ",
    Fault.shared_memory_is_small: "OutOfResources: out of resource: shared memory",
}


@fixture
def fault(tmp_path: Path, monkeypatch: MonkeyPatch) -> Fault:
    for cached in (can_attend, can_compute_loss, say_once):
        cached.cache_clear()
    return Fault(tmp_path, monkeypatch)


@needs_triton
@mark.parametrize("happens", FAULTS, ids=lambda happens: happens.__name__)
def test_what_triton_lacks_is_told_in_one_line(
    happens: Callable[[Fault], None], fault: Fault, capsys: Capture
) -> None:
    happens(fault)
    assert not can_attend(CPU, torch.float32, 16, 16)
    said = read_stderr(capsys)
    assert said.count("\n") == 1 and FAULTS[happens] in said and "python3-dev" in said, said
    can_attend.cache_clear()


@needs_triton
def test_attention_and_loss_take_the_plain_path(
    fault: Fault, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    fault.headers_missing()
    for kernels in (attention_triton, loss_triton):  # these tensors count as those of a GPU
        monkeypatch.setattr(kernels, "IS_INTERPRETED", True)
    torch.manual_seed(0)
    side = pack([[0] * 3, [0] * 5])
    q, k, v = torch.randn(3, 8, 2, 16)
    backend = CudaBackend()
    mask = backend.make_mask(side, side)
    expected = attend(q, k, v, mask)
    assert torch.equal(backend.attend(q, k, v, mask), expected)
    hidden, weight, labels = torch.randn(8, 16), torch.randn(40, 16), torch.arange(8)
    smoothed, nll, *_ = chunked_loss_forward(hidden, weight, labels, 0.1, False)
    assert compute_loss_sums(hidden, weight, labels, 0.1, backend) == (smoothed, nll)
    assert read_stderr(capsys).count("\n") == 1
    can_attend.cache_clear()
    can_compute_loss.cache_clear()


def test_a_full_gpu_is_no_reason_to_go_without_kernels() -> None:
    def launch() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with raises(torch.OutOfMemoryError):
        can_launch(launch)
    assert can_launch(lambda: None)


def test_only_the_first_rank_of_a_machine_tells(monkeypatch: MonkeyPatch, capsys: Capture) -> None:
    say_once.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert not can_launch(lambda: 1 / 0) and read_stderr(capsys) == ""
