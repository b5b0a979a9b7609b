"""Tries what needs the most memory of a training.

If all micro-batches have one shape, each needs the same memory, so one trial is enough. Otherwise
those with the longest sentences or with the most sentences need the most memory; they are run
first, so that a failure comes in the first minute and not after hours.
"""

import contextlib

import numpy as np

from nmt.data.batch import Batch, BatchShape
from nmt.data.loader import make_batch
from nmt.data.plan import limit_tokens
from nmt.data.store import TokenStore
from nmt.system.errors import UserError
from nmt.system.memory import explain_memory_error
from nmt.train.setup import Setup
from nmt.train.shutdown import StopRequest
from nmt.train.validate import compute_dev_nll


def order_by_memory(store: TokenStore) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs in two orders. A micro-batch of the first pairs needs the most memory: in
    one order it has the longest sentences, in the other the most sentences."""
    src, tgt = store.src.lengths, store.tgt.lengths
    return np.argsort(-(src + tgt), kind="stable"), np.argsort(np.maximum(src, tgt), kind="stable")


def make_full_batch(
    store: TokenStore, order: np.ndarray, micro_tokens: int, shape: BatchShape | None = None
) -> Batch:
    """Make a micro-batch of as many of the first pairs of `order` as it can have."""
    room = shape or limit_tokens(micro_tokens)
    n_pairs = room.sentences
    for side, n_tokens in ((store.src, room.src_tokens), (store.tgt, room.tgt_tokens)):
        ends = np.cumsum(side.lengths[order[:n_pairs]])
        n_pairs = int(ends.searchsorted(min(n_tokens, micro_tokens), "right"))
    return make_batch(store, order[: max(1, n_pairs)], shape)


def probe_peak_memory(setup: Setup) -> None:
    """Run forward and backward over the micro-batches that need the most memory, and discard the
    gradients.
    """
    store, replica = setup.store, setup.replica
    for order in order_by_memory(store):
        batch = make_full_batch(store, order, setup.micro_tokens, setup.shape)
        batch = batch.to(setup.world.device)
        replica.run(batch, 0.0, 0)
        if setup.shape is not None:  # all micro-batches are alike
            break
    replica.clear_gradients()


def try_update(setup: Setup) -> None:
    """Do an update that needs as much memory as any will, and compute the dev set's NLL beside it."""
    probe_peak_memory(setup)
    # a batch of one pair, so that there is a gradient and the optimizer allocates its moments
    batch = make_batch(setup.store, np.arange(min(1, len(setup.store))), setup.shape)
    setup.replica.run(batch.to(setup.world.device), 0.0, 0)
    setup.replica.gradient_norm()
    setup.optimizer.step()
    if setup.dev is not None:
        dev = setup.dev.store
        compute_dev_nll(setup.model, dev, setup.micro_tokens, setup.world, StopRequest())


def explain_out_of_memory(micro_tokens: int) -> contextlib.AbstractContextManager[None]:
    """Turn an out-of-memory error into a `UserError` that proposes a smaller micro-batch."""
    explanation = UserError(
        f"training.micro_tokens {micro_tokens}: a micro-batch does not fit into memory; try "
        f"training.micro_tokens={max(1, micro_tokens // 2)}, which does not change the updates"
    )
    return explain_memory_error(explanation)
