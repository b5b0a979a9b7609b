"""The dev set that a run was validated on, and whether an average is worse on it than one of its members.

The comparison is by NLL, which takes one pass over the dev set and no search.
"""

from pathlib import Path

import torch

from nmt.average.select import read_validations
from nmt.checkpoint.checkpoint import Checkpoint, parse_step
from nmt.config import DataConfig
from nmt.data.vocab import Vocabulary
from nmt.system.errors import UserError, explain_missing
from nmt.system.files import verify
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder, dev_text_file, ids_file, offsets_file
from nmt.train.resolve import resolve_micro_tokens
from nmt.train.shutdown import StopRequest
from nmt.train.validate import DevSet, compute_dev_nll, open_dev
from nmt.translate.translator import make_translator

TOLERANCE = 0.005  # of NLL; less is no difference


def find_better_member(checkpoint: Checkpoint, device: torch.device, run: RunFolder) -> str | None:
    """Say which member of an average is better on the dev set than the average; None if none is, or if
    the scores or the dev set of the run are gone.
    """
    try:
        validations = read_validations(run)
        steps = [step for name in checkpoint.averaged if (step := parse_step(name)) in validations]
        if not steps:
            return None
        dev = open_dev_of_run(checkpoint.config.data, checkpoint.vocab)
    except (UserError, OSError):
        return None
    mean = compute_nll(checkpoint, dev, device)
    best = min(steps, key=lambda step: validations[step]["nll"])
    nll = validations[best]["nll"]
    if mean <= nll + TOLERANCE:
        return None
    return (
        f"on the dev set this average is worse than update {best:,}, one of its members: NLL "
        f"{mean:.4f}, not {nll:.4f}; see nmt-average {run.path} --curve, or use "
        f"{run.checkpoint(best)}"
    )


def compute_nll(checkpoint: Checkpoint, dev: DevSet, device: torch.device) -> float:
    """Compute the NLL per piece of the dev set, as validation does."""
    config, world = checkpoint.config, World(0, 1, device)
    # one of its own, because a translator that has translated may have its weights in another layout
    translator = make_translator(checkpoint, device, config.dev_decoding)
    micro_tokens = resolve_micro_tokens(config, config, world)
    nll = compute_dev_nll(translator.model, dev.store, micro_tokens, world, StopRequest())
    assert nll is not None  # only a stop request gives None
    return nll


def open_dev_of_run(data: DataConfig, vocab: Vocabulary) -> DevSet:
    """Open the dev set that training had, after verifying its files."""
    if data.valid is None:
        raise UserError(
            "data.valid: not set in the config of this run, but --curve needs a dev set; "
            "use --last instead"
        )
    store = Path(data.store)
    names = []
    for side in ("src", "tgt"):
        names += [dev_text_file(side), ids_file("valid", side), offsets_file("valid", side)]
    try:
        if not store.exists():
            raise explain_missing(store, "a relative data.store starts where nmt-train ran")
        verify(store, names, only=names)
        return open_dev(store, vocab)
    except UserError as error:
        raise UserError(
            f"{error}; --curve needs the dev set that training used, in the run's data.store: make it "
            "again with nmt-prepare --config RUN/config.yaml, or run this where training was started"
        ) from None
