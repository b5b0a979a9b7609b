"""How fast training could be on a GPU, from counted kernels: what `make gpu` compares its
measurements with.

    python scripts/bench/roofline.py            # base and big, one GPU and eight, H100 and H200

A model, not a measurement: each matrix product takes its time in whole waves of tiles at the best
rate that such GPUs reach, each fused kernel takes the time of its bytes, a launch within a CUDA
graph takes 1.5 microseconds. Ranks exchange gradients and weights between micro-batches, so nothing
hides what that takes. Attention is the least certain. Counts are those of `count_kernels.py`, kept in
kernels.json beside this file. An earlier version of the model was held against a published figure for
an A100 and was 25 % too optimistic.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from count_kernels import MEAN_LENGTH, Counts, load

from nmt.system.tables import Table

COUNTS = Path(__file__).parent / "kernels.json"
UPDATE_TOKENS = 25_000  # target tokens
USEFUL = {1: 0.998, 8: 0.976}  # of them, by the number of ranks (docs/benchmarks.md)
LAUNCH_S = 1.5e-6  # of a kernel within a CUDA graph
COLLECTIVE_S = 2.0e-5  # what a sum or a gathering takes besides the time of its bytes
N_COPIES = 6  # kernels, each of a hundred gradients or so
SMALLEST_S = 2.0e-6  # what a kernel takes at least
FITS_L2 = 40e6  # bytes
COLUMNS = 37_056  # of the logits: the vocabulary, padded


@dataclass(frozen=True)
class Gpu:
    """What such a GPU reaches, not what its data sheet says."""

    n_processors: int
    flop_per_s: float  # of bf16 matrix products
    bytes_per_s: float  # of its memory
    l2_bytes_per_s: float
    link_bytes_per_s: float  # of a sum over eight of them: NCCL's bus bandwidth


GPUS = {
    "A100": Gpu(108, 270e12, 1.7e12, 3.0e12, 230e9),
    "H100": Gpu(132, 790e12, 2.85e12, 5.5e12, 370e9),
    "H200": Gpu(132, 790e12, 4.1e12, 5.5e12, 370e9),
}

PARTS = (
    "products",
    "fused",
    "attention",
    "loss rows",
    "gradients",
    "launches",
    "optimizer",
    "weights from ranks",
    "sum over ranks",
)

# Tiles of a product, and the share of the best rate that they reach.
TILES = ((128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75))
SPLITS = (1, 2, 4, 8, 16)  # of the inner size

# The attention kernels: rows of a tile and of the other side at a time, and seconds for a program
# and for each block. Guesses from registers and occupancy (docs/benchmarks.md), never timed.
TILE, BLOCK = 64, 32
FORWARD = (2.0e-6, 0.75e-6, 4)  # seconds, seconds a block, programs that a processor holds
OF_QUERIES = (2.0e-6, 1.5e-6, 3)
OF_KEYS = (2.0e-6, 2.5e-6, 3)


def product_s(m: int, n: int, k: int, gpu: Gpu) -> float:
    """Seconds of a product (m, k) x (k, n), by the best of some tilings."""
    best = math.inf
    for rows, columns, rate in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        filled = m * n / (math.ceil(m / rows) * rows * math.ceil(n / columns) * columns)
        for split in SPLITS:
            if split > 1 and k / split < 256:
                continue
            waves = math.ceil(tiles * split / gpu.n_processors)
            busy = filled * tiles * split / (waves * gpu.n_processors)
            inner = k / split
            reached = gpu.flop_per_s * rate * busy * inner / (inner + 160)
            moved = 2 * (m * k + k * n + m * n)
            if split > 1:
                moved += 4 * m * n * (split + 1)
            best = min(best, max(2 * m * n * k / reached, moved / gpu.bytes_per_s))
    return best + 1.5e-6


def traffic_s(n_bytes: float, gpu: Gpu) -> float:
    speed = gpu.bytes_per_s if n_bytes > FITS_L2 else gpu.l2_bytes_per_s
    return max(SMALLEST_S, n_bytes / speed)


def programs_s(
    tokens: int, n_heads: int, blocks: float, kind: tuple[float, float, int], gpu: Gpu
) -> float:
    """Seconds of the programs of an attention kernel, wave by wave."""
    start, each, held = kind
    programs = math.ceil(tokens / TILE) * n_heads
    return math.ceil(programs / (gpu.n_processors * held)) * (start + each * blocks)


def attention_s(counts: Counts, is_backward: bool, gpu: Gpu) -> float:
    """Seconds of one call of attention, the mean of the encoder's, the decoder's own, and that over
    the memory.
    """
    tokens, heads = counts.tokens, counts.n_heads
    # Rows of the other side; causal: half
    seen = (TILE + MEAN_LENGTH, TILE + MEAN_LENGTH / 2, TILE + MEAN_LENGTH)
    blocks = sum(seen) / len(seen) / BLOCK + 0.5
    heads_bytes = 2 * tokens * counts.d_model
    if not is_backward:
        return max(programs_s(tokens, heads, blocks, FORWARD, gpu), traffic_s(4 * heads_bytes, gpu))
    computed = programs_s(tokens, heads, blocks, OF_KEYS, gpu) + programs_s(
        tokens, heads, blocks, OF_QUERIES, gpu
    )
    return max(computed, traffic_s(10 * heads_bytes, gpu))


def update_ms(counts: Counts, gpu: Gpu) -> dict[str, float]:
    """Milliseconds of the parts of an update, one micro-batch on each rank."""
    parts = dict.fromkeys(PARTS, 0.0)
    n_matrix_weights = counts.n_matrix_weights
    for kernel in counts.kernels:
        if kernel.product is not None:
            parts["products"] += kernel.count * product_s(*kernel.product, gpu)
        elif kernel.kind == "fused":
            parts["fused"] += kernel.count * traffic_s(kernel.n_bytes, gpu)
        elif "packed_attention" in kernel.kind:
            parts["attention"] += kernel.count * attention_s(counts, "backward" in kernel.kind, gpu)
        elif "loss_rows" not in kernel.kind:
            parts["fused"] += kernel.count * traffic_s(kernel.n_bytes, gpu)
    # Read once, written once
    parts["loss rows"] = 2 * 2 * counts.tokens * COLUMNS / gpu.bytes_per_s * 1.15
    # Copied into the flat buffer: those of layers' matrices from bf16, the others in fp32
    copied = 8 * counts.n_parameters - 2 * n_matrix_weights
    parts["gradients"] = copied / gpu.bytes_per_s + N_COPIES * SMALLEST_S
    parts["launches"] = counts.launches() * LAUNCH_S
    # Adam and the norm of a share, whose matrices are then rounded to bf16
    moved = (32 * counts.n_parameters + 6 * n_matrix_weights) / counts.n_ranks
    if counts.n_ranks > 1:
        n_rest = counts.n_parameters - n_matrix_weights
        parts["weights from ranks"] = exchange_s(4 * n_rest + 2 * n_matrix_weights, counts, gpu)
        parts["sum over ranks"] = exchange_s(4 * counts.n_parameters, counts, gpu)
    parts["optimizer"] = moved / gpu.bytes_per_s + 1e-4
    return {part: 1000 * seconds for part, seconds in parts.items()}


def exchange_s(n_bytes: int, counts: Counts, gpu: Gpu) -> float:
    """Seconds in which ranks collect or sum so many bytes, in two collectives, while nothing else runs."""
    moved = n_bytes * (counts.n_ranks - 1) / counts.n_ranks
    return moved / gpu.link_bytes_per_s + 2 * COLLECTIVE_S


def target_tokens_per_s(counts: Counts, gpu: Gpu) -> float:
    n_tokens = UPDATE_TOKENS * USEFUL[counts.n_ranks]
    return 1000 * n_tokens / sum(update_ms(counts, gpu).values())


def predict(size: str, gpu_name: str, n_ranks: int) -> float | None:
    """Target tokens per second of `base` or `big`; None where that GPU or number of ranks was not
    counted.
    """
    for counts in load(COUNTS):
        for name, gpu in GPUS.items():
            if (counts.size, counts.n_ranks) == (size, n_ranks) and name in gpu_name:
                return target_tokens_per_s(counts, gpu)
    return None


def make_table(all_counts: list[Counts]) -> Table:
    rows = []
    for name in ("H100", "H200"):
        for counts in all_counts:
            took = update_ms(counts, GPUS[name])
            rows.append(
                [
                    f"{counts.size}, {counts.n_ranks} x {name}",
                    f"{counts.launches():,}",
                    *(f"{ms:.1f}" for ms in took.values()),
                    f"{sum(took.values()):.1f}",
                    f"{target_tokens_per_s(counts, GPUS[name]) / 1e6:.2f}M",
                ]
            )
    head = ("ms of an update", "launches (number)", *PARTS, "total", "target tokens/s")
    return Table(head, rows)


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(make_table(load(COUNTS)).to_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
