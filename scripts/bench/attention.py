"""Which attention is fastest over sentences of translation lengths? A table, forward and backward,
of one layer.

    python scripts/bench/attention.py --graphs     # on a GPU; elsewhere --tokens 2000 does

Each variant takes heads as slices of a packed product and gives packed heads back, so laying them
out counts; masks and indices, needed once for all layers, do not. Each is first held against
float64. Variants take turns: machines drift.
"""

import argparse
import inspect
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import Packed, pack
from nmt.model import attention_triton
from nmt.model.attention import AttentionMask
from nmt.system.progress import clock

HEADS, SIZE = 8, 64
Attention = Callable[..., Any]  # of packed heads q, k, v


class Case(NamedTuple):
    name: str
    queries: Packed
    keys: Packed
    causal: bool = False


def cases(n_tokens: int, longest: int, device: torch.device) -> list[Case]:
    """Lengths as in WMT14: log-normal, 30 pieces in the mean, a target about as long as its source."""
    rng = np.random.default_rng(0)
    src = np.exp(rng.normal(math.log(30) - 0.18, 0.6, n_tokens))
    lengths = (
        np.stack((src, src * np.exp(rng.normal(0.0, 0.15, n_tokens))))
        .round()
        .astype(int)
        .clip(1, longest)
    )
    n = int((lengths.cumsum(1) <= n_tokens).all(0).sum())
    source, target = (pack([[0] * length for length in side[:n]]).to(device) for side in lengths)
    return [
        Case("self", source, source),
        Case("causal", target, target, True),
        Case("cross", target, source),
    ]


def heads(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Leaves with the strides of slices of a fused product."""
    torch.manual_seed(0)
    return [
        torch.randn(side.n_live, 3, HEADS, SIZE, device=side.tokens.device, dtype=dtype)[
            :, place
        ].requires_grad_()
        for place, side in enumerate((case.queries, case.keys, case.keys))
    ]


def products(q: Tensor, k: Tensor, v: Tensor, may: Tensor) -> Tensor:
    return torch.where(may, q @ k.mT * SIZE**-0.5, -math.inf).softmax(-1) @ v


def all_with_all(case: Case) -> Attention:
    """The definition: each token may look at any other of its sentence."""
    may = case.queries.sentence[:, None] == case.keys.sentence
    may = may.tril() if case.causal else may
    return lambda q, k, v: products(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), may
    ).transpose(0, 1)


class Move(torch.autograd.Function):
    """Rows looked up by an index; the gradient is looked up by the inverse one."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, live: Tensor | None
    ) -> Tensor:
        ctx.inverse, ctx.live = inverse, live
        return rows.flatten(1).index_select(0, index).view(-1, HEADS, SIZE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.flatten(1).index_select(0, ctx.inverse)
        return (
            (grad if ctx.live is None else grad * ctx.live[:, None]).view(-1, HEADS, SIZE),
            None,
            None,
            None,
        )


def rows_of(case: Case, step: int | None, is_shared: bool = False) -> list[tuple[int, list[int]]]:
    """Widths and sentences of rows, a multiple of `step` wide (None: all as the widest); shared, as
    many as fit.
    """
    pairs = np.stack((case.queries.lengths.cpu(), case.keys.lengths.cpu()), 1)
    step, rows = step or -(-int(pairs.max()) // 8) * 8, list[tuple[int, list[int]]]()
    for n, pair in enumerate(pairs):
        if is_shared and rows and (pairs[[*rows[-1][1], n]].sum(0) <= step).all():
            rows[-1][1].append(n)
        else:
            rows.append((-(-int(pair.max()) // step) * step, [n]))
    return sorted(rows)


def laid_out(case: Case, rows: list[tuple[int, list[int]]], core: Attention) -> Attention:
    """Sentences in rows of cells, rows of one width as one grid, through `core`."""
    widths = [width for width, _ in rows]
    sizes = {width: width * widths.count(width) for width in widths}
    # Of each side: a token's cell, a cell's token, a cell's sentence
    cells, tokens, owners = ([], [], [])
    for side, packed in enumerate((case.queries, case.keys)):
        first, begin = torch.zeros_like(packed.lengths), 0
        for width, sentences in rows:
            first[sentences] = (
                begin + packed.lengths[sentences].cumsum(0) - packed.lengths[sentences]
            )
            begin += width
        cells.append(first[packed.sentence] + packed.positions)
        tokens.append(first.new_zeros(begin))
        owners.append(torch.full_like(tokens[side], -1 - side))
        tokens[side][cells[side]], owners[side][cells[side]] = packed.index, packed.sentence
    live, masks = owners[0] >= 0, []
    for query, key, width in zip(
        *(owner.split(list(sizes.values())) for owner in owners), sizes, strict=True
    ):
        query, key = query.view(-1, 1, width, 1), key.view(-1, 1, 1, width)
        may = (query == key).tril() if case.causal else query == key
        # Cells without a token look at anything; nobody looks at them
        masks.append(may | (query < 0))

    def attention(*qkv: Tensor) -> Tensor:
        grids = [
            Move.apply(x, tokens[side], cells[side], None).split(list(sizes.values()))
            for side, x in zip((0, 1, 1), qkv, strict=True)
        ]
        mixed = []
        for *parts, may, width in zip(*grids, masks, sizes, strict=True):
            q, k, v = (part.view(-1, width, HEADS, SIZE).transpose(1, 2) for part in parts)
            mixed.append(core(q, k, v, may).transpose(1, 2).reshape(-1, HEADS, SIZE))
        return Move.apply(torch.cat(mixed), cells[0], tokens[0], live)

    return attention


def in_triton(case: Case) -> Attention:
    field = AttentionMask(case.queries, case.keys, case.causal)
    key_intervals, query_intervals = field.key_intervals, field.query_intervals
    return lambda *qkv: attention_triton.triton_attention(*qkv, key_intervals, query_intervals)  # type: ignore


def in_torch(case: Case) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    sides = (
        case.queries.offsets.int(),
        case.keys.offsets.int(),
        case.queries.longest,
        case.keys.longest,
    )
    if "is_causal" in inspect.signature(varlen_attn).parameters:  # torch 2.10, 2.11
        return lambda *qkv: varlen_attn(*qkv, *sides, is_causal=case.causal)  # type: ignore
    return lambda *qkv: varlen_attn(*qkv, *sides, window_size=(-1, 0 if case.causal else -1))  # type: ignore


def in_flex(case: Case) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, causal = case.queries.sentence, case.keys.sentence, case.causal

    def may(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (query[i] == key[j]) & (j <= i) if causal else query[i] == key[j]

    mask = create_block_mask(
        may, None, None, len(query), len(key), device=str(query.device), _compile=True
    )
    flex: Attention = torch.compile(flex_attention, dynamic=False)
    return lambda *qkv: flex(*(x.transpose(0, 1)[None] for x in qkv), block_mask=mask)[0].transpose(
        0, 1
    )


VARIANTS: dict[str, Callable[[Case], Attention]] = {
    "ours, Triton": in_triton,
    "torch, varlen_attn": in_torch,
    "torch, flex_attention": in_flex,
    "rows of 128, SDPA": lambda case: laid_out(
        case, rows_of(case, 128, True), F.scaled_dot_product_attention
    ),
    "rows of 256, SDPA": lambda case: laid_out(
        case, rows_of(case, 256, True), F.scaled_dot_product_attention
    ),
    "padded grid, SDPA": lambda case: laid_out(
        case, rows_of(case, None), F.scaled_dot_product_attention
    ),
    "padded grid, products": lambda case: laid_out(case, rows_of(case, None), products),
    "groups of like length, products": lambda case: laid_out(case, rows_of(case, 16), products),
}


def obstacle(name: str, device: torch.device, dtype: torch.dtype, longest: int) -> str:
    """Why a variant is left out, if it is."""
    if name.startswith(("ours", "torch")) and device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if name.startswith("ours") and attention_triton.triton is None:
        return "triton is not installed"
    if name.endswith("varlen_attn") and dtype != torch.bfloat16:
        return "takes bf16, not fp32"
    return f"a sentence of {longest} does not fit" if "128" in name and longest > 128 else ""


def passed(attention: Attention, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def worst_error(
    prepare: Callable[[Case], Attention], small: list[Case], dtype: torch.dtype
) -> float:
    """The largest relative error, in the 2-norm, of an output or a gradient."""
    errors = []
    for case in small:
        leaves = heads(case, dtype)
        grad = torch.randn_like(leaves[0])
        truth = passed(
            all_with_all(case),
            [x.detach().double().requires_grad_() for x in leaves],
            grad.double(),
        )
        ours = passed(prepare(case), leaves, grad)
        errors += [float((a - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]
    return max(errors)


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = clock()
        work()
        return 1000 * (clock() - began)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """The same as a CUDA graph, so that kernels count and not their launches."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        work()
    return graph.replay


def measure(
    case: Case, names: list[str], dtype: torch.dtype, rounds: int, is_captured: bool
) -> list[float]:
    device, leaves = case.queries.tokens.device, heads(case, dtype)
    grad = torch.randn_like(leaves[0]).contiguous()
    works: list[Callable[[], object]] = [
        partial(passed, VARIANTS[name](case), leaves, grad) for name in names
    ]
    for work in works:
        work()  # compiles and allocates
    works = [captured(work) for work in works] if is_captured else works
    turns = [[milliseconds(work, device) for work in works] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=25_000, metavar="N", help="a side (25,000)")
    parser.add_argument(
        "--longest",
        type=int,
        default=256,
        metavar="N",
        help="pieces in a sentence, up to 256 (256)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16" if torch.cuda.is_available() else "fp32"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="timed turns of each variant (20)"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="time CUDA graphs, as if launches cost nothing"
    )
    args = parser.parse_args()
    device, dtype = (
        torch.device(args.device),
        torch.bfloat16 if args.dtype == "bf16" else torch.float32,
    )
    full, small = cases(args.tokens, min(args.longest, 256), device), cases(400, 64, device)
    longest = max(case.queries.longest for case in full)
    reasons = {name: obstacle(name, device, dtype, longest) for name in VARIANTS}
    names = [name for name, reason in reasons.items() if not reason]
    columns = [[f"{worst_error(VARIANTS[name], small, dtype):.1e}" for name in names]]
    columns += [
        [
            f"{t:.2f}"
            for t in measure(case, names, dtype, args.rounds, args.graphs and device.type == "cuda")
        ]
        for case in full
    ]
    what = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{what}; torch {torch.__version__}; {args.dtype}; {HEADS} x {SIZE} heads; {full[2].keys.n_sentences} pairs, "
        f"{full[2].keys.n_live:,} + {full[2].queries.n_live:,} tokens, longest {longest};\nforward and backward of "
        f"one attention, median of {args.rounds}{', CUDA graphs' if args.graphs else ''}\n"
    )
    print(
        f"| variant | relative error | {' | '.join(f'{case.name}, ms' for case in full)} |\n|---|---|---|---|---|"
    )
    for line in zip(names, *columns, strict=True):
        print(f"| {' | '.join(line)} |")
    print("".join(f"\nleft out: {name} ({reason})" for name, reason in reasons.items() if reason))
