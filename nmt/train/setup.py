"""Opens everything that updates work on, and restores it from the newest checkpoint.

Besides weights and Adam's moments, a run is resumed from `TrainState`, a handful of numbers.
Everything else is derived from (seed, update): the plan gives the batch order, and each micro-batch
has its own dropout seed. So ten updates, a stop and ten more give bit-identical weights to twenty
in one go, and update k has the same pairs on any number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nmt.agreement import check_agreement, find_direction
from nmt.checkpoint.checkpoint import (
    Checkpoint,
    TrainState,
    load_grown_weights,
    load_weights,
    open_unverified,
)
from nmt.checkpoint.run_checkpoints import find_newest, list_steps, open_checkpoint
from nmt.config import SILENT_SETTINGS, RunConfig
from nmt.config_files import list_differences, to_plain_values
from nmt.corpus.ledger import find_mixture, read_ledger
from nmt.data.batch import BatchShape
from nmt.data.epoch_stores import EpochStores
from nmt.data.loader import Loader, make_updates
from nmt.data.mixture import Mixture
from nmt.data.plan import choose_shape, fit_rows, plan_epoch
from nmt.data.store import TokenStore, open_store
from nmt.data.vocab import Vocabulary, format_size, is_extension, load_vocab
from nmt.model.backend import use_backend
from nmt.model.size import count_weights
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.system.ranks import World
from nmt.system.run_folder import MODEL_FILE, RunFolder
from nmt.train.engine import choose_training_engine
from nmt.train.loss import Objective
from nmt.train.optimizer import Adam, load_optimizer, make_optimizer
from nmt.train.replica import Replica
from nmt.train.validate import DevSet, open_dev


@dataclass(frozen=True)
class Setup:
    """Everything that updates need: for the loop, for memory trials and for --profile."""

    config: RunConfig
    micro_tokens: int
    world: World

    # data
    vocab: Vocabulary
    store: TokenStore
    # of every batch; None if code is not compiled, so that shapes may vary
    shape: BatchShape | None
    mixture: Mixture | None
    dev: DevSet | None

    # initialised from the seed, or restored from the newest checkpoint
    model: Transformer
    replica: Replica
    optimizer: Adam

    state: TrainState = TrainState()

    @property
    def n_weights(self) -> int:
        return count_weights(self.config.model, self.vocab.sizes)

    def make_epoch_stores(self) -> EpochStores:
        config = self.config
        return EpochStores(
            Path(config.data.store),
            config.vocab.bpe_dropout,
            config.seed,
            config.data.clean.max_pieces,
            config.data.workers,
            self.vocab,
        )

    def make_loader(self, open_epoch: Callable[[int], TokenStore]) -> Loader:
        return Loader(
            make_updates(
                open_epoch,
                self.config.training,
                self.micro_tokens,
                self.config.seed,
                self.state.cursor,
                self.world,
                self.shape,
                self.mixture,
            )
        )


def open_setup(config: RunConfig, world: World) -> Setup:
    """Open the store, and make the model and its optimizer as update 0 has them."""
    folder, training = Path(config.data.store), config.training
    micro_tokens = training.micro_tokens
    assert isinstance(micro_tokens, int)  # auto is resolved
    vocab = load_vocab(folder)
    store = open_store(folder, "train", vocab)
    ledger = read_ledger(folder)
    mixture = find_mixture(ledger, config.data, len(store))
    shape = None
    engine = choose_training_engine(world.device)
    if engine.has_fixed_shape(config.model, training, world):
        max_pieces = config.data.clean.max_pieces if config.vocab.bpe_dropout else None
        lengths = store.src.lengths, store.tgt.lengths
        shape = choose_shape(*lengths, micro_tokens, max_pieces, training.grouping)
        # With BPE-dropout each epoch has other lengths.
        if not config.vocab.bpe_dropout:
            plan = plan_epoch(*lengths, config.seed, 0, training, micro_tokens, shape, mixture)
            shape = fit_rows(shape, plan)

    torch.manual_seed(config.seed)
    model = Transformer(config.model, *vocab.sizes).to(world.device)
    use_backend(model, engine.backend)
    objective = Objective(model, training.label_smoothing)
    # Before the optimizer is made: several ranks move the parameters.
    replica = engine.make_replica(objective, world, training, config.optimizer, shape)
    replica.freeze(training.freeze)
    return Setup(
        config=config,
        micro_tokens=micro_tokens,
        world=world,
        vocab=vocab,
        store=store,
        shape=shape,
        mixture=mixture,
        dev=open_dev(folder, vocab) if config.data.valid else None,
        model=model,
        replica=replica,
        optimizer=make_optimizer(
            model, config.optimizer, replica.frozen, training.ema, replica.own
        ),
        state=TrainState(store_sha256=ledger.store, kernels=engine.name_kernels(training)),
    )


def resume(setup: Setup, run: RunFolder) -> Setup:
    """Return the setup of a run, with the state of its newest valid checkpoint."""
    new = setup.state
    stores = set(setup.world.collect(str(new.store_sha256).encode()))
    several = UserError(
        f"{setup.config.data.store}: holds other data on another machine; give all machines the same store"
    )
    setup.world.fail_if(several if len(stores) > 1 else None)
    state = replace(_restore(setup, run), store_sha256=new.store_sha256, kernels=new.kernels)
    return replace(setup, state=state)


def _restore(setup: Setup, run: RunFolder) -> TrainState:
    """Load the newest valid checkpoint, if there is one, into the model and the optimizer; return its
    state, or else that of a new run.
    """
    config, world = setup.config, setup.world
    # Only the main rank verifies it: if all N ranks hashed the same files, that would take N times
    # as long.
    newest = world.on_main(lambda: find_newest(run, config))
    step = int(world.broadcast(newest.step if newest else 0))
    average = setup.optimizer.average
    if not step:
        if config.training.init_from is not None:
            _load_initial_weights(Path(config.training.init_from), setup)
            if average is not None:
                average.restart()
        return setup.state
    newest = newest or open_unverified(run.checkpoint(step))
    _check_continued(setup, newest)
    load_weights(newest, setup.model)
    if average is not None:
        # With training.ema, model.safetensors has the averages, because they are what translates;
        # the weights that training continues from are in the optimizer's file. So the averages are
        # taken from the model here, before load_optimizer overwrites it with the weights.
        average.restart()
    state = load_optimizer(newest, setup.model, setup.optimizer)
    changes = _list_dev_changes(newest.config, config)
    if state.best is None or not changes:
        return state
    if world.is_main:
        say(
            f"warning: dev scores are not comparable with those so far ({'; '.join(changes)}), so the best "
            f"checkpoint, of update {state.best_step}, is forgotten"
        )
    return replace(state, best=None)


def _list_dev_changes(old: RunConfig, new: RunConfig) -> list[str]:
    """List the changed settings that decide what a dev score measures, each as `key: old -> new`."""
    silent = {f"decoding.{name}" for name in (*SILENT_SETTINGS, "tag")}  # the dev set has its own
    others = to_plain_values(new).keys() - {"decoding", "evaluation"}
    return list_differences(old, new, (*silent, *others))


def _check_continued(setup: Setup, newest: Checkpoint) -> None:
    """Refuse to continue on other data; say what changes the last bits."""
    new, old = setup.state, newest.origin
    assert isinstance(old, TrainState)
    name, store = str(newest.path), setup.config.data.store
    remedy = (
        "set data.store to the store this run was trained on, or start another run from these weights: "
        f"out=DIR training.init_from={name}"
    )
    check_agreement("BPE model", store, setup.vocab.digest, name, newest.vocab.digest, remedy)
    check_agreement("training data", store, new.store_sha256, name, old.store_sha256, remedy)
    is_other = None not in (old.kernels, new.kernels) and old.kernels != new.kernels
    if is_other and setup.world.is_main:
        say(
            f"warning: {name} was trained with attention by {old.kernels}, and this goes on with "
            f"{new.kernels}: its last bits will differ from those of a run that did not stop"
        )


def check_initial_model(config: RunConfig) -> None:
    """Refuse a training.init_from whose model does not fit this config. Its vocabulary is checked
    later, once the store exists.
    """
    path = config.training.init_from
    if path is None or list_steps(config.run_folder):
        return
    try:
        initial = open_checkpoint(Path(path))
    except UserError as error:
        raise UserError(f"training.init_from: {error}") from None
    without_weights = ["dropout", "attention_dropout", "ffn_dropout"]
    if config.model.positions != "learned":
        without_weights.append("max_positions")
    free = {name: vars(config.model)[name] for name in without_weights}
    shape = replace(initial.config.model, **free)
    changes = list_differences(replace(config, model=shape), config)
    if changes:
        raise UserError(
            f"training.init_from={path}: is another model ({'; '.join(changes)}); "
            "give these settings, or start from another model"
        )


def _load_initial_weights(path: Path, setup: Setup) -> None:
    """Load the weights that another run ended with; nothing else is taken from it."""
    config, world, vocab = setup.config, setup.world, setup.vocab
    initial = world.on_main(lambda: open_checkpoint(path))
    step = int(world.broadcast(initial.step if initial else 0))
    if initial is None:
        # The main rank has chosen one, of a run that may still be saving others.
        is_run = (path / "checkpoints").is_dir()
        initial = open_checkpoint(RunFolder(path).checkpoint(step) if is_run else path)
    is_grown = is_extension(vocab, initial.vocab)
    if not is_grown:
        keys = zip(("vocab.model", "vocab.tgt_model"), initial.vocab.files, strict=False)
        models = " ".join(f"{key}={path / name}" for key, name in keys)
        remedy = f"give another data.store=DIR, to be prepared with {models}"
        name, store = f"training.init_from={path}", config.data.store
        check_agreement("BPE model", name, initial.vocab.digest, store, vocab.digest, remedy)
        load_weights(initial, setup.model)
    else:
        if "embeddings" in config.training.freeze:
            raise UserError(
                f"training.freeze names embeddings, but {config.data.store} has pieces that "
                f"{path} has not, and they must be learned; leave embeddings out"
            )
        if world.is_main:
            say(
                f"the vocabulary has grown from {format_size(initial.vocab)} to "
                f"{format_size(vocab)} pieces; new ones begin as the mean of the others"
            )
        load_grown_weights(initial, setup.model)
    if world.is_main:
        directions = find_direction(initial.config.data), find_direction(config.data)
        if None not in directions and directions[0] != directions[1]:
            say(f"warning: {initial.path} translates {directions[0]}, and this run {directions[1]}")
        digest = initial.sha256[MODEL_FILE]
        say(f"starting from the weights of {initial.path}, update {step:,} (sha256 {digest[:16]})")
