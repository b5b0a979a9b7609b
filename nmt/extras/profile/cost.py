"""What training costs: operations per token, bytes of a parameter, and the speed that this device
can reach.

Operations are counted as papers count them: two for a multiply-add, three times the forward pass,
and none for padding, look-ups or recomputation. So speeds compare across tools, and their
share of the measured ceiling says how much of a device is used, whatever its data sheet promises.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from nmt.config import ModelConfig
from nmt.model.moments import MOMENT_BYTES, WEIGHT_BYTES
from nmt.system.progress import clock

# Operations for a multiply-add of the forward pass: two there, and four for the two gradients.
FLOP_PER_MULTIPLY_ADD = 6
# Bytes of a parameter in a checkpoint; with training.ema there is a second weight
CHECKPOINT_BYTES = WEIGHT_BYTES + MOMENT_BYTES
MEASURED_S = 1.5


@dataclass(frozen=True)
class Flop:
    """Operations of training for each token of a side."""

    src: float
    tgt: float


def count_flop(config: ModelConfig, n_vocab: int, src_length: float, tgt_length: float) -> Flop:
    """Count for sentences of these mean lengths, begin and end marks included."""
    d = config.d_model
    keys = config.n_heads * config.key_size
    values = config.n_heads * config.value_size
    reach = float("inf") if config.window is None else config.window
    src_seen = min(src_length, 2 * reach + 1)
    tgt_seen = min(tgt_length / 2, reach + 1)  # half of its own sentence, on average

    self_projections = d * (2 * keys + values) + values * d
    memory_projections = d * (keys + values)  # for each source token
    query_projections = d * keys + values * d  # for each target token, to attend to the memory
    feed_forward = 2 * d * config.d_ff
    per_layer = self_projections + feed_forward
    encoder = per_layer + src_seen * (keys + values)
    decoder = per_layer + query_projections + (tgt_seen + src_length) * (keys + values)

    src = config.encoder_depth * encoder + config.decoder_depth * memory_projections
    tgt = config.decoder_depth * decoder + d * n_vocab
    return Flop(FLOP_PER_MULTIPLY_ADD * src, FLOP_PER_MULTIPLY_ADD * tgt)


class DeviceTimer:
    """Moments of a device's work. A GPU marks them in its own time, so the host need not wait for
    it.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.moments: list[Any] = []

    def mark(self) -> None:
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append(event)
        else:
            self.moments.append(clock())

    def seconds(self) -> list[float]:
        """Return the time from each moment to the next."""
        pairs = zip(self.moments[:-1], self.moments[1:], strict=True)
        if not self.is_cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def reset_peak_memory(device: torch.device) -> None:
    """Measure the peak from now on. On CPU this is impossible: a process only knows its peak since
    it started.
    """
    if device.type == "cuda":
        torch.cuda.init()  # without it, torch calls the device invalid
        torch.cuda.reset_peak_memory_stats(device)


def measure_ceiling(
    config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Operations per second of the feed-forward's products on `rows` tokens: the best of many."""
    x = torch.randn(rows, config.d_model, device=device, dtype=dtype)
    weight = torch.randn(config.d_model, config.d_ff, device=device, dtype=dtype)
    y = x @ weight
    seconds: list[float] = []
    for a, b, out in ((x, weight, y), (y, weight.T, torch.empty_like(x))):
        timer = Timer(
            "torch.mm(a, b, out=out)",
            globals={"torch": torch, "a": a, "b": b, "out": out},
            num_threads=torch.get_num_threads(),
        )
        seconds += timer.blocked_autorange(min_run_time=MEASURED_S / 2).times
    return 2 * rows * config.d_model * config.d_ff / min(seconds)
