"""Starts or continues a run: claims its folder, compares it with the config, announces it, trains.

Everything that can stop a run before its first update is here or is called from here.
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from nmt.checkpoint import run_checkpoints
from nmt.config import RunConfig
from nmt.config_files import format_config, list_differences
from nmt.corpus.ledger import describe_mixture
from nmt.data.vocab import format_size, write_vocab
from nmt.paper import find_dev_reference
from nmt.system.device import name_machine
from nmt.system.errors import UserError, describe_error
from nmt.system.files import (
    check_own_folder,
    has_plain_file,
    lock,
    make_folder,
    remove_leftovers,
    verify,
    write_text,
)
from nmt.system.progress import say
from nmt.system.ranks import World, is_rank_lost
from nmt.system.run_folder import MANIFEST_FILE, RunFolder
from nmt.train.checkpoint_writer import Mirror
from nmt.train.events import Listener
from nmt.train.loop import Trainer
from nmt.train.resolve import resolve
from nmt.train.setup import open_setup, resume
from nmt.train.shutdown import PREEMPTED, StatusFile, StopRequest
from nmt.translate.translator import warn_if_untagged


def train(
    config: RunConfig, recorded: RunConfig, world: World, listener: Listener, mirror: Mirror
) -> int:
    """Start or continue the run in `config.folder`, which began with the config `recorded`; return its
    exit code.
    """
    run, stop = config.run_folder, StopRequest()
    config = resolve(config, recorded, world)
    machine = name_machine(world.device, world.size)
    status = StatusFile(run, config.training.steps, machine)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.listening())
        world.on_main(lambda: _claim_folder(config, status, stack))
        if not world.is_main:
            stack.enter_context(status.recording_failures())
        try:
            setup = resume(open_setup(config, world), run)
            # only now, so that a start that was refused does not decide the settings of the next
            world.on_main(lambda: _record_config(config, run, mirror))
            trainer = Trainer(setup, stop, status, listener, mirror)
            stack.callback(trainer.close)
            world.on_main(lambda: _announce_run(trainer))
            if not trainer.end_reason or trainer.is_validation_due:
                trainer.train()
            else:
                world.on_main(trainer.confirm_end)
        except RuntimeError as error:
            if not is_rank_lost(error, world):
                raise
            _report_lost_rank(error, status, world)
            # Returning would destroy the process group, which waits for the rank that was lost.
            raise SystemExit(PREEMPTED) from error
        return stop.exit_code


def _claim_folder(config: RunConfig, status: StatusFile, stack: contextlib.ExitStack) -> None:
    """Lock the run folder, and clear away what killed processes left in it."""
    run = status.run
    verify(Path(config.data.store))
    make_folder(run.path)
    stack.enter_context(lock(run.path, "nmt-train"))
    stack.enter_context(status.recording_failures())
    for folder in (run.checkpoints, *(run.path / name for name in config.training.track)):
        check_own_folder(folder, inside=run.path)
    make_folder(run.checkpoints)
    remove_leftovers(run.checkpoints)


def _record_config(config: RunConfig, run: RunFolder, mirror: Mirror) -> None:
    write_text(run.config, format_config(config))
    mirror.copy()  # fails now if nothing can be written there


def find_begun_run(config: RunConfig) -> RunConfig:
    """Return the config that the run in this folder began with, or this one if none has begun. Raise
    UserError if the folder is that of another run, or is not a run at all.
    """
    run = config.run_folder
    _check_run_folder(run, Path(config.data.store))
    recorded = run_checkpoints.load_run_config(run) or config
    changes = list_differences(recorded, config)
    if changes:
        raise UserError(
            f"{run.path}: this run was started with different settings ({'; '.join(changes)}); "
            "restore them, choose another out=DIR, or remove the folder to start over"
        )
    return recorded


def _check_run_folder(run: RunFolder, store: Path) -> None:
    """Refuse a folder that holds something other than a run."""
    if run.path.resolve() == store.resolve():
        raise UserError(f"{run.path}: is both out and data.store; choose another out=DIR")
    if os.path.lexists(run.path / MANIFEST_FILE):
        raise UserError(
            f"{run.path}: is a checkpoint, a store or an export, not a run; choose another out=DIR"
        )
    was_begun = run.checkpoints.exists() or os.path.lexists(run.path / ".lock")
    # files that training would overwrite
    theirs = [] if was_begun else [run.config]
    if not has_plain_file(run.config) and not run_checkpoints.list_steps(run):
        if run.path.resolve() == Path("/"):  # out=$UNSET/
            raise UserError(f"out={run.path}: is the root folder; choose another out=DIR")
        theirs = [run.metrics, *run.vocabs, run.report, run.results, run.curve]
    for path in theirs:
        if os.path.lexists(path):
            raise UserError(
                f"{path}: exists, but its folder is not that of a run; "
                "choose another out=DIR, or move the file away"
            )


def _announce_run(trainer: Trainer) -> None:
    """On the main rank: print what is trained, and update the vocabulary, links and status in the
    run folder.
    """
    setup = trainer.setup
    config, store = setup.config, setup.store
    say(
        f"model: {setup.n_weights / 1e6:.1f}M parameters, {format_size(setup.vocab)} pieces; data: "
        f"{len(store):,} pairs, {len(store.tgt.ids):,} target pieces; {config.training.precision} "
        f"on {trainer.status.machine}; run folder {trainer.run.path}"
    )
    if setup.mixture is not None:
        say(describe_mixture(setup.mixture, config.data))
    say(
        f"yardstick: an NLL of {trainer.log.learning.unigram_nll:.2f} takes no more than the frequencies of the "
        "pieces; a model that learns to translate soon falls far below it"
    )
    if config.training.ema is not None:
        say(
            f"training.ema: validation and checkpoints use the moving average of the weights, with "
            f"decay {config.training.ema:g}"
        )
    reference = find_dev_reference(config)
    if reference is not None:
        say(reference.describe())
    warmup_steps, steps = config.optimizer.warmup_steps, config.training.steps
    if warmup_steps > steps:
        say(
            f"warning: optimizer.warmup_steps is {warmup_steps:,}, but training.steps is {steps:,}: the "
            "learning rate never reaches its peak; lower optimizer.warmup_steps"
        )
    if config.data.valid is not None:
        warn_if_untagged(replace(config, decoding=config.dev_decoding), "data.valid.tag")
    if config.training.freeze and config.training.init_from is None:
        frozen = ", ".join(config.training.freeze)
        say(
            f"warning: training.freeze keeps random weights ({frozen}), because training.init_from is not set"
        )
    if setup.state.step:
        say(f"continuing after update {setup.state.step}")
    write_vocab(trainer.run.path, setup.vocab)
    trainer.writer.link_and_prune(setup.state)
    trainer.write_status("running")


def _report_lost_rank(error: Exception, status: StatusFile, world: World) -> None:
    """Report a broken connection to another rank. If that rank failed, it reports why itself."""
    say(
        f"stopped: lost the connection to another rank ({describe_error(error)}); "
        "run the same command again to continue from the last checkpoint"
    )
    if world.is_main and not status.has_failed:
        status.write(
            "preempted", PREEMPTED, "lost another rank; run the same command again to continue"
        )
