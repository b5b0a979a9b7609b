"""The GPU kernels compiled for two GPUs that need not be there: registers, spills, shared memory.

The interpreter takes what the compiler refuses, and a kernel that spills is slow without an error.
One variant is compiled by every test run; with NMT_GPU_DRY=1 (`make gpu-dry`) all that
`attention_triton.choose_kernel_shape` and `loss_triton.choose_parts` may choose.
"""

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nmt.data.batch import pack
from nmt.engines.cuda import attention_triton, loss_triton
from nmt.model.attention_mask import AttentionMask
from nmt.model.dropout_masks import count_dropped

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs triton, not interpreted",
)
IS_DRY_RUN = os.environ.get("NMT_GPU_DRY") == "1"
CAPABILITIES = [80, 90]
SHARED = 99 * 1024  # what a program may have on the least of a family
FP32_TENSORS = ("lse", "smoothed", "nll")
ROWS_OF_TYPE = ("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v", "logits")
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Built(NamedTuple):
    registers: int
    spilled: int  # bytes
    shared: int
    ptx: str


def build(
    kernel: Any, constants: dict[str, Any], dtype: torch.dtype, capability: int, warps: int
) -> Built:
    """Compile as at a launch with aligned rows, and ask ptxas what it took."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = ("scale", "gold", "others")
    types = dict.fromkeys(FP32_TENSORS, "*fp32") | dict.fromkeys(numbers, "fp32")
    types |= dict.fromkeys(("key_intervals", "query_intervals"), "*i32")
    types |= dict.fromkeys(("labels", "seed"), "*i64")
    types |= dict.fromkeys(ROWS_OF_TYPE, "*" + TYPES[dtype])
    signature, alignments = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        is_aligned = (
            signature[name].startswith("*")
            or name.endswith(("row", "_stride"))
            or name == "n_columns"
        )
        if is_aligned and name not in constants:
            alignments[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, alignments)
    made = triton.compile(
        source, GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": 2}
    )
    ptx = made.asm["ptx"]
    told = ptxas(ptx, capability)
    registers = re.search(r"Used (\d+) registers", told)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert registers and spills and len(made.asm["cubin"]) > 1000, told
    return Built(int(registers[1]), int(spills[1]) + int(spills[2]), made.metadata.shared, ptx)


def ptxas(ptx: str, capability: int) -> str:
    from triton.backends.nvidia.compiler import (
        get_ptxas,  # which of its assemblers, it knows itself
    )

    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    command = [
        get_ptxas(capability).path,
        "-v",
        "--gpu-name",
        target[1],
        "/dev/stdin",
        "-o",
        "/dev/null",
    ]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


BF16, FP32 = torch.bfloat16, torch.float32
HEADS = [
    (BF16, 64, 64),
    (BF16, 128, 128),
    (FP32, 64, 64),
    (BF16, 16, 16),
    (BF16, 32, 32),
    (BF16, 48, 48),
    (BF16, 64, 32),
    (BF16, 64, 128),
    (BF16, 128, 64),
    (BF16, 96, 96),
    (FP32, 16, 16),
    (FP32, 32, 32),
    (FP32, 48, 48),
    (FP32, 64, 128),
    (FP32, 96, 96),
    (FP32, 128, 128),
]


@pytest.mark.parametrize("capability", CAPABILITIES if IS_DRY_RUN else [90])
@pytest.mark.parametrize(
    "name", ["attention_forward", "attention_backward"] if IS_DRY_RUN else ["attention_forward"]
)
@pytest.mark.parametrize(("dtype", "d_k", "d_v"), HEADS if IS_DRY_RUN else HEADS[:1])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_stays_in_registers(
    dropout: float, dtype: torch.dtype, d_k: int, d_v: int, name: str, capability: int
) -> None:
    q, v = torch.zeros(1, 1, d_k, dtype=dtype), torch.zeros(1, 1, d_v, dtype=dtype)
    dropped = count_dropped(dropout)
    launch = attention_triton._plan(q, q, v, dropped, is_backward=name == "attention_backward")
    names = ("K", "V", "K_PADDED", "V_PADDED", "TILE", "BLOCK", "DROPPED")
    constants = dict(zip(names, launch.scalars[-len(names) :], strict=True))
    if name == "attention_backward":
        constants |= dict.fromkeys(("Q_WIDTH", "KV_WIDTH"), 2 * d_k + d_v)
    built = build(
        getattr(attention_triton, name), constants, dtype, capability, launch.options["num_warps"]
    )
    assert launch.options["num_stages"] == 2  # as `build` compiles
    print(
        f"{name} {TYPES[dtype]} {d_k}/{d_v} dropout {dropout} sm_{capability}: {built[:3]}, "
        f"{launch.options['num_warps']} warps"
    )
    assert built.spilled == 0 and built.registers <= 255 and built.shared <= SHARED
    assert len(re.findall(r"\.entry", built.ptx)) == 1
    # Or results would not repeat to the bit
    assert not re.search(r"(?m)^\s*(@\S+\s+)?(atom|red)\.", built.ptx)


@pytest.mark.gpu_dry
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("n_vocab", "needs_grad"),
    [
        (37_000, True),
        (37_000, False),
        (32_000, True),
        (49_152, True),
        (16_000, True),
        (8000, True),
        (80, True),
        (42_024, True),
    ],
)
def test_a_row_of_logits_is_read_once(n_vocab: int, needs_grad: bool, capability: int) -> None:
    n_columns = -(-n_vocab // 64) * 64
    assert loss_triton.reads_once(torch.zeros(1, n_columns, dtype=BF16))
    pairs, parts, full_parts, warps = loss_triton.choose_parts(n_vocab, n_columns)
    constants = {"PAIRS": pairs, "PARTS": parts, "FULL_PARTS": full_parts, "NEEDS_GRAD": needs_grad}
    built = build(loss_triton.loss_rows_once, constants, BF16, capability, warps)
    print(f"loss_rows_once {n_vocab} {needs_grad} sm_{capability}: {built[:3]}, {warps} warps")
    assert built.spilled == 0 and built.registers * warps * 32 <= 65_536
    bytes_of = {"b16": 2, "b32": 4, "v2.b32": 8, "v4.b32": 16}
    moved = {}
    for way in ("ld", "st"):
        sizes = re.findall(way + r"\.global\.(\w*\.?b\d+) ", built.ptx)
        moved[way] = (
            sum(bytes_of[size] for size in sizes if size in ("v2.b32", "v4.b32")) * warps * 32
        )
    assert moved["ld"] == pairs * 4 * parts  # the row and no more, in wide loads
    assert moved["st"] == (pairs * 4 * parts if needs_grad else 0)


@pytest.mark.gpu_dry
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_read_twice_does_not_spill(dtype: torch.dtype, capability: int) -> None:
    built = build(
        loss_triton.loss_rows_twice, {"BLOCK": 4096, "NEEDS_GRAD": True}, dtype, capability, 8
    )
    print(f"loss_rows_twice {TYPES[dtype]} sm_{capability}: {built[:3]}, 8 warps")
    assert built.spilled == 0


def test_rows_that_do_not_fit_are_read_twice() -> None:
    assert not loss_triton.reads_once(torch.zeros(1, 49_216, dtype=BF16))
    assert not loss_triton.reads_once(torch.zeros(1, 64))
    assert not loss_triton.reads_once(torch.zeros(1, 37, dtype=BF16))


class Launches:
    """Stands for a kernel and notes the grids that it was launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *_, **__: None


@pytest.mark.parametrize("dtype", TYPES)
def test_launches_follow_from_row_counts_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel forward, one backward, and no other: whatever the lengths, also with a dead tail."""
    kernels = {
        name: Launches()
        for name, value in vars(attention_triton).items()
        if hasattr(value, "arg_names")
    }
    for name, launches in kernels.items():
        monkeypatch.setattr(attention_triton, name, launches)
    tile = 64 if dtype == BF16 else 32
    x = torch.zeros(200, 3, 64, dtype=dtype)
    work: Callable[..., Tensor] = partial(
        attention_triton.triton_attention, x.requires_grad_(), x, x
    )
    for lengths in ([200], [1] * 200, [3, 0, 5]):
        side = pack([[0] * length for length in lengths])
        side = side.__class__(
            torch.zeros(200, dtype=torch.int64), side.offsets, side.longest, side.n_live
        )
        field = AttentionMask(side, side, causal=True)
        work(field.key_intervals, field.query_intervals).sum().backward()
    grids = {name: launches.grids for name, launches in kernels.items() if launches.grids}
    tiles = -(-200 // tile)
    assert grids == {
        "attention_forward": [(tiles, 3)] * 3,
        "attention_backward": [(2 * tiles, 3)] * 3,
    }
