"""A run is put beside runs of the same recipe: honest ones with other seeds are within, damaged ones
below.

The band is checked against printed tables of Student's t and against draws. The trainings are toys
whose settings claim the same while the code does something else; `make soak` trains the demo itself.
"""

import importlib.util
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.finished_run import read_lines
from support.soaking import IS_SOAK, Ground, make_ground

import nmt.train.loop
import nmt.train.setup
import nmt.train.update
from nmt.commands.train import main
from nmt.config import find_shipped_configs, list_differences, load_config
from nmt.corpus.ledger import read_ledger
from nmt.system.errors import UserError
from nmt.system.records import read_record
from nmt.train import reference_curve
from nmt.train.events import ValidEvent
from nmt.train.reference_curve import (
    IGNORED_KEYS,
    Band,
    ReferenceCurve,
    find_bleu_band,
    find_nll_band,
    read_reference,
)

Capture = pytest.CaptureFixture[str]
SHIPPED = sorted((find_shipped_configs() / "references").glob("*.json"))
SETTINGS = (
    "training.steps=60",
    "training.src_tokens=600",
    "training.tgt_tokens=600",
    "training.micro_tokens=600",
    "training.validate_every=20",
    "training.checkpoint_every=null",
    "evaluation.sentences=null",
    "model.d_model=32",
    "model.d_ff=64",
    "model.norm=pre",
    "model.dropout=0.0",
)


def load_script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "make_reference_curve.py"
    spec = importlib.util.spec_from_file_location("make_reference_curve", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the band ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, near, t",  # t: printed tables, two-sided 1 %
    [
        ([40.0, 42.0, 44.0], 1, 9.925),
        ([40.0, 42.0, 44.0], 2, 4.604),
        ([40.0, 42.0, 44.0], 3, 3.707),
        ([40.0, 42.0], 3, 5.841),
    ],
)
def test_the_band_is_students_prediction_interval(values: list[float], near: int, t: float) -> None:
    band = find_bleu_band(values, [values] * near)
    half = t * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    assert band.low == pytest.approx(42 - half if len(values) == 3 else 41 - half, abs=0.01)
    assert band.high == pytest.approx(min(100, statistics.fmean(values) + half), abs=0.01)
    logs = find_nll_band(
        [math.exp(x / 10) for x in values], [[math.exp(x / 10) for x in values]] * near
    )
    assert math.log(logs.low) * 10 == pytest.approx(band.low, abs=0.01)


def test_runs_that_agree_by_chance_leave_room_for_rounding() -> None:
    band = find_nll_band([2.0, 2.0], [[2.0, 2.0]] * 3)
    assert band.low < 1.97 and band.high > 2.03


def test_a_band_knows_which_side_is_worse() -> None:
    band = Band(1.0, 2.0)
    for value, of_nll, of_bleu in [
        (0.9, "above", "below"),
        (1.0, "within", "within"),
        (2.0, "within", "within"),
        (2.1, "below", "above"),
        (math.nan, "below", "below"),
    ]:
        assert band.judge(value, is_lower_better=True) == of_nll
        assert band.judge(value, is_lower_better=False) == of_bleu


# ---- where it applies ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_reference_has_the_settings_of_its_config(path: Path) -> None:
    curve = read_record(path, ReferenceCurve, "")
    assert load_script().format_reference(curve) == path.read_text()
    config = load_config(f"{path.stem}.yaml")
    assert list_differences(curve.settings, config, IGNORED_KEYS) == []  # else make it anew
    # Whole runs of these take an hour, so their references end sooner, as docs/configuration.md says.
    end = {"small": 1_000, "multi30k": 1_500}.get(path.stem, config.training.steps)
    steps = [point.step for point in curve.points]
    assert steps[-1] == end
    compared = [step for step in steps if step % config.training.validate_every == 0]
    assert len(compared) >= 2 and end in compared


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return make_ground(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def shipped(ground: Ground) -> Path:
    """A folder of configs with the reference of three runs."""
    for seed in (1, 2, 3):
        assert main(ground.argv(f"reference-{seed}", *SETTINGS, f"seed={seed}")) == 0
    folder = ground.folder / "configs"
    folder.mkdir()
    script = load_script()
    patch = pytest.MonkeyPatch()
    patch.setattr(script, "find_shipped_configs", lambda: folder)
    # as it would be shipped, with these settings
    text = (ground.run("reference-1").config).read_text()
    (folder / "toy.yaml").write_text(text)
    runs = [ground.run(f"reference-{seed}").path for seed in (1, 2, 3)]
    path = script.write_reference(str(folder / "toy.yaml"), runs, None)
    assert path == folder / "references" / "toy.json"
    patch.undo()
    return folder


@pytest.fixture
def installed(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reference_curve, "find_shipped_configs", lambda: shipped)
    return shipped


SAME = (
    "seed=9",
    "training.precision=bf16",
    "training.micro_tokens=auto",
    "training.steps=7000",
    "training.validate_every=3",
    "data.workers=2",
    "device=cpu",
    "evaluation.bleu=false",
    "decoding.beam=1",
)
OTHER = (
    "training.label_smoothing=0.2",
    "training.tgt_tokens=601",
    "training.grouping=random",
    "training.ema=0.9",
    "training.clip_norm=1.0",
    "model.dropout=0.2",
    "optimizer.scale=1.4",
    "vocab.bpe_dropout=0.1",
    "data.train=[{src: train.en, tgt: train.de, weight: 2.0}]",
)


@pytest.mark.parametrize("setting", [*SAME, *OTHER])
def test_settings_that_matter_make_it_another_recipe(
    setting: str, ground: Ground, shipped: Path
) -> None:
    config = load_config(str(ground.config), [*SETTINGS, setting])
    store = Path(config.data.store)
    found = read_reference(shipped / "references" / "toy.json", config, store)
    assert (found is not None) == (setting in SAME)
    if found is not None:
        event = ValidEvent(
            step=40, nll=2.0, ppl=0.0, bleu=50.0, signature=None, chrf=None, elapsed_s=0.0
        )
        compared, _ = found.compare(event)
        assert compared.nll_low is not None
        assert (compared.bleu_low is not None) == (setting != "decoding.beam=1")
        between = replace(event, step=41)
        assert found.compare(between) == (between, "")


def test_other_text_has_no_reference(ground: Ground, shipped: Path, tmp_path: Path) -> None:
    path = shipped / "references" / "toy.json"
    curve = json.loads(path.read_text())
    assert curve["store"] == read_ledger(ground.folder / "store").store
    config = load_config(str(ground.config), SETTINGS)
    (tmp_path / "toy.json").write_text(json.dumps(curve | {"store": "0" * 64}))
    assert read_reference(tmp_path / "toy.json", config, ground.folder / "store") is None


def test_runs_of_another_recipe_or_of_one_seed_make_no_reference(
    ground: Ground, shipped: Path
) -> None:
    script = load_script()
    run = ground.run("reference-1").path
    toy = str(shipped / "toy.yaml")
    with pytest.raises(UserError, match="seeds 1, 1: each run needs its own"):
        script.make_reference(toy, [run, run], None)
    with pytest.raises(UserError, match="at least two runs"):
        script.make_reference(toy, [run], None)
    with pytest.raises(UserError, match="is no run of demo.yaml .*model.d_model: 128 -> 32"):
        script.make_reference("demo.yaml", [run, run], None)
    weighed = shipped / "weighed.yaml"
    weighed.write_text("extends: toy.yaml\ndata: {train: [{src: a, tgt: b, weight: 2.0}]}\n")
    with pytest.raises(UserError, match="mixes corpora"):
        script.make_reference(str(weighed), [run, run], None)


# ---- trained -------------------------------------------------------------------------------------


def lower_rate(patch: pytest.MonkeyPatch) -> None:
    rate = nmt.train.update.learning_rate
    patch.setattr(nmt.train.update, "learning_rate", lambda *args: 0.1 * rate(*args))


def drop_gradients(patch: pytest.MonkeyPatch) -> None:
    """The decoder's layers learn nothing."""
    run_update = nmt.train.loop.run_update

    def run_damaged(replica: Any, optimizer: Any, *rest: Any) -> Any:
        for parameter in replica.objective.model.decoder.parameters():
            parameter.register_hook(torch.zeros_like)
        patch.setattr(nmt.train.loop, "run_update", run_update)  # once is enough
        return run_update(replica, optimizer, *rest)

    patch.setattr(nmt.train.loop, "run_update", run_damaged)


DAMAGES = [lower_rate, drop_gradients]


def test_an_honest_run_with_another_seed_is_within(
    ground: Ground, installed: Path, capsys: Capture
) -> None:
    assert main(ground.argv("honest", *SETTINGS, "seed=4")) == 0
    said = capsys.readouterr().err
    assert "reference: 3 runs of toy.yaml with seeds 1, 2, 3, to update 60" in said
    assert said.count("; within the reference\n") == 3
    for line in read_lines(ground.run("honest").path, "valid"):
        assert line["reference"] == "within"
        assert line["nll_low"] < line["nll"] < line["nll_high"]
        assert line["bleu_low"] <= line["bleu"] <= line["bleu_high"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_below(
    damage: Callable[[pytest.MonkeyPatch], None],
    ground: Ground,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    damage(monkeypatch)
    name = damage.__name__
    assert main(ground.argv(name, *SETTINGS, "seed=4")) == 0
    last = read_lines(ground.run(name).path, "valid")[-1]
    assert last["reference"] == "below" and last["nll"] > last["nll_high"]
    assert f"below the reference: dev NLL {last['nll']:.4g}, reference " in capsys.readouterr().err


@pytest.mark.skipif(not IS_SOAK, reason="trains the demo, ten minutes")
@pytest.mark.timeout(1800)
def test_the_demo_with_another_seed_is_within(tmp_path: Path) -> None:
    words = [f"out={tmp_path}/run", f"data.store={tmp_path}/store", "seed=11"]
    assert main(["--config", "demo.yaml", *words]) == 0
    lines = read_lines(tmp_path / "run", "valid")
    assert [line["reference"] for line in lines] == ["within"] * 3
