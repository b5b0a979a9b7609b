"""Reports an update that was not applied, in `nonfinite-STEP.json` in the run folder, for a person
to read.

The file lists the micro-batches with their losses and the indices of their pairs in the prepared
store, and the text of those whose loss is NaN or infinite. If every loss is finite, the gradient
was not.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nmt.config import OptimizerConfig
from nmt.data.plan import Array
from nmt.data.store import Side, TokenStore
from nmt.data.vocab import Vocab, Vocabulary
from nmt.system.files import write_json_or_warn
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder
from nmt.train.events import replace_nonfinite
from nmt.train.update import PendingOutcome, UpdateOutcome

MAX_SKIPPED = 3  # updates in a row


def report_nonfinite(
    outcome: UpdateOutcome,
    run: RunFolder,
    model: nn.Module,
    store: TokenStore,
    vocab: Vocabulary,
    world: World,
) -> str:
    """Write the file and return a one-line summary. All ranks must call this, because each knows
    only its own micro-batches."""
    pending, stats = outcome.pending, outcome.stats
    path = run.nonfinite(pending.step)
    losses = _micro_losses(pending, world)
    named = model.named_parameters()
    weights = [name for name, weight in named if not weight.detach().norm().isfinite()]
    if world.is_main:
        _write_file(path, outcome, losses, weights, store, vocab)
    mean_loss = stats.loss / pending.update.n_tgt
    weights_note = f", and the weight {weights[0]} is NaN or infinite" if weights else ""
    return (
        f"update {pending.step} was not applied: loss {mean_loss:.4g}, gradient norm {stats.grad_norm:.4g}"
        f"{weights_note}; its sentences are listed in {path}"
    )


def advise_after_failure(saved_step: int, is_sound: bool, optimizer: OptimizerConfig) -> str:
    """Say what can be done now; `is_sound` tells of the checkpoint of `saved_step`, the last one,
    whether the weights had not diverged by then.
    """
    rate, _ = optimizer.rate_setting
    start_over = f"start over in another out=DIR with a lower {rate} or more optimizer.warmup_steps"
    if not saved_step:
        return f"there is no checkpoint yet: {start_over}"
    skip = "continue from it with training.on_nonfinite=skip"
    if is_sound:
        return f"the last checkpoint is intact: {skip}, or {start_over}"
    return f"the last checkpoint may be no better: {skip} or, if that fails too, {start_over}"


def _micro_losses(pending: PendingOutcome, world: World) -> list[float]:
    """Collect the smoothed loss of each micro-batch from all ranks; blank micro-batches of idle
    ranks come last.
    """
    update = pending.update
    losses = torch.zeros(len(update.pairs) + world.size, dtype=torch.float64)
    numbers = [micro.number for micro in update.micros]
    losses[numbers] = pending.micro_sums[:, 0].double().cpu()
    return world.sum(losses).tolist()


def _write_file(
    path: Path,
    outcome: UpdateOutcome,
    losses: list[float],
    weights: list[str],
    store: TokenStore,
    vocab: Vocabulary,
) -> None:
    update = outcome.pending.update
    micro_batches = []
    for loss, pair_ids in zip(losses, update.pairs, strict=False):  # blank ones have no pairs
        described = {"loss": replace_nonfinite(loss), "pairs": pair_ids.tolist()}
        if not math.isfinite(loss):
            sources = _read_texts(store.src, pair_ids, vocab.src)
            targets = _read_texts(store.tgt, pair_ids, vocab.tgt)
            described["texts"] = list(zip(sources, targets, strict=True))
        micro_batches.append(described)
    content = {
        "step": outcome.pending.step,
        "epoch": update.cursor.epoch,
        "update_of_epoch": update.cursor.update,
        "loss": replace_nonfinite(outcome.stats.loss),
        "gradient_norm": replace_nonfinite(outcome.stats.grad_norm),
        "nonfinite_weights": weights,
        "micro_batches": micro_batches,
    }
    write_json_or_warn(path, content)


def _read_texts(side: Side, pair_ids: Array, vocab: Vocab) -> list[str]:
    ids, counts = side.read_sentences(pair_ids)
    sentences = np.split(ids, np.cumsum(counts)[:-1])
    return vocab.decode([sentence.tolist() for sentence in sentences])
