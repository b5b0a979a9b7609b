"""What training costs: operations for each token, bytes of a model's state, and what this device gives for them.

Operations are counted as papers count them: two for a multiply-add, three times the forward pass, nothing for padding,
look-ups or what is computed twice. So speeds in them compare across tools, and their share of the measured ceiling says
how much of a device is used, whatever its data sheet promises.
"""

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nmt.config import ModelConfig
from nmt.system.progress import clock

TRAINING = (
    6  # operations for a multiply-add of the forward pass: two there, four for the two gradients
)
MEASURED_S = 1.5


@dataclass(frozen=True)
class Flop:
    """Operations of training, for each token of a side."""

    src: float
    tgt: float


def flop_per_token(config: ModelConfig, n_vocab: int, src_length: float, tgt_length: float) -> Flop:
    """For sentences of these mean lengths, marks included; a target piece sees half of its own sentence."""
    d, heads = config.d_model, config.n_heads
    keys, values = heads * config.key_size, heads * config.value_size
    self_products, feed_forward = d * (2 * keys + values) + values * d, 2 * d * config.d_ff
    reach = float("inf") if config.window is None else config.window
    src_seen, tgt_seen = min(src_length, 2 * reach + 1), min(tgt_length / 2, reach + 1)
    src = self_products + feed_forward + src_seen * (keys + values)
    src += d * (keys + values)  # keys and values of the memory, for the decoder
    tgt = self_products + feed_forward + (tgt_seen + src_length) * (keys + values)
    tgt += d * keys + values * d  # queries of the memory, and the product behind
    return Flop(TRAINING * config.n_layers * src, TRAINING * (config.n_layers * tgt + d * n_vocab))


@dataclass(frozen=True)
class Footprint:
    """What stays in memory from update to update."""

    parameters: int
    weights: int  # bytes, as the rest
    gradients: int
    adam: int  # two moments


def footprint(model: nn.Module) -> Footprint:
    """A matrix that several modules share counts once."""
    weights = list(model.parameters())
    size = sum(w.numel() * w.element_size() for w in weights)
    return Footprint(sum(w.numel() for w in weights), size, size, 2 * size)


class Ticks:
    """Moments of a device's work. A GPU marks them in its own time, so the host need not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda, self.moments = device.type == "cuda", list[Any]()

    def mark(self) -> None:
        self.moments.append(torch.cuda.Event(enable_timing=True) if self.is_cuda else clock())
        if self.is_cuda:
            self.moments[-1].record()

    def seconds(self) -> list[float]:
        """From each moment to the next."""
        pairs = list(zip(self.moments[:-1], self.moments[1:], strict=True))
        if not self.is_cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def forget_peak(device: torch.device) -> None:
    """Begin anew, where that can be done: a process on CPU knows only the peak of its life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, otherwise the resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def ceiling(config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of the feed-forward's products on `rows` tokens: the best of many, one by one or, where
    launching one takes time, ten in a row."""
    x = torch.randn(rows, config.d_model, device=device, dtype=dtype)
    weight = torch.randn(config.d_model, config.d_ff, device=device, dtype=dtype)
    y, back = x @ weight, torch.empty_like(x)
    in_a_row = 10 if device.type == "cuda" else 1
    best, began = float("inf"), clock()
    while clock() - began < MEASURED_S:
        ticks = Ticks(device)
        ticks.mark()
        for a, b, out in ((x, weight, y), (y, weight.T, back)):
            for _ in range(in_a_row):
                torch.mm(a, b, out=out)
            ticks.mark()
        best = min(best, *ticks.seconds())
    return 2 * rows * config.d_model * config.d_ff * in_a_row / best
