"""Checkpoint folders: what goes in comes out, what is damaged is named."""

import contextlib
import io
import json
import math
import os
from pathlib import Path

import sentencepiece
import torch
from pytest import MonkeyPatch, mark, raises
from safetensors.torch import load_file, save_file

import nmt.api
from nmt.checkpoint.checkpoint import (
    Average,
    TrainState,
    Window,
    load_weights,
    read_origin,
    save_checkpoint,
)
from nmt.checkpoint.run_checkpoints import find_newest, open_checkpoint
from nmt.config import ModelConfig, RunConfig
from nmt.data.plan import Cursor
from nmt.data.vocab import Vocab
from nmt.model.transformer import Transformer
from nmt.system import files
from nmt.system.errors import Failure, UserError
from nmt.system.files import remove_leftovers, seal
from nmt.system.run_folder import MODEL_FILE, STATE_FILE, RunFolder
from nmt.train.optimizer import Adam, load_optimizer, make_optimizer, take_snapshot

CONFIG = RunConfig(model=ModelConfig(d_model=8, d_ff=12, n_heads=2, n_layers=1))
STATE = TrainState(
    step=7,
    cursor=Cursor(2, 3),
    tokens_seen=99,
    best=1.5,
    best_step=5,
    elapsed_s=2.25,
    metrics_bytes=10,
    window=Window(1.5, 1.25, 9),
)
V = 11


def make_letters(letters: str) -> Vocab:
    """Make a vocabulary of V pieces: four marks, the space and six letters."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(letters)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=V,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    return Vocab(model.getvalue())


VOCAB = make_letters("abcdef")


def make_trained(seed: int) -> tuple[Transformer, Adam]:
    torch.manual_seed(seed)
    model = Transformer(CONFIG.model, V)
    optimizer = make_optimizer(model, CONFIG.optimizer)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return model, optimizer


def write(
    path: Path, seed: int = 1, state: TrainState = STATE, vocab: Vocab = VOCAB
) -> Transformer:
    model, optimizer = make_trained(seed)
    save_checkpoint(path, take_snapshot(model, optimizer), state, CONFIG, vocab)
    return model


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    model, optimizer = make_trained(1)
    save_checkpoint(tmp_path / "c", take_snapshot(model, optimizer), STATE, CONFIG, VOCAB)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert (checkpoint.config, checkpoint.vocab.src.model) == (CONFIG, VOCAB.model)
    other, other_optimizer = make_trained(2)
    load_weights(checkpoint, other)
    assert load_optimizer(checkpoint, other, other_optimizer) == STATE
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][key]) and value.abs().max() > 0


@mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_refused_by_name(value: float, tmp_path: Path) -> None:
    """A search may never meet it, or only in what it then drops as improbable."""
    model, optimizer = make_trained(1)
    model.tgt_embedding.weight.data[4, 3] = value
    snapshot = take_snapshot(model, optimizer)
    save_checkpoint(tmp_path / "c", snapshot, STATE, CONFIG, VOCAB)
    with raises(
        UserError, match=r"model.safetensors: tensor tgt_embedding.weight has a weight that is NaN"
    ):
        nmt.api.load(tmp_path / "c")


class Killed(BaseException):
    pass


def test_a_kill_while_a_checkpoint_is_written_again(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Before each change beside it, and after all: the old one or the new is complete."""
    path = tmp_path / "step-7"
    digests = []
    for seed in (1, 2):
        write(tmp_path / f"expected-{seed}", seed)
        digests.append(open_checkpoint(tmp_path / f"expected-{seed}").sha256)
    found = []
    for n_changes in range(6):
        write(path, seed=1)
        changes: list[str] = []

        def stop(what: str, changed: Path) -> None:
            if changed.parent == tmp_path and what != "fsync":
                if len(changes) == n_changes:  # noqa: B023
                    raise Killed
                changes.append(what)  # noqa: B023

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(files, "on_change", stop)
            write(path, seed=2)
        remove_leftovers(tmp_path)
        found.append(1 + digests.index(open_checkpoint(path).sha256))
    assert changes == ["write", "rename", "rename", "remove", "remove"]  # the lock, first and last
    assert found == [1, 1, 1, 2, 2, 2]
    assert len(os.listdir(tmp_path)) == 3


@mark.parametrize(
    "name", [MODEL_FILE, "optimizer.safetensors", "state.json", "config.yaml", "vocab.model"]
)
@mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_named(name: str, damage: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    path = run.checkpoint(STATE.step)
    write(path)
    file = path / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-1])
    if damage == "flip" and name == "optimizer.safetensors":
        open_checkpoint(path)  # the moments are read by trainings alone
        with raises(Failure, match=name):
            find_newest(run, CONFIG)
        return
    with raises(UserError, match=name):
        open_checkpoint(path)


@mark.parametrize(
    "change, complaint",
    [
        (
            lambda w: w.pop("decoder.0.feed_forward.inner.bias"),
            "tensor decoder.0.feed_forward.inner.bias is missing",
        ),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected tensor extra"),
        (
            lambda w: w.update({"decoder.0.feed_forward.inner.bias": torch.zeros(3)}),
            r"has shape \[3\]",
        ),
        (
            lambda w: w.update({name: value.bfloat16() for name, value in w.items()}),
            "has type BF16 instead of F32",
        ),
    ],
)
def test_weights_that_do_not_belong_to_the_config_are_refused(
    change: object, complaint: str, tmp_path: Path
) -> None:
    write(tmp_path / "c")
    weights = {
        name: value.clone() for name, value in load_file(tmp_path / "c" / MODEL_FILE).items()
    }
    assert callable(change)
    change(weights)
    save_file(weights, tmp_path / "c" / MODEL_FILE)
    seal(tmp_path / "c")
    with raises(UserError, match=complaint):
        open_checkpoint(tmp_path / "c")


def test_a_checkpoint_from_before_a_key_existed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("  attention_bias: false\n", ""))
    seal(tmp_path)
    assert path.read_text() != text and open_checkpoint(tmp_path).config == CONFIG


STATES: dict[str, tuple[dict[str, object], Average | str]] = {
    "of averages": (
        {"averaged": ["a", "b"], "step": 9},
        Average(["a", "b"], 9),
    ),
    "with times": (
        {"averaged": ["a", "b"], "step": 9, "elapsed_s": [1.5, 3]},
        Average(["a", "b"], 9, [1.5, 3.0]),
    ),
    "too few times": (
        {"averaged": ["a", "b"], "step": 9, "elapsed_s": [1.5]},
        "elapsed_s has 1 values for 2",
    ),
    "times in words": ({"averaged": ["a"], "step": 9, "elapsed_s": ["long"]}, "elapsed_s"),
    "one time for all": ({"averaged": ["a"], "step": 9, "elapsed_s": 3.0}, "elapsed_s"),
    "unknown": (
        {"averaged": ["a"], "step": 9, "why": []},
        "why: unknown key; damaged, or of another version of nmt; commits 5f9c7938 and feddc889 read",
    ),
    "no step": ({"averaged": ["a"]}, "step: is missing"),
}


@mark.parametrize("case", STATES)
def test_the_state_of_an_average(case: str, tmp_path: Path) -> None:
    state, expected = STATES[case]
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    if isinstance(expected, Average):
        assert read_origin(tmp_path) == expected
    else:
        with raises(UserError, match=expected):
            read_origin(tmp_path)
