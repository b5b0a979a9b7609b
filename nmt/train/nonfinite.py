"""What is known of an update that was not applied: `nonfinite-STEP.json` in the run folder, for a person to look at.

Its micro-batches with their losses and their pairs' numbers in the prepared store; of those whose loss is no number the
text too. Where all losses are numbers, the gradient was not.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nmt.data.store import Side, TokenStore
from nmt.data.vocab import Vocab
from nmt.system.files import write_json
from nmt.system.progress import say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder
from nmt.train.parallel import total_norm
from nmt.train.update import Outcome, Sent

SKIPS = 3  # in a row


def explain(
    outcome: Outcome,
    run: RunFolder,
    model: nn.Module,
    store: TokenStore,
    vocab: Vocab,
    world: World,
) -> str:
    """Write the file and say the same in a line. All ranks take part, for each knows its micro-batches only."""
    sent = outcome.sent
    losses = _micro_losses(sent, world)
    weights = [
        name for name, p in model.named_parameters() if not total_norm([p.detach()]).isfinite()
    ]
    path = run.nonfinite(sent.step)
    if world.is_main:
        _write(path, outcome, losses, weights, store, vocab)
    return (
        f"update {sent.step} was not applied: its loss is {outcome.loss / sent.update.n_tgt:.4g}, its gradient's "
        f"norm {outcome.norm:.4g}{', and so is ' + weights[0] if weights else ''}; {path} has its sentences"
    )


def _micro_losses(sent: Sent, world: World) -> list[float]:
    """The smoothed loss of each micro-batch of the update, from all ranks."""
    losses = torch.zeros(
        len(sent.update.pairs) + world.size, dtype=torch.float64
    )  # blank ones come last
    losses[[micro.number for micro in sent.update.micros]] = sent.micro_sums[:, 0].double().cpu()
    return world.sum(losses).tolist()


def _write(
    path: Path,
    outcome: Outcome,
    losses: list[float],
    weights: list[str],
    store: TokenStore,
    vocab: Vocab,
) -> None:
    update = outcome.sent.update
    micros = [
        _described(losses[number], ids.tolist(), store, vocab)
        for number, ids in enumerate(update.pairs)
    ]
    try:
        write_json(
            path,
            {
                "step": outcome.sent.step,
                "epoch": update.at.epoch,
                "update_of_epoch": update.at.update,
                "loss": _number(outcome.loss),
                "gradient_norm": _number(outcome.norm),
                "nonfinite_weights": weights,
                "micro_batches": micros,
            },
        )
    except OSError as error:
        say(f"warning: {path}: cannot be written ({error.strerror})")


def _described(loss: float, ids: list[int], store: TokenStore, vocab: Vocab) -> dict[str, Any]:
    described: dict[str, Any] = {"loss": _number(loss), "pairs": ids}
    if not math.isfinite(loss):
        described["texts"] = [
            [vocab.decode([_row(side, i)])[0] for side in (store.src, store.tgt)] for i in ids
        ]
    return described


def _row(side: Side, i: int) -> list[int]:
    return side.ids[side.offsets[i] : side.offsets[i + 1]].tolist()


def _number(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)
