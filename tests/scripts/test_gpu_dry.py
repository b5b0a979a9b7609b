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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytest import MonkeyPatch, fixture, mark

from nmt.engines.cuda import attention_triton, loss_triton
from nmt.model.dropout_masks import count_dropped
from nmt.system.strict_json import Fields

pytestmark = mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs triton, not interpreted",
)
IS_DRY_RUN = os.environ.get("NMT_GPU_DRY") == "1"
CAPABILITIES = [80, 90]
SHARED = 99 * 1024  # what a program may have on the least of a family
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Built(NamedTuple):
    registers: int
    spilled: int  # bytes
    shared: int
    ptx: str


def build(kernel: Any, constants: Fields, dtype: torch.dtype, capability: int, warps: int) -> Built:
    """Compile as at a launch with aligned rows, and ask ptxas what it took."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas  # which of its assemblers, it knows
    from triton.compiler import ASTSource

    types = dict.fromkeys(("lse", "smoothed", "nll"), "*fp32")
    types |= dict.fromkeys(("scale", "gold", "others"), "fp32")
    types |= dict.fromkeys(("key_intervals", "query_intervals"), "*i32")
    types |= dict.fromkeys(("labels", "seed"), "*i64")
    rows = "q k v out grad grad_q grad_k grad_v logits"
    types |= dict.fromkeys(rows.split(), "*" + TYPES[dtype])
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    alignments = {}
    for place, (name, kind) in enumerate(signature.items()):
        is_size = name.endswith(("row", "_stride")) or name == "n_columns"
        if kind.startswith("*") or is_size and name not in constants:
            alignments[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, alignments)
    options = {"num_warps": warps, "num_stages": 2}
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    ptx = made.asm["ptx"]
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target and len(made.asm["cubin"]) > 1000
    command = f"{get_ptxas(capability).path} -v --gpu-name {target[1]} /dev/stdin -o /dev/null"
    done = subprocess.run(command.split(), input=ptx, capture_output=True, text=True, check=True)
    told = r"(\d+) bytes spill stores, (\d+) bytes spill loads(?s:.*)Used (\d+) registers"
    stored, loaded, registers = map(int, re.findall(told, done.stderr)[0])
    built = Built(registers, stored + loaded, made.metadata.shared, ptx)
    print(kernel.__name__, TYPES[dtype], f"sm_{capability}: {built[:3]}, {warps} warps")
    return built


@fixture(autouse=True)
def no_cache(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


BF16 = torch.bfloat16
KERNELS = ("attention_forward", "attention_backward")
HEADS = {
    BF16: "64/64 128/128 16/16 32/32 48/48 64/32 64/128 128/64 96/96",
    torch.float32: "64/64 128/128 16/16 32/32 48/48 64/128 96/96",
}
CASES = [(dtype, heads) for dtype, sizes in HEADS.items() for heads in sizes.split()]


@mark.parametrize("capability", CAPABILITIES if IS_DRY_RUN else [90])
@mark.parametrize("name", KERNELS if IS_DRY_RUN else KERNELS[:1])
@mark.parametrize("dtype, heads", CASES if IS_DRY_RUN else CASES[:1], ids=str)
@mark.parametrize("dropout", [0.0, 0.1])
def test_attention_stays_in_registers(
    dropout: float, dtype: torch.dtype, heads: str, name: str, capability: int
) -> None:
    d_k, d_v = map(int, heads.split("/"))
    q, v = torch.zeros(1, 1, d_k, dtype=dtype), torch.zeros(1, 1, d_v, dtype=dtype)
    dropped = count_dropped(dropout)
    launch = attention_triton._plan(q, q, v, dropped, is_backward=name == "attention_backward")
    names = ("K", "V", "K_PADDED", "V_PADDED", "TILE", "BLOCK", "DROPPED")
    constants = dict(zip(names, launch.scalars[-len(names) :], strict=True))
    if name == "attention_backward":
        constants |= dict.fromkeys(("Q_WIDTH", "KV_WIDTH"), 2 * d_k + d_v)
    assert launch.options["num_stages"] == 2  # as `build` compiles
    warps = launch.options["num_warps"]
    built = build(getattr(attention_triton, name), constants, dtype, capability, warps)
    assert built.spilled == 0 and built.registers <= 255 and built.shared <= SHARED
    assert len(re.findall(r"\.entry", built.ptx)) == 1
    # Or results would not repeat to the bit
    assert not re.search(r"(?m)^\s*(@\S+\s+)?(atom|red)\.", built.ptx)


@mark.gpu_dry
@mark.parametrize("capability", CAPABILITIES)
@mark.parametrize("n_vocab", [37_000, 32_000, 49_152, 16_000, 8000, 80, 42_024])
@mark.parametrize("needs_grad", [True, False])
def test_a_row_of_logits_is_read_once(n_vocab: int, needs_grad: bool, capability: int) -> None:
    n_columns = -(-n_vocab // 64) * 64
    assert loss_triton.reads_once(torch.zeros(1, n_columns, dtype=BF16))
    pairs, parts, full_parts, warps = loss_triton.choose_parts(n_vocab, n_columns)
    constants = {"PAIRS": pairs, "PARTS": parts, "FULL_PARTS": full_parts, "NEEDS_GRAD": needs_grad}
    built = build(loss_triton.loss_rows_once, constants, BF16, capability, warps)
    assert built.spilled == 0 and built.registers * warps * 32 <= 65_536
    moved = {"ld": 0, "st": 0}
    for way, n in re.findall(r"(ld|st)\.global\.[\w.]*v(2|4)\.b32 ", built.ptx):
        moved[way] += int(n) * 4 * warps * 32
    row = pairs * 4 * parts
    assert moved == {"ld": row, "st": row if needs_grad else 0}  # and no more, in wide loads


@mark.gpu_dry
@mark.parametrize("capability", CAPABILITIES)
@mark.parametrize("dtype", TYPES)
def test_a_row_read_twice_does_not_spill(dtype: torch.dtype, capability: int) -> None:
    constants = {"BLOCK": 4096, "NEEDS_GRAD": True}
    assert build(loss_triton.loss_rows_twice, constants, dtype, capability, 8).spilled == 0


def test_rows_that_do_not_fit_are_read_twice() -> None:
    assert not loss_triton.reads_once(torch.zeros(1, 49_216, dtype=BF16))
    assert not loss_triton.reads_once(torch.zeros(1, 64))
    assert not loss_triton.reads_once(torch.zeros(1, 37, dtype=BF16))


def test_launches_follow_from_row_counts_alone(monkeypatch: MonkeyPatch) -> None:
    """One kernel forward, one backward, whatever a query may see: they are recorded as one graph."""
    grids: list[object] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    for name in KERNELS:
        monkeypatch.setattr(attention_triton, name, Kernel())
    x = torch.zeros(200, 3, 64, requires_grad=True)
    for longest in (0, 3, 200):
        seen = torch.tensor([[0, longest]] * 200, dtype=torch.int32)
        attention_triton.triton_attention(x, x, x, seen, seen).sum().backward()
    assert grids == [(7, 3), (14, 3)] * 3  # of tiles of 32 rows, and of heads
