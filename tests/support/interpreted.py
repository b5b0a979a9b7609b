"""Triton kernels without a GPU: interpreted, in a process of their own.

Triton decides at its import whether kernels are interpreted, and torch or another test may have
imported it by then. So the files with tests of kernels are run once more, in a process that says so
from the start. The interpreter takes what the compiler refuses (test_gpu_dry.py compiles). It keeps
bf16 as bare bits: it multiplies those in products and truncates where hardware rounds; both are
mended here. It is slow, so `make test` takes some of the cases, and `make soak` or a GPU all of
them.
"""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch, fixture, importorskip, mark
from torch import Tensor

from support.checkout import ROOT
from support.rings import amount

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TAKES_ALL = amount(torch.cuda.is_available(), True)
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}
needs_interpreter = mark.skipif(
    IS_INTERPRETED or torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="triton is not installed, or this process computes by itself",
)


@fixture(name="device")
def kernel_device(monkeypatch: MonkeyPatch) -> torch.device:
    """Where the kernels run."""
    importorskip("triton", reason="triton is not installed")
    if IS_INTERPRETED:
        mend_bf16(monkeypatch)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU: tests/engines/test_interpreted.py runs it interpreted")
    return torch.device("cuda")


def mend_bf16(monkeypatch: MonkeyPatch) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    def converted(data: np.ndarray, source: Any, target: Any, _: Any) -> np.ndarray:
        data = np.ascontiguousarray(data)
        if source == tl.bfloat16:
            return (
                torch.from_numpy(data.view(np.int16))
                .view(torch.bfloat16)
                .float()
                .numpy()
                .view(np.uint32)
            )
        assert target == tl.bfloat16
        return torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def product(_: Any, a: Any, b: Any, c: Any, *precision: Any) -> Any:
        a, b = (
            converted(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
            if x.dtype.scalar == tl.bfloat16
            else x.data
            for x in (a, b)
        )
        return interpreter.TensorHandle(a @ b + c.data, c.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)


def run_interpreted(*files: str) -> None:
    """Run the tests of these files, or these tests, in one process that interprets kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *files],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, (
        done.stdout[-5000:] + done.stderr[-1000:]
    )


def error(ours: Tensor, exact: Tensor) -> float:
    if not exact.numel() or not exact.any():
        return float(ours.abs().sum())  # must be zero to the bit
    return ((ours.double() - exact).norm() / exact.norm()).item()
