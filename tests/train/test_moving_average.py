"""The moving average of the weights: by another way of computing it, and through stops of a run."""

from pathlib import Path

import torch
from pytest import approx, raises
from support.finished_run import list_differing, read_lines, read_tensors, train_toy
from support.processor import ALONE, CPU
from torch import nn

from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.config import RunConfig
from nmt.data.vocab import Vocab
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.run_folder import RunFolder
from nmt.train.moving_average import MovingAverage
from nmt.train.shutdown import StopRequest
from nmt.train.validate import compute_dev_nll, open_dev
from nmt.translate.translator import make_translator

SHORT = ["training.steps=6", "training.validate_every=2", "evaluation.bleu=false"]


def train(toy: Path, name: str, *settings: str) -> RunConfig:
    return train_toy(toy, *SHORT, f"out={toy.parent}/{name}", *settings)


def test_the_weights_come_back_even_after_an_error() -> None:
    layer = nn.Linear(3, 3)
    average = MovingAverage(dict(layer.named_parameters()), 0.9)
    begun = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1)
    weights = layer.weight.detach().clone()
    with raises(RuntimeError), average.in_place_of_weights():
        assert torch.equal(layer.weight, begun)
        raise RuntimeError
    assert torch.equal(layer.weight, weights) and torch.equal(average.averages["weight"], begun)


def test_a_run_trains_as_without_and_checkpoints_have_both(toy: Path) -> None:
    every = "training.checkpoint_every=1"
    plain = train(toy, "plain", every)
    config = train(toy, "averaged", every, "training.ema=0.35")

    # The weights after each update are those of the run without an average.
    torch.manual_seed(config.seed)
    vocab = Vocab.load(config.folder / "vocab.model")
    start = Transformer(config.model, vocab.size)
    averages = {name: p.detach().double() for name, p in start.named_parameters()}
    for step in range(1, 7):
        weights = read_tensors(plain.folder, step, "model")
        moments = read_tensors(config.folder, step, "optimizer")
        decay = min(0.35, (step + 1) / (step + 10))  # 0.35 from update 4 on
        found = read_tensors(config.folder, step, "model")
        for name, weight in weights.items():
            assert torch.equal(moments[f"weight.{name}"], weight)
            averages[name] = decay * averages[name] + (1 - decay) * weight.double()
            torch.testing.assert_close(found[name].double(), averages[name], rtol=1e-5, atol=1e-6)

    # Validation scores what a checkpoint holds.
    checkpoint = open_checkpoint(RunFolder(config.folder).checkpoint(4))
    translator = make_translator(checkpoint, CPU, config.decoding)
    dev = open_dev(Path(config.data.store), vocab)
    world = ALONE
    nll = compute_dev_nll(translator.model, dev.store, 90, world, StopRequest())
    (logged,) = [line["nll"] for line in read_lines(config.folder, "valid") if line["step"] == 4]
    assert nll is not None and nll == approx(logged, abs=1e-4)


def test_six_updates_are_three_a_stop_and_three_more(toy: Path) -> None:
    settings = ["training.ema=0.35", "optimizer.weight_decay=0.1"]
    whole = train(toy, "whole", *settings)
    train(toy, "parts", *settings, "training.steps=3")
    parts = train(toy, "parts", *settings)
    assert list_differing(read_tensors(whole.folder, 6), read_tensors(parts.folder, 6)) == []


def test_an_average_is_of_a_whole_run(toy: Path) -> None:
    train(toy, "begun", "training.steps=1")
    with raises(UserError, match=r"training\.ema: None -> 0\.9"):
        train(toy, "begun", "training.ema=0.9")
    with raises(UserError, match=r"training\.ema is 1; it must be between 0 and 1"):
        train(toy, "begun", "training.ema=1")
