"""Training that begins with the weights of another run: only those and the vocabulary are taken."""

import shutil
from pathlib import Path

import torch
from pytest import fixture, mark
from safetensors.torch import load_file
from support.capture import Capture, read_errors, read_stderr
from support.finished_run import list_differing, read_tensors
from support.in_process import succeed
from support.text_lines import read_text_lines
from support.toy_corpus import write_toy

from nmt.commands.average import main as nmt_average
from nmt.commands.train import main as nmt_train
from nmt.config_files import load_recorded_config
from nmt.data.vocab import Vocab
from nmt.system.files import read_json
from nmt.system.run_folder import RunFolder


@fixture(scope="module")
def ground(module_path: Path) -> Path:
    """A folder with a toy config and its run of 20 updates."""
    folder = module_path
    config = write_toy(folder)
    succeed(nmt_train, "--config", config, "training.checkpoint_every=10")
    succeed(nmt_average, folder / "run", "--last", "2")
    return folder


def start(ground: Path, out: Path, *settings: str) -> int:
    config = ["--config", str(ground / "toy.yaml"), f"out={out}", f"data.store={out}-store"]
    return nmt_train([*config, "training.checkpoint_every=1", "evaluation.bleu=false", *settings])


def other_text(ground: Path, folder: Path) -> str:
    """Overrides that take other training text: the first pairs, of which a BPE would differ."""
    for language in ("en", "de"):
        lines = read_text_lines(ground / "corpus" / f"train.{language}")[:50]
        (folder / f"part.{language}").write_text("\n".join(lines) + "\n")
    return f"data.train=[{{src: {folder}/part.en, tgt: {folder}/part.de}}]"


@mark.parametrize("source", ["run", "run/average", "run/checkpoints/step-0000010"])
def test_the_first_update_begins_with_the_given_weights(
    source: str, ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "tuned"
    text = other_text(ground, tmp_path)
    # at a rate of zero, weights and their average stay what they began with
    settings = ["optimizer.scale=1e-30", "training.steps=1", "training.ema=0.5", text]
    assert start(ground, out, f"training.init_from={ground / source}", *settings) == 0
    folder = ground / source
    if source == "run":
        folder = RunFolder(folder).checkpoint(20)
    given = load_file(folder / "model.safetensors")
    assert list_differing(read_tensors(out, 1, "model"), given) == []
    assert f"starting from the weights of {folder}" in read_stderr(capsys)
    vocab = (ground / "run" / "vocab.model").read_bytes()
    assert (out / "vocab.model").read_bytes() == vocab


def test_a_stop_continues_exactly_and_does_not_start_again(ground: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ground / "run" / "average", source)
    init = f"training.init_from={source}"
    assert start(ground, tmp_path / "whole", init, "training.steps=6") == 0
    assert start(ground, tmp_path / "parts", init, "training.steps=3") == 0
    shutil.rmtree(source)  # no longer needed
    assert start(ground, tmp_path / "parts", init, "training.steps=6") == 0
    whole, parts = (read_tensors(tmp_path / name, 6) for name in ("whole", "parts"))
    assert list_differing(whole, parts) == []


def test_frozen_parts_keep_their_weights(ground: Path, tmp_path: Path) -> None:
    init = f"training.init_from={ground}/run/average"
    given = load_file(ground / "run" / "average" / "model.safetensors")
    for part in ("embeddings", "encoder", "decoder"):
        out = tmp_path / part
        settings = [init, f"training.freeze=[{part}]", "optimizer.weight_decay=0.5"]
        assert start(ground, out, *settings, "training.steps=3") == 0
        changed = list_differing(given, read_tensors(out, 3, "model"))
        prefix = "tgt_embedding" if part == "embeddings" else part
        assert changed == [name for name in given if not name.startswith(prefix)]


def test_what_has_no_weights_may_differ(ground: Path, tmp_path: Path) -> None:
    settings = [f"training.init_from={ground}/run", "training.steps=1", "optimizer.scale=1e-30"]
    settings += ["model.dropout=0.3", "model.attention_dropout=0.1", "model.ffn_dropout=0.1"]
    out = tmp_path / "tuned"
    assert start(ground, out, *settings, "model.max_positions=300") == 0
    given = read_tensors(ground / "run", 20, "model")
    assert list_differing(read_tensors(out, 1, "model"), given) == []


@mark.parametrize(
    "settings, expected",
    [
        (["training.init_from=nowhere"], "training.init_from: nowhere: not found"),
        (["training.init_from=RUN", "model.n_layers=2"], "model.n_layers: 1 -> 2"),
        (["training.init_from=RUN", "model.norm=pre"], "model.norm: post -> pre"),
        (
            ["training.init_from=RUN", "model.positions=learned", "model.max_positions=300"],
            "model.max_positions: 1024 -> 300",
        ),
        (["training.freeze=[encoder,decoder,embeddings]"], "nothing would be trained"),
        (["training.freeze=[head]"], "training.freeze"),
    ],
)
def test_what_cannot_be_started_from_is_one_line(
    settings: list[str],
    expected: str,
    ground: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    settings = [setting.replace("RUN", str(ground / "run")) for setting in settings]
    assert start(ground, tmp_path / "out", *settings, "training.steps=1") == 2
    *_, last = read_errors(capsys)
    assert last.startswith("nmt-train: error: ") and expected in last
    assert list(tmp_path.iterdir()) == []  # neither a run folder nor a store


@mark.parametrize("is_tied", [True, False])
def test_further_pieces_begin_as_the_mean_of_the_others(
    is_tied: bool, ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    shape = [f"model.tied={str(is_tied).lower()}"]
    assert start(ground, tmp_path / "old", *shape, "training.steps=2") == 0
    settings = [f"training.init_from={tmp_path}/old", *shape]
    settings += ["data.train=[{src: train.en, tgt: train.de, tag: <bt>}]"]
    settings += ["vocab.user_symbols=[<url>]", "optimizer.scale=1e-30", "training.steps=1"]
    assert start(ground, tmp_path / "new", *settings) == 0
    assert "has grown from 80 to 82 pieces" in read_stderr(capsys)
    assert Vocab.load(tmp_path / "new" / "vocab.model").pieces([80, 81]) == ["<url>", "<bt>"]

    given = read_tensors(tmp_path / "old", 2, "model")
    found = read_tensors(tmp_path / "new", 1, "model")
    tables = [name for name in given if given[name].shape != found[name].shape]
    assert len(tables) == (1 if is_tied else 3)
    for name in given:
        n_rows = len(given[name])
        assert torch.equal(found[name][:n_rows], given[name])
    for name in tables:
        expected = given[name].mean(0).expand(2, -1)
        torch.testing.assert_close(found[name][80:], expected)

    frozen = [*settings, "training.freeze=[embeddings]"]
    assert start(ground, tmp_path / "frozen", *frozen) == 2
    assert "leave embeddings out" in read_stderr(capsys)


def test_a_run_continues_another_with_the_same_store(ground: Path, tmp_path: Path) -> None:
    own = [f"training.init_from={ground}/run", f"data.store={ground}/store", "training.steps=1"]
    assert start(ground, tmp_path / "further", *own) == 0


def test_a_store_of_another_vocabulary_is_refused(
    ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    init = f"training.init_from={ground}/run"
    other = tmp_path / "other"
    assert start(ground, other, other_text(ground, tmp_path), "training.steps=1") == 0
    model = f"vocab.model={other}/vocab.model"
    out = tmp_path / "out"
    assert start(ground, out, init, model, "training.steps=1") == 2
    assert "its BPE model is" in read_stderr(capsys)
    # nmt-launch reads the exit code there; nothing else is left, and the next command may differ
    assert read_json(out / "status.json")["exit_code"] == 2
    assert not (out / "config.yaml").exists()
    assert start(ground, out, model, "seed=9", "training.steps=1") == 0
    assert load_recorded_config(out / "config.yaml").seed == 9
