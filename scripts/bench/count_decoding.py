"""How long beam search would take on a GPU, from a counted step: newstest2014's size, base, beam 4,
bf16.

    python scripts/bench/count_decoding.py [--lengths FILE]

No GPU is needed. One step of the search by recorded steps runs on the CPU with the real model, and
every operation is noted with the bytes that it reads and writes, for two numbers of sentences; so
what grows with sentences is separated from what does not. Then a test set of 3,003 sentences of news
lengths, or of those in FILE (source pieces with eos, one number a line), is gone through batch by
batch and step by step, in the shapes that the search would take, at the rates of `roofline.py`, by
the constants of now and by earlier ones. A model, not a measurement; what a launch from Python and
a graph cost is guessed.
"""

import argparse
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from roofline import GPUS, LAUNCH_S, Gpu, product_s, traffic_s
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.engines.cuda import graph_search
from nmt.engines.cuda.cuda_graph import WARM_UPS
from nmt.engines.cuda.graph_search import (
    FIRST_CAPACITY,
    GraphSearch,
    count_steps,
    find_full_capacity,
)
from nmt.engines.cuda.recorded_search import RecordedEngine
from nmt.model.cache import round_up_source_width, round_up_to_class
from nmt.model.transformer import Transformer
from nmt.system.tables import Table
from nmt.translate.batching import split_by_budget
from nmt.translate.search_rules import make_rules

N_VOCAB, BEAM, SENTENCES = 37_000, 4, 3_003
# Sentences of the two counted steps: on a CPU more would go through their logits in blocks
FEW, MORE = (8, 24)
HOST_S = 9e-6  # of an operation that is launched by itself, from Python
GRAPH_S = 0.005  # to make a graph of what was captured, beside the warm-ups and the capture
LAUNCHING = 10  # operations of the host at most, to launch a recorded step (test_graph_search.py)
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")


@dataclass(frozen=True)
class Operation:
    name: str
    n_bytes: int
    product: tuple[int, int, int, int] | None  # how many, rows, columns, inner size


@dataclass(frozen=True)
class Constants:
    """What decides which batches there are, and which of their steps are recorded."""

    batch_tokens: int
    unrecorded_steps: int
    fewest_rows: int


@dataclass
class Course:
    """What happens while a test set is searched."""

    batches: int = 0
    shapes: int = 0
    unrecorded: int = 0
    recordings: int = 0
    recorded: int = 0
    host: int = 0  # operations
    device_s: float = 0.0  # of all steps
    waiting_s: float = 0.0  # of the device for the host, in steps that are not recorded
    recording_s: float = 0.0


class Noted(TorchDispatchMode):
    """Notes each operation that does work."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        returned = function._schema.returns
        is_view = bool(returned) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in returned
        )
        name = function._schema.name
        if is_view or "empty" in name or "_unsafe_view" in name:
            return result
        tensors = {
            id(x): x for x in pytree.tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)
        }
        n_bytes = sum(x.numel() * x.element_size() for x in tensors.values())
        self.operations.append(Operation(name, n_bytes, _product(name, args)))
        return result


def _product(name: str, args: Any) -> tuple[int, int, int, int] | None:
    if name not in PRODUCTS:
        return None
    left, right = args[-2:] if name == "aten::addmm" else args[:2]
    count = left.shape[0] if name == "aten::bmm" else 1
    return count, left.shape[-2], right.shape[-1], left.shape[-1]


@functools.cache
def make_search() -> GraphSearch:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(), N_VOCAB).eval().requires_grad_(False).bfloat16()
    return GraphSearch(model, make_rules(DecodingConfig(beam=BEAM)), torch.device("cpu"))


@functools.cache
def count_step(n: int, longest: int, room: int) -> tuple[list[Operation], int, int]:
    """The operations of one step over `n` sentences of that many source pieces, with room for so
    many steps; and how many it takes to load the sentences, and to move those that are left.
    """
    search = make_search()
    sources = [[5] * (longest - 1) + [3] for _ in range(n)]
    step, load, move = Noted(), Noted(), Noted()
    with torch.no_grad():
        with load:
            search._load(pack(sources), None)
        if room > search.capacity:
            search._resize(None, search.n, room)
        with step:
            search._step()
        with move:
            search._resize(torch.arange(n // 2), n // 2, search.capacity)
    return step.operations, len(load.operations), len(move.operations)


def step_s(few: list[Operation], more: list[Operation], n: int, gpu: Gpu) -> tuple[float, int]:
    """Seconds of a step over `n` sentences, and its operations."""
    seconds = 0.0
    for one, other in zip(few, more, strict=True):
        growth = (other.n_bytes - one.n_bytes) / (MORE - FEW)
        n_bytes = one.n_bytes + growth * (n - FEW)
        seconds += LAUNCH_S + traffic_s(n_bytes, gpu)
        if one.product is not None and other.product is not None and one.name != "aten::bmm":
            rows = one.product[1] * n // FEW
            seconds += max(0.0, product_s(rows, *one.product[2:], gpu) - traffic_s(n_bytes, gpu))
    return seconds, len(few)


def news_lengths() -> np.ndarray:
    """Source pieces of 3,003 sentences."""
    random = np.random.default_rng(1)
    return np.clip(np.exp(random.normal(3.15, 0.6, SENTENCES)).round(), 2, 150).astype(int)


def count_needed_steps(sources: np.ndarray) -> np.ndarray:
    """How many steps each translation takes, made up: 1.15 target pieces for each source piece."""
    random = np.random.default_rng(2)
    targets = (sources * random.normal(1.15, 0.15, len(sources))).round().astype(int)
    until_nothing_better = 4  # steps after the best has ended
    return np.clip(targets, 1, sources + 50) + until_nothing_better


def search_all(sources: np.ndarray, constants: Constants, gpu: Gpu) -> Course:
    """Go through all batches as `GraphSearch` does."""
    rules = make_rules(DecodingConfig(beam=BEAM))
    all_steps = count_needed_steps(sources)
    course, uses = Course(), dict[tuple[int, int, int], int]()
    for batch in split_by_budget([[0] * n for n in sources], BEAM, constants.batch_tokens):
        steps, longest = all_steps[batch], int(sources[batch].max())
        width, n = round_up_source_width(longest), round_up_to_class(len(batch))
        full_room = find_full_capacity(count_steps(longest, 0, rules))
        room = min(FIRST_CAPACITY, full_room)
        course.batches += 1
        course.host += count_step(FEW, width, room)[1]
        for length in range(1, int(steps.max()) + 1):
            if length > room:
                room = min(2 * room, full_room)
                course.host += count_step(FEW, width, room)[2]
            few, _, moving = count_step(FEW, width, room)
            more, _, _ = count_step(MORE, width, room)
            seconds, n_operations = step_s(few, more, n, gpu)
            host_s = n_operations * HOST_S
            course.device_s += seconds
            shape = n, room, width
            uses[shape] = uses.get(shape, 0) + 1
            if uses[shape] > constants.unrecorded_steps:
                course.recorded += 1
                course.host += LAUNCHING
            else:
                course.unrecorded += 1
                course.host += n_operations
                course.waiting_s += max(0.0, host_s - seconds)
            if uses[shape] == constants.unrecorded_steps + 1:
                course.recordings += 1
                course.host += (WARM_UPS + 1) * n_operations
                course.recording_s += (WARM_UPS + 1) * host_s + GRAPH_S
            living = int((steps > length).sum())
            if 0 < living <= n // 2 and n > constants.fewest_rows:
                n = round_up_to_class(living)
                course.host += moving
    course.shapes = len(uses)
    return course


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, help="source pieces of each sentence")
    args = parser.parse_args()
    sources = np.loadtxt(args.lengths, dtype=int) if args.lengths else news_lengths()
    model = make_search().model
    assert isinstance(model, Transformer)
    now = Constants(
        RecordedEngine([model]).batch_tokens,
        graph_search.UNRECORDED_STEPS,
        graph_search.FEWEST_ROWS,
    )
    counts, seconds = [], []
    for constants in (Constants(16_384, 16, 16), now):
        name = f"{constants.batch_tokens:,}, {constants.unrecorded_steps}, {constants.fewest_rows}"
        for gpu_name, gpu in GPUS.items():
            course = search_all(sources, constants, gpu)
            own = course.device_s, course.waiting_s, course.recording_s
            seconds.append([name, gpu_name, *(f"{s:.2f}" for s in (*own, sum(own)))])
        counted = vars(course).values()
        counts.append([name, *(f"{n:,}" for n in counted if isinstance(n, int))])
    what = "batch_tokens, unrecorded, fewest rows"
    steps = ("steps not recorded", "recordings", "steps recorded")
    print(
        Table((what, "batches", "shapes", *steps, "operations of the host"), counts).to_markdown()
    )
    print()
    parts = ("steps on the device", "waiting for the host", "recording", "all")
    print(Table((what, "seconds", *parts), seconds).to_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
