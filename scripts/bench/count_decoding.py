"""How long beam search would take on a GPU, from a counted step: newstest2014's size, base, beam 4,
bf16.

    python scripts/bench/count_decoding.py

No GPU is needed. One step of the search by recorded steps runs on the CPU with the real model, and
every operation is noted with the bytes that it reads and writes, for two numbers of sentences; so
what grows with sentences is separated from what does not. Then a test set of 3,003 sentences of news
lengths is gone through step by step, in the shapes that the search would take, at the rates of
`roofline.py`. A model, not a measurement; the costs of recording are guesses.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from roofline import GPUS, LAUNCH_S, Gpu, product_s, traffic_s
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.system.tables import Table

N_VOCAB, BEAM, SENTENCES = 37_000, 4, 3_003
# Sentences of the two counted steps: on a CPU more would go through their logits in blocks
FEW, MORE = (8, 24)
HOST_S = 9e-6  # of an operation that is launched by itself, from Python
RECORDING_S = 0.05  # of one graph
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")


@dataclass(frozen=True)
class Operation:
    name: str
    n_bytes: int
    product: tuple[int, int, int, int] | None  # how many, rows, columns, inner size


# By room: over FEW sentences, over MORE
CountedSteps = dict[int, tuple[list[Operation], list[Operation]]]


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


def count_step(n: int, longest: int, room: int) -> list[Operation]:
    """The operations of one step over `n` sentences of that many source pieces, with room for so
    many steps.
    """
    from nmt.config import DecodingConfig, ModelConfig
    from nmt.data.batch import pack
    from nmt.engines.cuda.graph_search import GraphSearch
    from nmt.model.transformer import Transformer
    from nmt.translate.search_rules import make_rules

    torch.manual_seed(0)
    model = Transformer(ModelConfig(), N_VOCAB).eval().requires_grad_(False).bfloat16()
    search = GraphSearch(model, make_rules(DecodingConfig(beam=BEAM)), torch.device("cpu"))
    sources = [[5] * (longest - 1) + [3] for _ in range(n)]
    noted = Noted()
    with torch.no_grad():
        search._load(pack(sources), None)
        if room > search.capacity:
            search._resize(None, search.n, room)
        with noted:
            search._step()
    return noted.operations


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


def news_lengths() -> tuple[np.ndarray, np.ndarray]:
    """Source pieces of 3,003 sentences, and the steps that their translations take."""
    random = np.random.default_rng(1)
    sources = np.clip(np.exp(random.normal(3.15, 0.6, SENTENCES)).round(), 2, 150).astype(int)
    targets = (sources * random.normal(1.15, 0.15, SENTENCES)).round().astype(int)
    until_nothing_better = 4  # steps after the best has ended
    return sources, np.clip(targets, 1, sources + 50) + until_nothing_better


def decoding_s(gpu: Gpu, counted: CountedSteps) -> dict[str, float]:
    """Seconds of the parts of one search over all sentences, sorted by length into one batch.
    `counted` is filled with the steps that it lacks."""
    from nmt.engines.cuda.graph_search import FEWEST_ROWS, FIRST_CAPACITY, UNRECORDED_STEPS
    from nmt.model.cache import round_up_source_width, round_up_to_class

    sources, steps = news_lengths()
    width = round_up_source_width(int(sources.max()))
    uses: dict[tuple[int, int], int] = {}
    parts = {"steps recorded": 0.0, "steps not yet recorded": 0.0, "recording": 0.0}
    n, room = round_up_to_class(SENTENCES), FIRST_CAPACITY
    for length in range(1, int(steps.max()) + 1):
        living = int((steps >= length).sum())
        if living <= n // 2 and n > FEWEST_ROWS:
            n = round_up_to_class(living)
        while length > room:
            room *= 2
        if room not in counted:
            counted[room] = count_step(FEW, width, room), count_step(MORE, width, room)
        seconds, n_operations = step_s(*counted[room], n, gpu)
        uses[n, room] = uses.get((n, room), 0) + 1
        if uses[n, room] > UNRECORDED_STEPS:
            parts["steps recorded"] += seconds
        else:
            parts["steps not yet recorded"] += max(seconds, n_operations * HOST_S)
        if uses[n, room] == UNRECORDED_STEPS + 1:
            parts["recording"] += RECORDING_S
    return parts


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    counted: CountedSteps = {}
    rows = []
    for name, gpu in GPUS.items():
        parts = decoding_s(gpu, counted)
        rows.append(
            [name, *(f"{seconds:.2f}" for seconds in (*parts.values(), sum(parts.values())))]
        )
    head = ("seconds", "steps recorded", "steps not yet recorded", "recording", "all")
    print(Table(head, rows).to_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
