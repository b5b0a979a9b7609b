"""The mean is exact to the rounding of fp32, and nothing that a person made is lost by it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from pytest import MonkeyPatch, mark, raises
from safetensors.torch import load_file, save_file
from support.capture import Capture, read_errors, read_stderr
from support.in_process import refuse
from support.saved_run import compute_mean, copy_template, make_template, read_state  # noqa: F401
from support.untrained import change_config
from test_checkpoint import CONFIG, make_letters, write

from nmt.average import mean as averaging
from nmt.average.mean import average_checkpoints, open_all
from nmt.checkpoint.checkpoint import COMMON_FILES, load_weights
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.average import main as nmt_average
from nmt.config import DataConfig, DecodingConfig, EvaluationConfig
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import digest_file, remove_folder, seal
from nmt.system.run_folder import MANIFEST_FILE, MODEL_FILE, VOCAB_FILE, RunFolder
from nmt.system.tensor_files import Tensors

MEAN = "mean"


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Other tensors in the same checkpoint, sealed."""
    weights = {name: value.clone() for name, value in load_file(folder / MODEL_FILE).items()}
    save_file(change(weights), folder / MODEL_FILE)
    seal(folder)


def test_the_mean_is_exact(tmp_path: Path) -> None:
    folders = [tmp_path / str(seed) for seed in range(5)]
    rng = torch.Generator().manual_seed(1)

    def widen(tensors: Tensors) -> Tensors:
        """Magnitudes from 1e-4 to 1e4, of both signs."""
        wide = {}
        for name, value in tensors.items():
            magnitudes = 10 ** (8 * torch.rand(value.shape, generator=rng) - 4)
            wide[name] = magnitudes * torch.randn(value.shape, generator=rng)
        return wide

    write(folders[0])
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    for folder in folders:
        rewrite(folder, widen)
    average_checkpoints(folders, tmp_path / MEAN)
    found = load_file(tmp_path / MEAN / MODEL_FILE)
    for name, value in compute_mean(folders).items():
        assert found[name].dtype == torch.float32
        assert (np.abs(found[name].double().numpy() - value) <= 1e-7 * np.abs(value)).all(), name


def test_of_one_it_is_the_identity_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "a")

    def make_negative_zeros(weights: Tensors) -> Tensors:
        minus_one = torch.tensor(-1.0)
        return {name: value.copysign(minus_one) * 0 for name, value in weights.items()}

    rewrite(tmp_path / "a", make_negative_zeros)
    write(tmp_path / "b")
    for name in "ab":
        average_checkpoints([tmp_path / name], tmp_path / MEAN)
        for tensor, value in load_file(tmp_path / MEAN / MODEL_FILE).items():
            assert (
                value.numpy().tobytes()
                == load_file(tmp_path / name / MODEL_FILE)[tensor].numpy().tobytes()
            )
    assert digest_file(tmp_path / MEAN / MODEL_FILE) == digest_file(tmp_path / "b" / MODEL_FILE)


def test_tied_weights_count_once_and_the_mean_translates(tmp_path: Path) -> None:
    models = [write(tmp_path / str(seed), seed) for seed in range(3)]
    average_checkpoints([tmp_path / str(seed) for seed in range(3)], tmp_path / MEAN)
    names = set(load_file(tmp_path / MEAN / MODEL_FILE))
    assert (
        names == {name for name, _ in models[0].named_parameters()}
        and "projection.weight" not in names
    )
    checkpoint = open_checkpoint(tmp_path / MEAN)
    model = Transformer(checkpoint.config.model, 11)
    load_weights(checkpoint, model)
    mean = torch.stack([m.projection.weight.detach().double() for m in models]).mean(0)
    assert (model.projection.weight.double() - mean).abs().max() < 1e-7
    assert model.projection.weight is model.tgt_embedding.weight
    assert read_state(tmp_path / MEAN) == {
        "averaged": ["0", "1", "2"],
        "step": 7,
        "elapsed_s": [2.25] * 3,
    }
    assert not (tmp_path / MEAN / "optimizer.safetensors").exists()


MISFITS = {
    "another shape": ({"tgt_embedding.weight": torch.zeros(11, 9)}, "tgt_embedding.weight"),
    "one too many": ({"projection.weight": torch.zeros(11, 8)}, "projection.weight"),
    "NaN": ({"tgt_embedding.weight": torch.full((11, 8), torch.nan)}, "NaN"),
}


@mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, complaint = MISFITS[case]
    for name in "ab":
        write(tmp_path / name)
    rewrite(tmp_path / "b", lambda weights: weights | changes)
    with raises(UserError, match=complaint) as caught:
        average_checkpoints([tmp_path / "a", tmp_path / "b"], tmp_path / MEAN)
    assert str(tmp_path / "b") in str(caught.value) and "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_other_pieces_and_the_same_checkpoint_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "c")
    write(tmp_path / "d", vocab=make_letters("ghijkl"))
    with raises(UserError, match="its BPE model is .* average only"):
        average_checkpoints([tmp_path / "c", tmp_path / "d"], tmp_path / MEAN)
    with raises(UserError, match="given twice"):
        average_checkpoints([tmp_path / "c", tmp_path / "d" / ".." / "c"], tmp_path / MEAN)


def test_two_runs_do_not_average(run: RunFolder, tmp_path: Path, capsys: Capture) -> None:
    """Not even of equal shapes and pieces. What may change between two sittings makes no other run."""
    ours, other = run.checkpoint(40), tmp_path / "other"
    shutil.copytree(run.checkpoint(50), other)
    change_config(other, seed=2, evaluation=EvaluationConfig(bleu=False))
    assert nmt_average([str(ours), str(other), "-o", str(tmp_path / MEAN)]) == 2
    told = read_errors(capsys)
    assert (
        len(told) == 1
        and f"{other}: belongs to another run than {ours} (seed: 1 -> 2; evaluation.bleu: "
        in told[0]
    )
    assert not (tmp_path / MEAN).exists()
    change_config(other, data=DataConfig(src="e\nn" + "x" * 1000))
    with raises(UserError) as caught:
        average_checkpoints([ours, other], tmp_path / MEAN)
    assert (
        "e<U+000A>nxxx" in str(caught.value)
        and str(caught.value).isprintable()
        and len(str(caught.value)) < 700
    )
    shutil.copy(ours / "config.yaml", other)
    longer = replace(CONFIG.training, steps=200_000)
    change_config(
        other, name="renamed", out="elsewhere", training=longer, decoding=DecodingConfig(beam=1)
    )
    average_checkpoints([other, ours], tmp_path / MEAN)
    assert open_checkpoint(tmp_path / MEAN).config.training == longer  # of the newest
    average_checkpoints([tmp_path / MEAN, run.checkpoint(10)], tmp_path / "again")


def test_the_oldest_first_and_by_its_own_folder(
    run: RunFolder, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Not by best or last, which move."""
    best_one = run.checkpoints / "best"
    best_one.symlink_to("step-0000050")
    average_checkpoints([best_one, run.checkpoint(10), run.checkpoint(30)], tmp_path / MEAN)
    assert read_state(tmp_path / MEAN) == {
        "averaged": ["step-0000010", "step-0000030", "step-0000050"],
        "step": 50,
        "elapsed_s": [180.0, 840.0, 1800.0],
    }
    found = load_file(tmp_path / MEAN / MODEL_FILE)
    for name, value in compute_mean([run.checkpoint(step) for step in (10, 30, 50)]).items():
        assert np.abs(found[name].numpy() - value).max() < 1e-7

    monkeypatch.chdir(run.checkpoint(20))
    average_checkpoints([Path(".")], tmp_path / "here")
    assert read_state(tmp_path / "here")["averaged"] == ["step-0000020"]
    with raises(UserError, match="given twice"):
        average_checkpoints([run.path, run.checkpoint(50)], tmp_path / MEAN)


@mark.parametrize("place", ["step-0009999", "step-0000050/mean", "."])
def test_nothing_of_ours_comes_among_the_checkpoints_of_a_run(
    place: str, run: RunFolder, tmp_path: Path, capsys: Capture
) -> None:
    before = sorted(run.path.rglob("*"))
    (tmp_path / "link").symlink_to(run.checkpoints)
    for out in (run.checkpoints / place, tmp_path / "link" / place):
        assert nmt_average([str(run.path), "-o", str(out)]) == 2
        told = read_stderr(capsys)
        assert (
            "is reserved for training checkpoints" in told.splitlines()[-1]
            and "verifying" not in told
        )
    assert sorted(run.path.rglob("*")) == before
    # a folder of that name that belongs to no run
    average_checkpoints([run.checkpoint(50)], tmp_path / "checkpoints" / MEAN)


def test_it_replaces_an_average_and_no_checkpoint(tmp_path: Path) -> None:
    """What may be replaced at all is in tests/system/test_output_folder.py."""
    write(tmp_path / "a")
    write(tmp_path / "b")
    for _ in range(2):
        average_checkpoints([tmp_path / "a"], tmp_path / MEAN)
    names = {path.name for path in (tmp_path / MEAN).iterdir()}
    assert names == {MANIFEST_FILE, *COMMON_FILES, VOCAB_FILE}
    with raises(UserError, match="contains something other than an average.*-o DIR; no"):
        average_checkpoints([tmp_path / "a"], tmp_path / "b")
    with raises(UserError, match="contains the input"):
        average_checkpoints([tmp_path / "a"], tmp_path / "a", is_forced=True)
    assert open_checkpoint(tmp_path / "a").step and open_checkpoint(tmp_path / "b").step


def test_a_checkpoint_that_is_pruned_meanwhile(
    run: RunFolder, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    average_checkpoints([run.checkpoint(10)], run.average)
    earlier = digest_file(run.average / MODEL_FILE)

    def prune(paths: list[Path]) -> object:
        remove_folder(paths[0])
        return open_all(paths)

    monkeypatch.setattr(averaging, "open_all", prune)
    line = refuse(capsys, nmt_average, run.path, "--last", "2")
    assert "meanwhile, as training does with its oldest; run" in line
    assert digest_file(run.average / MODEL_FILE) == earlier
