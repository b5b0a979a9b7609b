"""The micro-batches that need most memory: of the longest sentences, and of the most sentences.

Run before all others they tell in the first minute, not after hours, what does not fit, and what to lower then.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from nmt.config import TrainingConfig
from nmt.data.loader import Loader
from nmt.data.plan import Cursor
from nmt.data.store import Side, TokenStore
from nmt.dist import World
from nmt.errors import UserError
from nmt.train.parallel import Captured, micro_step


def worst_orders(store: TokenStore) -> tuple[np.ndarray, np.ndarray]:
    """The pairs whose first ones need most memory: the longest sentences, then the most sentences."""
    src, tgt = store.src.lengths, store.tgt.lengths
    return np.argsort(-(src + tgt), kind="stable"), np.argsort(np.maximum(src, tgt), kind="stable")


def excerpt(store: TokenStore, order: np.ndarray, training: TrainingConfig, device: torch.device) -> tuple[Loader, int]:
    """Updates of nothing but the first pairs of `order` that fill a micro-batch, and how many these are."""
    room = training.sized
    ends = [np.cumsum(side.lengths[order[:room]] + 1) for side in (store.src, store.tgt)]
    ids = order[:max(1, min(int(end.searchsorted(room, "right")) for end in ends))]
    chosen = TokenStore(_chosen(store.src, ids), _chosen(store.tgt, ids))
    one_micro = replace(training, src_tokens=room, tgt_tokens=room)
    return Loader(lambda _: chosen, one_micro, 0, Cursor(), World(0, 1, device)), len(ids)


def try_worst(objective: nn.Module, store: TokenStore, training: TrainingConfig, world: World) -> None:
    """Pass them through forward and backward, for nothing but the memory that it takes."""
    for order in worst_orders(store):
        updates, _ = excerpt(store, order, training, world.device)
        with updates:
            for micro in next(updates).micros:
                micro_step(objective, micro.batch, 0.0, 0, False, training.precision == "bf16")
    objective.zero_grad(set_to_none=not isinstance(objective, Captured))


def _chosen(side: Side, ids: np.ndarray) -> Side:
    rows = [np.asarray(side.ids[side.offsets[i]:side.offsets[i + 1]]) for i in ids]
    return Side(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))


@contextlib.contextmanager
def roomy(micro_tokens: int) -> Iterator[None]:
    """Say what to change when memory does not suffice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
        raise UserError(f"training.micro_tokens {micro_tokens}: a micro-batch does not fit into memory; try "
                        f"training.micro_tokens={max(1, micro_tokens // 2)}; updates keep their sentences") from None
