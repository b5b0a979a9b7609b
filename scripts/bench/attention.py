"""Measures which attention is fastest on sentences of the lengths that translation has.

    python scripts/bench/attention.py --graphs     # on a GPU; elsewhere use --tokens 2000

Prints a table of the time that the forward and backward pass of one layer takes. Each variant takes
heads as slices of a packed product and returns packed heads, so the time to lay them out counts;
masks and indices, which are needed once for all layers, do not. Each variant is first compared with
float64. Variants take turns, because machines drift.
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


Prepare = Callable[[Case], Attention]  # what masks and indices cost is not timed


class Row(NamedTuple):
    """Sentences that are laid out in one row of a grid."""

    width: int
    sentences: list[int]


def make_cases(n_tokens: int, longest: int, device: torch.device) -> list[Case]:
    """Draw lengths as in WMT14: log-normal, 30 pieces on average, targets about as long as sources.

    There are as many pairs as fit into `n_tokens` on both sides.
    """
    rng = np.random.default_rng(0)
    src_lengths = np.exp(rng.normal(math.log(30) - 0.18, 0.6, n_tokens))
    tgt_lengths = src_lengths * np.exp(rng.normal(0.0, 0.15, n_tokens))
    lengths = np.stack((src_lengths, tgt_lengths)).round().astype(int).clip(1, longest)  # (2, n)
    is_within = (lengths.cumsum(1) <= n_tokens).all(0)
    n_pairs = int(is_within.sum())
    source = pack([[0] * length for length in lengths[0, :n_pairs]]).to(device)
    target = pack([[0] * length for length in lengths[1, :n_pairs]]).to(device)
    return [
        Case("self", source, source),
        Case("causal", target, target, True),
        Case("cross", target, source),
    ]


def make_heads(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Return random queries, keys and values: leaves, strided like slices of a fused product."""
    torch.manual_seed(0)
    heads = []
    for place, side in enumerate((case.queries, case.keys, case.keys)):
        shape = (side.n_live, 3, HEADS, SIZE)
        product = torch.randn(shape, device=side.tokens.device, dtype=dtype)
        heads.append(product[:, place].requires_grad_())  # (T, H, K)
    return heads


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, may: Tensor) -> Tensor:
    """Compute attention by its definition; `may` is true where a query may look at a key."""
    scores = q @ k.mT * SIZE**-0.5
    return torch.where(may, scores, -math.inf).softmax(-1) @ v


def prepare_reference(case: Case) -> Attention:
    """Prepare the definition: each token may look at any other of its sentence."""
    may = case.queries.sentence[:, None] == case.keys.sentence  # (T, T)
    if case.causal:
        may = may.tril()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)  # (H, T, K)
        return attend_by_products(q, k, v, may).transpose(0, 1)

    return attention


# ---- sentences in rows ---------------------------------------------------------------------------


class Move(torch.autograd.Function):
    """Looks rows up by an index, and their gradient by the inverse index."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, live: Tensor | None
    ) -> Tensor:
        ctx.inverse, ctx.live = inverse, live
        return rows.flatten(1).index_select(0, index).view(-1, HEADS, SIZE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.flatten(1).index_select(0, ctx.inverse)
        if ctx.live is not None:  # cells without a token have no gradient
            grad = grad * ctx.live[:, None]
        return grad.view(-1, HEADS, SIZE), None, None, None


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def make_rows(case: Case, step: int | None, is_shared: bool = False) -> list[Row]:
    """Assign sentences to rows, which come sorted by width.

    Widths are multiples of `step`; without it all rows are as wide as the widest. A shared row holds
    as many sentences, in order, as fit into `step` cells on both sides.
    """
    pairs = np.stack((case.queries.lengths.cpu(), case.keys.lengths.cpu()), 1)  # (S, 2)
    if step is None:
        step = round_up(int(pairs.max()), 8)
    rows: list[Row] = []
    for n, pair in enumerate(pairs):
        if is_shared and rows:
            together = pairs[[*rows[-1].sentences, n]].sum(0)
            if (together <= step).all():
                rows[-1].sentences.append(n)
                continue
        rows.append(Row(round_up(int(pair.max()), step), [n]))
    return sorted(rows)


class SideLayout(NamedTuple):
    """Where the tokens of queries or of keys lie in the cells of all rows."""

    cells: Tensor  # (T,): the cell of each token
    tokens: Tensor  # (C,): the token in each cell, 0 where there is none
    owners: Tensor  # (C,): the sentence of each cell, negative where there is none


def lay_out_side(packed: Packed, rows: list[Row], empty: int) -> SideLayout:
    """Lay the tokens of one side out; cells without a token belong to the sentence `empty`."""
    first_cells = torch.zeros_like(packed.lengths)  # (S,)
    n_cells = 0
    for width, sentences in rows:
        lengths = packed.lengths[sentences]
        first_cells[sentences] = n_cells + lengths.cumsum(0) - lengths
        n_cells += width
    cells = first_cells[packed.sentence] + packed.positions
    tokens = first_cells.new_zeros(n_cells)
    tokens[cells] = packed.index
    owners = torch.full_like(tokens, empty)
    owners[cells] = packed.sentence
    return SideLayout(cells, tokens, owners)


def prepare_rows(case: Case, rows: list[Row], core: Attention) -> Attention:
    """Prepare attention by `core` over sentences in rows; the rows of one width are one grid."""
    n_cells: dict[int, int] = {}  # by width, in the order of the rows
    for row in rows:
        n_cells[row.width] = n_cells.get(row.width, 0) + row.width
    sizes = list(n_cells.values())

    # Empty cells of the two sides have different owners, so that they never match.
    queries = lay_out_side(case.queries, rows, -1)
    keys = lay_out_side(case.keys, rows, -2)
    is_live = queries.owners >= 0
    masks = []
    query_grids, key_grids = queries.owners.split(sizes), keys.owners.split(sizes)
    for query, key, width in zip(query_grids, key_grids, n_cells, strict=True):
        query, key = query.view(-1, 1, width, 1), key.view(-1, 1, 1, width)
        may = query == key  # (rows, 1, width, width)
        if case.causal:
            may = may.tril()
        # Cells without a token look at anything; nobody looks at them
        masks.append(may | (query < 0))

    def attention(*qkv: Tensor) -> Tensor:
        grids = []
        for side, x in zip((queries, keys, keys), qkv, strict=True):
            grids.append(Move.apply(x, side.tokens, side.cells, None).split(sizes))
        mixed = []
        for *parts, may, width in zip(*grids, masks, n_cells, strict=True):
            q, k, v = (part.view(-1, width, HEADS, SIZE).transpose(1, 2) for part in parts)
            mixed.append(core(q, k, v, may).transpose(1, 2).reshape(-1, HEADS, SIZE))
        return Move.apply(torch.cat(mixed), queries.cells, queries.tokens, is_live)

    return attention


# ---- variants ------------------------------------------------------------------------------------


def prepare_triton(case: Case) -> Attention:
    mask = AttentionMask(case.queries, case.keys, case.causal)
    key_intervals, query_intervals = mask.key_intervals, mask.query_intervals

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_triton.triton_attention(q, k, v, key_intervals, query_intervals)

    return attention


def prepare_varlen(case: Case) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    queries, keys = case.queries, case.keys
    sides = (queries.offsets.int(), keys.offsets.int(), queries.longest, keys.longest)
    options: dict[str, Any] = {"window_size": (-1, 0 if case.causal else -1)}
    if "is_causal" in inspect.signature(varlen_attn).parameters:  # torch 2.10, 2.11
        options = {"is_causal": case.causal}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, *sides, **options)

    return attention


def prepare_flex(case: Case) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, causal = case.queries.sentence, case.keys.sentence, case.causal

    def may(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        is_same_sentence = query[i] == key[j]
        return is_same_sentence & (j <= i) if causal else is_same_sentence

    mask = create_block_mask(
        may, None, None, len(query), len(key), device=str(query.device), _compile=True
    )
    flex: Attention = torch.compile(flex_attention, dynamic=False)

    def attention(*qkv: Tensor) -> Any:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)  # (1, H, T, K)
        return flex(q, k, v, block_mask=mask)[0].transpose(0, 1)

    return attention


def prepare_shared_rows(step: int) -> Prepare:
    def prepare(case: Case) -> Attention:
        return prepare_rows(case, make_rows(case, step, True), F.scaled_dot_product_attention)

    return prepare


def prepare_grid(step: int | None, core: Attention) -> Prepare:
    def prepare(case: Case) -> Attention:
        return prepare_rows(case, make_rows(case, step), core)

    return prepare


VARIANTS: dict[str, Prepare] = {
    "ours, Triton": prepare_triton,
    "torch, varlen_attn": prepare_varlen,
    "torch, flex_attention": prepare_flex,
    "rows of 128, SDPA": prepare_shared_rows(128),
    "rows of 256, SDPA": prepare_shared_rows(256),
    "padded grid, SDPA": prepare_grid(None, F.scaled_dot_product_attention),
    "padded grid, products": prepare_grid(None, attend_by_products),
    "groups of like length, products": prepare_grid(16, attend_by_products),
}


def find_obstacle(name: str, device: torch.device, dtype: torch.dtype, longest: int) -> str:
    """Return why a variant is left out, "" if it is not."""
    if name.startswith(("ours", "torch")) and device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if name.startswith("ours") and attention_triton.triton is None:
        return "triton is not installed"
    if name.endswith("varlen_attn") and dtype != torch.bfloat16:
        return "takes bf16, not fp32"
    if "128" in name and longest > 128:
        return f"a sentence of {longest} does not fit"
    return ""


# ---- measurements --------------------------------------------------------------------------------


def pass_both_ways(attention: Attention, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the leaves."""
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def find_worst_error(prepare: Prepare, small: list[Case], dtype: torch.dtype) -> float:
    """Return the largest relative error, in the 2-norm, of an output or a gradient."""
    errors = []
    for case in small:
        leaves = make_heads(case, dtype)
        grad = torch.randn_like(leaves[0])
        exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
        exact = pass_both_ways(prepare_reference(case), exact_leaves, grad.double())
        found = pass_both_ways(prepare(case), leaves, grad)
        for a, b in zip(found, exact, strict=True):
            errors.append(float((a - b).norm() / b.norm()))
    return max(errors)


def time_call(work: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds that a call takes."""
    if device.type != "cuda":
        began = clock()
        work()
        return 1000 * (clock() - began)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def record_graph(work: Callable[[], object]) -> Callable[[], object]:
    """Record a call as a CUDA graph, so that kernels count and not their launches."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        work()
    return graph.replay


def measure(
    case: Case, names: list[str], dtype: torch.dtype, rounds: int, has_graphs: bool
) -> list[float]:
    """Return the median milliseconds of each variant; variants take turns."""
    device, leaves = case.queries.tokens.device, make_heads(case, dtype)
    grad = torch.randn_like(leaves[0]).contiguous()
    works: list[Callable[[], object]] = []
    for name in names:
        works.append(partial(pass_both_ways, VARIANTS[name](case), leaves, grad))
    for work in works:
        work()  # compiles and allocates
    if has_graphs:
        works = [record_graph(work) for work in works]
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, its_times in zip(works, times, strict=True):
            its_times.append(time_call(work, device))
    return [statistics.median(its_times) for its_times in times]


def describe(args: argparse.Namespace, device: torch.device, cross: Case, longest: int) -> str:
    machine = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    graphs = ", CUDA graphs" if args.graphs else ""
    return (
        f"{machine}; torch {torch.__version__}; {args.dtype}; {HEADS} x {SIZE} heads; "
        f"{cross.keys.n_sentences} pairs, {cross.keys.n_live:,} + {cross.queries.n_live:,} tokens, "
        f"longest {longest};\nforward and backward of one attention, "
        f"median of {args.rounds}{graphs}\n"
    )


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    full = make_cases(args.tokens, min(args.longest, 256), device)
    small = make_cases(400, 64, device)
    longest = max(case.queries.longest for case in full)

    # the variants that can run here
    reasons = {}
    for name in VARIANTS:
        reasons[name] = find_obstacle(name, device, dtype, longest)
    names = [name for name, reason in reasons.items() if not reason]

    # errors, then times
    errors = [find_worst_error(VARIANTS[name], small, dtype) for name in names]
    columns = [[f"{error:.1e}" for error in errors]]
    has_graphs = args.graphs and device.type == "cuda"
    for case in full:
        times = measure(case, names, dtype, args.rounds, has_graphs)
        columns.append([f"{t:.2f}" for t in times])

    # the table
    print(describe(args, device, full[2], longest))
    heads = " | ".join(f"{case.name}, ms" for case in full)
    print(f"| variant | relative error | {heads} |\n|---|---|---|---|---|")
    for line in zip(names, *columns, strict=True):
        print(f"| {' | '.join(line)} |")
    print("".join(f"\nleft out: {name} ({reason})" for name, reason in reasons.items() if reason))


def parse_arguments() -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
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
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if has_gpu else "fp32")
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="timed turns of each variant (20)"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="time CUDA graphs, as if launches cost nothing"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
