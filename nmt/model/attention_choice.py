"""Which attention a GPU runs faster, measured once and remembered.

Two paths compute the same: the kernels of `attention_triton` and torch's kernel behind
`attention_varlen`. Which is faster depends on the GPU, the releases and the sizes of a head, so
`measure_attention` times both and writes the answer into the user's cache folder. Without an answer, or with
a file that cannot be read or written, the path is "triton"; that is never an error.
"""

import os
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.data.batch import Packed, pack
from nmt.model.attention import TRITON, VARLEN, AttentionMask, attend
from nmt.model.attention_triton import supports_triton, triton
from nmt.model.attention_varlen import supports_varlen
from nmt.system.cuda_graph import capture
from nmt.system.errors import UserError
from nmt.system.files import write_json
from nmt.system.strict_json import parse_json

ROUNDS = 10
# Pieces in successive sentences: about WMT14's lengths, whose mean is 30.
LENGTHS = (12, 25, 9, 41, 30, 18, 66, 23, 35, 14, 50, 28, 6, 37, 21, 90)

Timer = Callable[[Callable[[], object]], float]  # milliseconds that the work takes


def locate_cache_file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "nmt" / "attention.json"


def _choice_key(device_name: str, d_k: int, d_v: int) -> str:
    release = "none" if triton is None else triton.__version__
    return f"{device_name}, torch {torch.__version__}, triton {release}, heads {d_k}/{d_v}"


def _load_choices() -> dict[str, Any]:
    try:
        path = locate_cache_file()
        answers = parse_json(path.read_bytes(), str(path))
    except (OSError, UserError, RuntimeError):  # RuntimeError: there is no home
        return {}
    return answers if isinstance(answers, dict) else {}


def choose_attention(device_name: str, d_k: int, d_v: int) -> str:
    """Return the path that was faster on such a GPU, "triton" if it was never measured."""
    answer = _load_choices().get(_choice_key(device_name, d_k, d_v))
    if isinstance(answer, dict) and answer.get("path") == VARLEN:
        return VARLEN
    return TRITON


def save_choice(device_name: str, d_k: int, d_v: int, times: Mapping[str, float]) -> str:
    """Write down the times of the paths in milliseconds, and return the path of the least."""
    path = min(times, key=times.__getitem__, default=TRITON)
    answers = _load_choices()
    answers[_choice_key(device_name, d_k, d_v)] = {"path": path, "ms": dict(times)}
    try:
        file = locate_cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, answers)
    except (OSError, RuntimeError):
        pass  # it is measured again next time
    return path


def time_in_turns(works: Mapping[str, Callable[[], object]], timer: Timer) -> dict[str, float]:
    """Return the median time of each work; they take turns, because a GPU's clock rate drifts."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(timer(work))
    return {name: statistics.median(taken) for name, taken in times.items()}


def measure_attention(
    device: torch.device,
    n_rows: int,
    n_heads: int,
    d_k: int,
    d_v: int,
    timer: Timer | None = None,
) -> str:
    """Time both paths, save the faster one, and return it. It waits for the device."""
    side = _make_typical_side(n_rows, device)
    # Heads are parts of one wide tensor, as a layer's product makes them: strides matter to a
    # kernel.
    wide = torch.zeros(n_rows, n_heads, 2 * d_k + d_v, device=device, dtype=torch.bfloat16)
    heads = [part.requires_grad_() for part in wide.normal_().split((d_k, d_k, d_v), dim=-1)]
    q, _, v = heads
    is_supported = {TRITON: supports_triton(q, v), VARLEN: supports_varlen(q, v)}
    works = {}
    for path in [TRITON, VARLEN]:
        if not is_supported[path]:
            continue
        # A layer of the encoder and one of the decoder, whose mask is causal.
        masks = [
            AttentionMask(side, side, path=path),
            AttentionMask(side, side, causal=True, path=path),
        ]
        work = _capture(partial(_forward_backward, heads, masks), device)
        if work is not None:
            works[path] = work
    if timer is None:
        timer = partial(measure_milliseconds, device=device)
    times = time_in_turns(works, timer)
    return save_choice(_device_name(device), d_k, d_v, times)


def _make_typical_side(n_rows: int, device: torch.device) -> Packed:
    """Make sentences of the usual lengths that fill `n_rows`; the last one takes what remains."""
    sentences: list[list[int]] = []
    n_left = n_rows
    while n_left > 0:
        length = min(LENGTHS[len(sentences) % len(LENGTHS)], n_left)
        sentences.append([0] * length)
        n_left -= length
    return pack(sentences).to(device)


def _forward_backward(heads: list[Tensor], masks: list[AttentionMask]) -> None:
    for mask in masks:
        out = attend(heads[0], heads[1], heads[2], mask)
        torch.autograd.grad(out, heads, torch.ones_like(out))


def _capture(work: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """Record the work as one launch, as training runs it; None if this GPU or this torch cannot do it."""
    try:
        return capture(work, device)
    except (RuntimeError, ValueError, NotImplementedError):
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def measure_milliseconds(work: Callable[[], object], device: torch.device) -> float:
    # Events are timed on the device, so the host's own delays do not count.
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)
