"""Finds out what fits into memory: which micro-batches need the most, and how large they may be.

If all micro-batches have one shape, each needs the same memory, so one trial is enough. Otherwise
those with the longest sentences or with the most sentences need the most memory; they are run
first, so that a failure comes in the first minute and not after hours. By default a micro-batch is
an equal share of an update for each rank, as small as the engine finds necessary to train and to
validate.
"""

import contextlib

import numpy as np
import torch

from nmt.checkpoint.run_checkpoints import load_run_config
from nmt.config import ModelConfig, RunConfig, TrainingConfig, VocabConfig
from nmt.data.batch import Batch, BatchShape
from nmt.data.loader import make_batch
from nmt.data.plan import limit_tokens
from nmt.data.store import TokenStore
from nmt.model.size import check_moments_fit
from nmt.system.errors import UserError
from nmt.system.memory import (
    MemoryLimit,
    explain_memory_error,
    find_memory_limit,
)
from nmt.system.progress import say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder
from nmt.train.engine import choose_training_engine
from nmt.train.precision import check_precision
from nmt.train.setup import Setup, open_setup
from nmt.train.shutdown import StopRequest
from nmt.train.validate import compute_dev_nll

# A run resumed on another number of ranks keeps its micro-batches, unless less than this share of
# the ranks would be busy.
MIN_USEFUL_SHARE = 0.9


def check_training_fits(
    model: ModelConfig, vocab: VocabConfig, training: TrainingConfig, world: World
) -> None:
    """Refuse what this device could never train, before its data is prepared."""
    check_precision(training.precision, world.device)
    limit = find_memory_limit()
    if world.device.type == "cuda":
        n_bytes = torch.cuda.get_device_properties(world.device).total_memory
        limit = MemoryLimit(n_bytes, "all memory of this GPU")
    check_moments_fit(model, vocab, training.ema is not None, limit, world.size)


# ---- the worst micro-batches -------------------------------------------------------------------------------------


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


# ---- the size of a micro-batch -----------------------------------------------------------------------------------


def resolve_micro_tokens(config: RunConfig, world: World) -> int:
    """Return `training.micro_tokens`. If it is `auto`, return the number that the run began with,
    provided that it keeps the ranks busy, or else an equal share of an update that fits into
    memory."""
    training = config.training
    if isinstance(training.micro_tokens, int):
        return training.micro_tokens

    engine = choose_training_engine(world.device)
    least_memory = engine.find_least_memory(world)

    def try_size(micro_tokens: int, alone: World) -> None:
        try_update(open_setup(config, micro_tokens, alone))

    def find_micro_tokens() -> int:
        recorded = _read_micro_tokens(RunFolder(config.folder), training, world.size)
        if recorded is not None:
            return recorded
        micro_tokens = engine.choose_micro_tokens(training, world, least_memory, try_size)
        say(f"training.micro_tokens: auto has chosen {micro_tokens}")
        return micro_tokens

    # Only the main rank decides: it later writes the file that is read here, and a slower rank
    # would find it written.
    return int(world.decide(find_micro_tokens))


def _read_micro_tokens(run: RunFolder, training: TrainingConfig, n_ranks: int) -> int | None:
    """Read the number that an earlier session wrote into the run folder; return None if there is
    none or it would leave ranks idle."""
    recorded = load_run_config(run)
    if recorded is None or recorded.training.micro_tokens == "auto":
        return None
    micro_tokens = recorded.training.micro_tokens
    share = useful_share(training, micro_tokens, n_ranks)
    if share >= MIN_USEFUL_SHARE:
        return micro_tokens
    say(
        f"the run began with micro-batches of {micro_tokens} tokens, which would leave "
        f"{n_ranks} ranks idle for {1 - share:.0%} of their time; choosing another size"
    )
    return None


def useful_share(training: TrainingConfig, micro_tokens: int, n_ranks: int) -> float:
    """Compute the share of the ranks that have a micro-batch to work on, averaged over an update."""
    n_micros = -(-max(training.src_tokens, training.tgt_tokens) // micro_tokens)
    n_rounds = -(-n_micros // n_ranks)
    return n_micros / (n_rounds * n_ranks)
