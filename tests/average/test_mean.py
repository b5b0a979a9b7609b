"""The mean is exact to the rounding of fp32, whatever the files hold; the checkpoints taken are those asked for; and
nothing that a person made is lost by it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import CONFIG, STATE, pieces, write
from torch import Tensor
from untrained import make_checkpoint, make_vocab

from nmt.average import curve
from nmt.average.mean import average, averaged_in, is_our_card, marked
from nmt.average.select import best, choose
from nmt.checkpoint import _plain, find_newest, load_weights, open_checkpoint
from nmt.commands.average import main as nmt_average
from nmt.commands.train import main as nmt_train
from nmt.config import (
    DataConfig,
    DecodingConfig,
    EvaluationConfig,
    ModelConfig,
    format_config,
    load_config,
)
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import digest, seal
from nmt.system.run_folder import MODEL_FILE, STATE_FILE, RunFolder

MEAN = "mean"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power does not fail here: what test_files.py shows need not cost seconds for each test."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def state_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / STATE_FILE).read_text())
    return found


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Other tensors in the same checkpoint, sealed."""
    save_file(
        change({name: value.clone() for name, value in load_file(folder / MODEL_FILE).items()}),
        folder / MODEL_FILE,
    )
    seal(folder)


def expected(folders: list[Path], weights: list[float]) -> dict[str, np.ndarray]:
    """By numpy, in float64."""
    files = [load_file(folder / MODEL_FILE) for folder in folders]
    return {
        name: np.average([file[name].double().numpy() for file in files], axis=0, weights=weights)
        for name in files[0]
    }


@pytest.mark.parametrize("weights", [None, [0.1, 0.5, 1.0, 3.0, 7.0]])
def test_the_mean_is_exact(
    weights: list[float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nmt.average.mean.PIECE", 37
    )  # tensors of many pieces, the last one shorter
    folders = [tmp_path / str(seed) for seed in range(5)]
    rng = torch.Generator().manual_seed(1)

    def wide(
        weights: dict[str, Tensor],
    ) -> dict[str, Tensor]:  # magnitudes from 1e-4 to 1e4, of both signs
        return {
            name: (
                torch.randn(value.shape, generator=rng)
                * 10 ** (8 * torch.rand(value.shape, generator=rng) - 4)
            )
            for name, value in weights.items()
        }

    for seed, folder in enumerate(folders):
        write(folder, seed)
        rewrite(folder, wide)
    average(folders, tmp_path / MEAN, weights)
    found = load_file(tmp_path / MEAN / MODEL_FILE)
    for name, value in expected(folders, weights or [1.0] * 5).items():
        assert found[name].dtype == torch.float32
        assert (np.abs(found[name].double().numpy() - value) <= 1e-7 * np.abs(value)).all(), name


def test_of_one_it_is_the_identity_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "a")
    rewrite(
        tmp_path / "a",
        lambda weights: {
            name: value.copysign(torch.tensor(-1.0)) * 0 for name, value in weights.items()
        },
    )  # zeros with a sign
    write(tmp_path / "b")
    for name in "ab":
        average([tmp_path / name], tmp_path / MEAN)
        for tensor, value in load_file(tmp_path / MEAN / MODEL_FILE).items():
            assert (
                value.numpy().tobytes()
                == load_file(tmp_path / name / MODEL_FILE)[tensor].numpy().tobytes()
            )
    assert digest(tmp_path / MEAN / MODEL_FILE) == digest(tmp_path / "b" / MODEL_FILE)


def test_tied_weights_count_once_and_the_mean_translates(tmp_path: Path) -> None:
    models = [write(tmp_path / str(seed), seed) for seed in range(3)]
    average([tmp_path / str(seed) for seed in range(3)], tmp_path / MEAN)
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
    assert state_of(tmp_path / MEAN) == {
        "averaged": ["0", "1", "2"],
        "step": 7,
        "elapsed_s": [2.25] * 3,
    }
    assert not (tmp_path / MEAN / "optimizer.safetensors").exists()


def lacking(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name != "tgt_embedding.weight"}


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "another shape": (
        lambda w: w | {"tgt_embedding.weight": torch.zeros(11, 9)},
        "tgt_embedding.weight",
    ),
    "one too few": (lacking, "tgt_embedding.weight"),
    "one too many": (lambda w: w | {"projection.weight": torch.zeros(11, 8)}, "projection.weight"),
    "integers": (
        lambda w: w | {"tgt_embedding.weight": torch.zeros(11, 8, dtype=torch.int32)},
        "I32",
    ),
    "NaN": (lambda w: w | {"tgt_embedding.weight": torch.full((11, 8), torch.nan)}, "no number"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, told = MISFITS[case]
    for name in "ab":
        write(tmp_path / name)
    rewrite(tmp_path / "b", change)
    with pytest.raises(UserError, match=told) as caught:
        average([tmp_path / "a", tmp_path / "b"], tmp_path / MEAN)
    assert str(tmp_path / "b") in str(caught.value) and "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_models_of_other_shapes_or_pieces_are_refused(tmp_path: Path) -> None:
    """Each is good by itself."""
    vocab = make_vocab(tmp_path)
    shape = ModelConfig(d_model=32, d_ff=48, n_heads=4, n_layers=1)
    for name, other in {
        "a": shape,
        "wider": replace(shape, d_ff=64),
        "untied": replace(shape, tied=False),
    }.items():
        make_checkpoint(tmp_path / name, vocab, other)
    for name, key in {"wider": "d_ff: 48 -> 64", "untied": "tied: True -> False"}.items():
        with pytest.raises(
            UserError, match=rf"{name}: is of another run than .*\(model.{key}\); only one run's"
        ):
            average([tmp_path / "a", tmp_path / name], tmp_path / MEAN)
    write(tmp_path / "c")
    write(tmp_path / "d", vocab=pieces("ghijkl"))
    with pytest.raises(UserError, match="another BPE model"):
        average([tmp_path / "c", tmp_path / "d"], tmp_path / MEAN)
    with pytest.raises(UserError, match="given twice"):
        average([tmp_path / "c", tmp_path / "d" / ".." / "c"], tmp_path / MEAN)


def configure(folder: Path, **changes: Any) -> None:
    """Other settings in the same checkpoint, sealed."""
    config = load_config(str(folder / "config.yaml"))
    (folder / "config.yaml").write_text(format_config(replace(config, **changes)))
    seal(folder)


def test_two_runs_do_not_average(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even of equal shapes and pieces. What may change between two sittings makes no other run."""
    ours, other = run.checkpoint(40), tmp_path / "other"
    shutil.copytree(run.checkpoint(50), other)
    configure(other, seed=2, evaluation=EvaluationConfig(bleu=False))
    assert nmt_average([str(ours), str(other), "-o", str(tmp_path / MEAN)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert (
        len(told) == 1
        and f"{other}: is of another run than {ours} (seed: 1 -> 2; evaluation.bleu: " in told[0]
    )
    assert not (tmp_path / MEAN).exists()
    configure(other, data=DataConfig(src="e\nn" + "x" * 1000))
    with pytest.raises(UserError) as caught:
        average([ours, other], tmp_path / MEAN)
    assert (
        "e\\nnxxx" in str(caught.value)
        and str(caught.value).isprintable()
        and len(str(caught.value)) < 700
    )
    shutil.copy(ours / "config.yaml", other)
    longer = replace(CONFIG.training, steps=200_000)
    configure(
        other, name="renamed", out="elsewhere", training=longer, decoding=DecodingConfig(beam=1)
    )
    average([other, ours], tmp_path / MEAN)
    assert open_checkpoint(tmp_path / MEAN).config.training == longer  # of the newest
    average([tmp_path / MEAN, run.checkpoint(10)], tmp_path / "again")


def test_the_oldest_first_and_by_its_own_folder(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by best or last, which move; each with its own weight."""
    best_one = run.checkpoints / "best"
    best_one.symlink_to("step-0000050")
    average([best_one, run.checkpoint(10), run.checkpoint(30)], tmp_path / MEAN, [6.0, 1.0, 3.0])
    assert state_of(tmp_path / MEAN) == {
        "averaged": ["step-0000010", "step-0000030", "step-0000050"],
        "step": 50,
        "elapsed_s": [180.0, 840.0, 1800.0],
        "weights": [0.1, 0.3, 0.6],
    }
    found = load_file(tmp_path / MEAN / MODEL_FILE)
    for name, value in expected(
        [run.checkpoint(step) for step in (10, 30, 50)], [0.1, 0.3, 0.6]
    ).items():
        assert np.abs(found[name].numpy() - value).max() < 1e-7
    from nmt.average import mean as averaging

    def moved(*_: object) -> object:
        best_one.unlink()
        best_one.symlink_to("step-0000010")
        return mixed(*_)  # type: ignore[arg-type]

    mixed = averaging.mixed
    monkeypatch.setattr(averaging, "mixed", moved)
    average([best_one], tmp_path / "single")
    assert state_of(tmp_path / "single")["averaged"] == ["step-0000050"]
    assert digest(tmp_path / "single" / MODEL_FILE) == digest(run.checkpoint(50) / MODEL_FILE)
    monkeypatch.chdir(run.checkpoint(20))
    average([Path(".")], tmp_path / "here")
    assert state_of(tmp_path / "here")["averaged"] == ["step-0000020"]
    with pytest.raises(UserError, match="given twice"):
        average([run.path, run.checkpoint(50)], tmp_path / MEAN)


@pytest.mark.parametrize("place", ["step-0009999", "step-0000050/mean", "mine", "."])
def test_nothing_of_ours_comes_among_the_checkpoints_of_a_run(
    place: str, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.path.rglob("*"))
    (tmp_path / "link").symlink_to(run.checkpoints)
    for out in (run.checkpoints / place, tmp_path / "link" / place):
        assert nmt_average([str(run.path), "-o", str(out)]) == 2
        told = capsys.readouterr().err
        assert (
            "for the checkpoints of training alone" in told.splitlines()[-1]
            and "verifying" not in told
        )
    assert sorted(run.path.rglob("*")) == before
    average(
        [run.checkpoint(50)], tmp_path / "checkpoints" / MEAN
    )  # a folder of that name that is no run's


def test_it_never_replaces_anything_but_an_average(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for out in ("mine", "mine/thesis.tex", "a"):
        with pytest.raises(UserError, match="is not just an average"):
            average([tmp_path / "a"], tmp_path / out)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    for _ in range(2):
        average([tmp_path / "a"], tmp_path / MEAN)
    open_checkpoint(tmp_path / MEAN)


def test_a_card_is_replaced_until_somebody_edits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a")
    card = tmp_path / MEAN / "README.md"
    average([tmp_path / "a"], tmp_path / MEAN)
    card.write_text(marked("# Title\n\ntext\n"))
    assert averaged_in(tmp_path / MEAN) == ["a"] and open_checkpoint(tmp_path / MEAN).step == 7
    average([tmp_path / "a"], tmp_path / MEAN)
    assert not card.exists()  # nmt-average writes another
    edits = [
        marked("# Title\n").replace("Title", "Titel"),
        marked("text\n") + "mine\n",
        "# My own\n",
        "",
        "\n",
        marked("text\n").replace("\n", "\r\n"),
        marked("text\n").removesuffix("\n"),
    ]
    for text in edits:
        card.write_text(text, newline="")
        assert not is_our_card(card)
        with pytest.raises(UserError, match="README.md: was edited"):
            average([tmp_path / "a"], tmp_path / MEAN)
        assert card.read_bytes() == text.encode()
    card.unlink()
    card.symlink_to(tmp_path / "a" / "config.yaml")
    with pytest.raises(UserError, match="README.md"):
        average([tmp_path / "a"], tmp_path / MEAN)
    card.unlink()
    from nmt.average import mean as averaging

    def edited_meanwhile(path: Path, mix: averaging.Mix) -> None:
        card.write_text("mine")
        (path).write_bytes(b"")

    monkeypatch.setattr(averaging, "_write", edited_meanwhile)
    with pytest.raises(UserError, match="README.md: was edited"):
        average([tmp_path / "a"], tmp_path / MEAN)
    assert card.read_text() == "mine" and open_checkpoint(tmp_path / MEAN)


STATES: dict[str, tuple[dict[str, object], str | None]] = {
    "as before this was kept": ({"averaged": ["a", "b"], "step": 9}, None),
    "with times": ({"averaged": ["a", "b"], "step": 9, "elapsed_s": [1.5, 3]}, None),
    "with weights": (
        {"averaged": ["a", "b"], "step": 9, "elapsed_s": [1.5, 3.0], "weights": [0.25, 0.75]},
        None,
    ),
    "too few times": (
        {"averaged": ["a", "b"], "step": 9, "elapsed_s": [1.5]},
        "elapsed_s has 1 values for 2",
    ),
    "times in words": ({"averaged": ["a"], "step": 9, "elapsed_s": ["long"]}, "elapsed_s"),
    "one time for all": ({"averaged": ["a"], "step": 9, "elapsed_s": 3.0}, "elapsed_s"),
    "weights of none": (
        {"averaged": ["a"], "step": 9, "weights": []},
        "weights has 0 values for 1",
    ),
    "unknown": ({"averaged": ["a"], "step": 9, "why": []}, "why: unknown key"),
    "no step": ({"averaged": ["a"]}, "step: missing"),
}


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_an_average(case: str, tmp_path: Path) -> None:
    state, fault = STATES[case]
    folder = make_checkpoint(tmp_path / "mean", make_vocab(tmp_path))
    (folder / STATE_FILE).write_text(json.dumps(state))
    seal(folder)
    if fault is None:
        assert json.loads(json.dumps(_plain(open_checkpoint(folder).origin))) == state
    else:
        with pytest.raises(UserError, match=fault):
            open_checkpoint(folder)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after 3, 13, 14, 24 and 30 minutes."""
    folder = RunFolder(tmp_path_factory.mktemp("template") / "run")
    folder.checkpoints.mkdir(parents=True)
    write(folder.path.parent / "one")
    for step, minutes in ((10, 3.0), (20, 13.0), (30, 14.0), (40, 24.0), (50, 30.0)):
        write(folder.checkpoint(step), step, replace(STATE, step=step, elapsed_s=60 * minutes))
    return folder.path


@pytest.fixture
def run(template: Path, tmp_path: Path) -> RunFolder:
    """Those, of which four were validated."""
    shutil.copytree(template.parent, tmp_path, dirs_exist_ok=True)
    folder = RunFolder(tmp_path / "run")
    lines = [
        {"kind": "valid", "step": step, "bleu": bleu, "nll": nll}
        for step, bleu, nll in (
            (5, 99.0, 0.1),
            (10, 20.0, 3.0),
            (20, 22.0, 2.5),
            (40, 21.0, 2.0),
            (50, 22.0, 2.2),
        )
    ]
    folder.metrics.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "valid", "st'
    )
    return folder


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ((None, None, None, None), [10, 20, 30, 40, 50]),
        ((2, None, None, None), [40, 50]),
        ((None, 1, None, None), [50]),
        ((None, 2, None, None), [20, 50]),
        ((None, 3, None, None), [20, 40, 50]),
        ((3, None, 12.0, None), []),
        ((2, None, 6.0, None), [40, 50]),
        ((3, None, 6.5, None), [10, 30, 50]),
        ((None, None, None, 0.5), [10, 20, 30, 40, 50]),
        ((2, None, 6.5, 0.5), [30, 50]),
    ],
)
def test_which_checkpoints_are_taken(
    asked: tuple[int | None, int | None, float | None, float | None],
    steps: list[int],
    run: RunFolder,
) -> None:
    n_last, n_best, minutes, decay = asked
    if not steps:
        with pytest.raises(
            UserError, match="has 2 checkpoints that are 12 minutes of training apart, 3 are"
        ):
            choose(run, *asked)
        return
    moments, _ = choose(run, n_last, n_best, minutes, decay)
    assert [moment.step for moment in moments] == steps
    ages = range(len(steps) - 1, -1, -1)
    assert [moment.weight for moment in moments] == [
        1.0 if decay is None else decay**age for age in ages
    ]


def test_the_best_by_likelihood_where_bleu_is_off(run: RunFolder) -> None:
    run.metrics.write_text(run.metrics.read_text().replace('"bleu": 22.0', '"bleu": null'))
    moments, told = best(run, 2)
    assert ([moment.step for moment in moments], told) == ([40, 50], "dev NLL 2.0000, 2.2000")
    with pytest.raises(UserError, match="has 5 checkpoints, of which 4 were validated"):
        best(run, 5)


REFUSED: list[tuple[list[str], str]] = [
    (["--last", "6"], "has 5 checkpoints, 6 are"),
    (["--last", "0"], "--last 0"),
    (["--best", "0"], "--best 0"),
    (["--best", "1", "--last", "1"], "--best and --last"),
    (["--best", "1", "--ema"], "--best and --ema"),
    (["--best", "1", "--curve"], "--best and --curve"),
    (["--every", "0"], "--every 0"),
    (["--every", "nan"], "nan"),
    (["--every", "9"], "5 are asked for"),
    (["--ema", "1"], "--ema 1"),
    (["--ema", "0"], "--ema 0"),
    (["--ema", "1e-320"], "--ema 9.99989e-321: give a decay of at least 0.01"),
    (["--ema", "0.0099"], "--ema 0.0099"),
    (["--curve", "--last", "2"], "--curve and --last"),
    (["--curve", "-o", "x"], "--curve and -o"),
    (["--curve", "0,2"], "--curve 0,2"),
    (["--curve", "1,9"], "has 5 checkpoints, 9 are"),
    (["--curve"], "data.valid"),
    (["../one"], "give -o DIR"),
    (["../one", "-o", "x", "--ema"], "--ema goes with one run"),
    (["../one", "-o", "x", "--curve"], "--curve goes with one run"),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED)
def test_bad_combinations_in_one_line(
    arguments: list[str],
    told: str,
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.path)
    before = sorted(run.path.iterdir())
    assert nmt_average([str(run.path), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and told in captured.err, (
        captured.err
    )
    assert sorted(run.path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments", [["--ema", "runs"], ["--curve", "runs"], ["--every", "often"]]
)
def test_a_run_in_the_wrong_place(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        nmt_average(["x", *arguments])
    assert left.value.code == 2 and "put it first" in capsys.readouterr().err


def test_weights_and_minutes_are_said_and_kept(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nmt_average([str(run.path), "--ema", "0.5", "--last", "2"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "update 40, minute 24.0, weight 0.3333" in said.err
    assert "update 50, minute 30.0, weight 0.6667" in said.err
    assert state_of(run.average) == {
        "averaged": ["step-0000040", "step-0000050"],
        "step": 50,
        "elapsed_s": [1440.0, 1800.0],
        "weights": [1 / 3, 2 / 3],
    }
    found = load_file(run.average / MODEL_FILE)
    for name, value in expected([run.checkpoint(40), run.checkpoint(50)], [0.5, 1.0]).items():
        assert np.abs(found[name].numpy() - value).max() < 1e-7
    assert nmt_average([str(run.path), "--every", "6.5", "--last", "2"]) == 0  # over its own card
    assert state_of(run.average)["elapsed_s"] == [840.0, 1800.0] and is_our_card(
        run.average / "README.md"
    )


@pytest.mark.parametrize("fault", ["cut off", "of another version", "a folder"])
def test_results_that_cannot_be_read_cost_no_average(
    fault: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config.write_text(format_config(CONFIG))
    results = run.path / "results.json"
    if fault == "a folder":
        results.mkdir()
    else:
        results.write_text('[{"when": "20' if fault == "cut off" else '[{"when": "2026-11-21"}]')
    assert nmt_average([str(run.path), "--last", "2"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(told) == 1 and str(results) in told[0] and "without scores" in told[0]
    assert is_our_card(run.average / "README.md") and results.exists()


def test_a_checkpoint_that_is_pruned_meanwhile(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmt.average import mean as averaging

    def pruned(paths: list[Path]) -> object:
        found = [open_checkpoint(path) for path in paths]
        shutil.rmtree(paths[0])
        return found

    monkeypatch.setattr(averaging, "opened", pruned)
    with pytest.raises(UserError, match="step-0000010.*start again"):
        average([run.checkpoint(step) for step in (10, 20)], run.average)
    assert not run.average.exists()


MEMORY = """
import resource, sys
from pathlib import Path
from nmt.average.mean import average

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

folder = Path(sys.argv[1])
average([folder / "0"], folder / "one")  # what Python and torch need anyhow
before = peak()
average(sorted(folder.glob("[0-9]*")), folder / "mean")
print(peak() - before)
"""


def test_twenty_need_less_memory_than_two(tmp_path: Path) -> None:
    """The peak of a process, mapped files and all: twenty models of more than 12 MB, of one file by hard links."""
    shape = ModelConfig(d_model=256, d_ff=1_500, n_heads=4, n_layers=2)
    first = make_checkpoint(tmp_path / "0", make_vocab(tmp_path), shape)
    size = (first / MODEL_FILE).stat().st_size
    for n in range(1, 20):
        shutil.copytree(first, tmp_path / str(n), copy_function=os.link)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (
        size > 1.2e7
        and len(json.loads((tmp_path / "mean" / STATE_FILE).read_text())["averaged"]) == 20
    )
    assert int(done.stdout) < size, "twenty took as much as another model"
    assert digest(tmp_path / "mean" / MODEL_FILE) == digest(
        tmp_path / "one" / MODEL_FILE
    )  # of equals the same


def test_the_curve(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "training.checkpoint_every=20",
        "training.steps=60",
        "optimizer.warmup_steps=10",
        "model.dropout=0",
        "model.d_model=32",
        "decoding.min_length=6",
    ]
    assert nmt_train(["--config", str(toy), *options]) == 0
    run = RunFolder(tmp_path / "run")
    shutil.rmtree(tmp_path / "corpus")  # so that no test set can be read
    there = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert nmt_average([str(run.path), "--curve"]) == 0
    out = capsys.readouterr().out
    record = json.loads((run.path / "averaging.json").read_text())
    points = {point["n"]: point for point in record["points"]}
    assert list(points) == [1, 2, 3] and points[3]["steps"] == [20, 40, 60]
    assert f"best: N = {record['best_n']};" in out and out.count("\n") == 6 and out.count("*") == 1
    assert points[record["best_n"]]["bleu"] == max(point["bleu"] for point in points.values())
    texts = [(tmp_path / "store" / f"valid.{side}.txt").read_bytes() for side in ("src", "tgt")]
    assert record["dev_set"]["lines"] == 20 == texts[0].count(b"\n")
    assert [record["dev_set"][f"{side}_sha256"] for side in ("src", "ref")] == [
        hashlib.sha256(text).hexdigest() for text in texts
    ]
    # N = 1 is what validation said of the newest checkpoint; N = 3 what it says of the average as a folder
    valid = [json.loads(line) for line in run.metrics.read_text().splitlines()][-1]
    assert (valid["step"], valid["bleu"], valid["nll"]) == (
        60,
        points[1]["bleu"],
        round(points[1]["nll"], 5),
    )
    assert (
        len({point["bleu"] for point in points.values()} - {0.0}) == 3
    )  # not equal for want of anything to count
    assert valid["signature"] == record["signature"]
    assert nmt_average([str(run.path), "--last", "3"]) == 0
    (dev := tmp_path / "dev").mkdir()
    for side, text in zip(("src", "ref"), texts, strict=True):
        (dev / side).write_bytes(text)
    from nmt.commands.eval import main as nmt_eval

    assert (
        nmt_eval(
            [
                str(run.average),
                "--src",
                str(dev / "src"),
                "--ref",
                str(dev / "ref"),
                "--json",
                str(dev / "json"),
            ]
        )
        == 0
    )
    assert json.loads((dev / "json").read_text())["scores"][0]["value"] == points[3]["bleu"]
    shutil.rmtree(run.average)
    shutil.rmtree(dev)
    (run.path / "results.json").unlink()  # of nmt-eval

    # interrupted, it leaves what was there
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = (run.path / "averaging.json").read_bytes()
    monkeypatch.setattr(curve, "validate", interrupted)
    assert nmt_average([str(run.path), "--curve", "1,2", "--ema"]) == 130
    monkeypatch.undo()
    assert (run.path / "averaging.json").read_bytes() == before
    assert {path for path in tmp_path.rglob("*")} == {*there, run.path / "averaging.json"}
    capsys.readouterr()
    assert nmt_average([str(run.path), "--curve", "2", "--ema", "0.5", "--every", "0.00001"]) == 0
    record = json.loads((run.path / "averaging.json").read_text())
    assert (record["decay"], record["choice"], record["best_n"]) == (
        0.5,
        "the last N, 1e-05 minutes apart",
        2,
    )
    before = (run.path / "averaging.json").read_bytes()
    for name in ("valid.tgt.txt", "valid.src.txt", "valid.src.ids.npy", "valid.tgt.offsets.npy"):
        original = (tmp_path / "store" / name).read_bytes()
        for data in (original[:-9], original[:-9] + bytes(each ^ 1 for each in original[-9:])):
            (tmp_path / "store" / name).write_bytes(data)
            capsys.readouterr()
            assert nmt_average([str(run.path), "--curve", "1"]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert (
                len(lines) == 1
                and str(tmp_path / "store" / name) in lines[0]
                and "nmt-prepare" in lines[0]
            )
        (tmp_path / "store" / name).write_bytes(original)
    assert (run.path / "averaging.json").read_bytes() == before
    shutil.move(tmp_path / "store", tmp_path / "gone")
    capsys.readouterr()
    assert nmt_average([str(run.path), "--curve", "1"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and str(tmp_path / "store") in told[0] and "nmt-prepare" in told[0]
    assert find_newest(run) is not None
