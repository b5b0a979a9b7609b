"""Damage to the checkpoints of a real run: each file cut, flipped, zeroed, emptied, removed,
exchanged for another's.

Whatever was done to the newest checkpoint, it is named with the file, and the one before is taken;
a run that goes on so ends in the bits of the undisturbed one. NMT_SOAK=1 tries ten times as many
places; all are drawn from fixed seeds.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.soaking import Ground, counted, lines, make_ground

from nmt.checkpoint import find_newest, list_steps
from nmt.commands.eval import main as nmt_eval
from nmt.commands.train import main as nmt_train
from nmt.config import load_config, override_config
from nmt.system.errors import Failure
from nmt.system.files import digest_file, seal
from nmt.system.run_folder import RunFolder

MANIFEST = "manifest.json"
FILES = (
    "config.yaml",
    MANIFEST,
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "vocab.model",
)
SCALE = counted(1, 10)
BLOCK = 4096
Damage = Callable[[bytes, random.Random], bytes]


SETTINGS = (
    "training.steps=20",
    "training.log_every=1",
    "training.validate_every=100",
    "training.checkpoint_every=5",
    "training.keep_checkpoints=10",
    "evaluation.bleu=false",
)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """Two runs of 20 updates with checkpoints at 5, 10, 15 and 20; in `other` the model has another
    size.
    """
    ground = make_ground(tmp_path_factory.mktemp("damage"))
    assert train(ground, ground.run("run")) == 0
    shutil.copytree(ground.run("run").path, ground.run("whole").path, symlinks=True)
    assert train(ground, ground.run("other"), "model.d_ff=16", "name=other") == 0
    return ground


def train(ground: Ground, run: RunFolder, *settings: str) -> int:
    return nmt_train(["--config", str(ground.config), f"out={run.path}", *SETTINGS, *settings])


@pytest.fixture
def run(ground: Ground) -> RunFolder:
    """The first of them, to be damaged; it lies where it was trained."""
    found = ground.run("run")
    shutil.rmtree(found.path)
    shutil.copytree(ground.run("whole").path, found.path, symlinks=True)
    assert list_steps(found) == [5, 10, 15, 20]
    assert {path.name for path in found.checkpoint(20).iterdir()} == set(FILES)
    return found


def told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Which checkpoint is taken and what is said about the others."""
    capsys.readouterr()
    found = find_newest(run)
    assert found is not None and found.path == run.checkpoint(found.step)
    return found.step, capsys.readouterr().err.splitlines()


def check_named(run: RunFolder, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """That `name` of step 20 is said to be damaged and step 15 is taken."""
    step, lines = told(run, capsys)
    assert step == 15 and len(lines) == 1, lines
    # It speaks of another file
    place = run.checkpoint(20) if name == MANIFEST else run.checkpoint(20) / f"{name}:"
    assert lines[0].startswith(f"warning: {place}") and name in lines[0], lines


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def zeroed(data: bytes, rng: random.Random) -> bytes:
    """As a lost block of the disk reads; of a file of less than two blocks, a quarter."""
    size = BLOCK if len(data) >= 2 * BLOCK else len(data) // 4
    start = rng.randrange(len(data) // size) * size
    return data[:start] + bytes(size) + data[start + size :]


@pytest.mark.timeout(900)
def test_damage_is_found_and_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    kinds: dict[Damage, int] = {truncated: 20 * SCALE, flipped: 50 * SCALE, zeroed: 10 * SCALE}
    rng = random.Random(1)
    for damage, n in kinds.items():
        for name in (FILES * n)[:n]:  # each in turn
            file = run.checkpoint(20) / name
            data = worse = file.read_bytes()
            while worse == data:  # zeros that were zeros are no damage
                worse = damage(data, rng)
            file.write_bytes(worse)
            check_named(run, name, capsys)
            file.write_bytes(data)
    assert told(run, capsys) == (20, [])  # nothing is wrong any more


def test_files_that_are_gone_empty_or_of_another_checkpoint(
    run: RunFolder, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {
        "15 of this run": run.checkpoint(15),
        "20 of another": ground.run("other").checkpoint(20),
    }
    n_exchanged = 0
    for name in FILES:
        file = run.checkpoint(20) / name
        data = file.read_bytes()
        file.unlink()
        check_named(run, name, capsys)
        file.write_bytes(b"")
        check_named(run, name, capsys)
        for place in others.values():
            if (strange := (place / name).read_bytes()) == data:
                continue  # config and vocabulary of one run are the same in all its checkpoints
            n_exchanged += 1
            file.write_bytes(strange)
            if name == MANIFEST:
                assert told(run, capsys)[0] == 15
            else:
                check_named(run, name, capsys)
        file.write_bytes(data)
    assert n_exchanged >= 9 and told(run, capsys) == (20, [])


def test_exchanged_folders_are_not_taken_for_what_their_names_say(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    aside = run.checkpoints / "aside"
    for a, b in ((15, aside), (20, 15), (aside, 20)):
        places = [run.checkpoint(x) if isinstance(x, int) else x for x in (a, b)]
        os.rename(*places)
    step, lines = told(run, capsys)
    assert step == 10 and len(lines) == 2
    assert str(run.checkpoint(20) / "state.json") in lines[0] and "step 15" in lines[0]
    assert str(run.checkpoint(15) / "state.json") in lines[1] and "step 20" in lines[1]


def test_an_old_state_that_agrees_with_its_manifest(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for names in (
        ("state.json", MANIFEST),
        ("state.json",),
        ("state.json", "optimizer.safetensors"),
    ):
        for name in names:
            shutil.copyfile(run.checkpoint(15) / name, run.checkpoint(20) / name)
        if MANIFEST not in names:
            seal(run.checkpoint(20))  # as one who repairs by hand might
        check_named(run, "state.json", capsys)


def test_a_checkpoint_of_another_run_is_passed_over(
    run: RunFolder, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run.checkpoint(20))
    shutil.copytree(ground.run("other").checkpoint(20), run.checkpoint(20))
    # more updates do not make it another run
    config = override_config(load_config(str(ground.config)), [*SETTINGS, "training.steps=30"])
    capsys.readouterr()
    found = find_newest(run, config)
    assert found is not None and found.step == 15
    assert "model.d_ff: 32 -> 16" in capsys.readouterr().err


# ---- through the command ----------------------------------------------------------------------------------------


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (
            "model.safetensors",
            lambda file: file.write_bytes(flipped(file.read_bytes(), random.Random(1))),
        ),
        ("optimizer.safetensors", lambda file: os.truncate(file, 1000)),
        ("state.json", lambda file: file.write_bytes(b"")),
        (MANIFEST, lambda file: file.unlink()),
    ],
    ids=["flipped", "truncated", "emptied", "deleted"],
)
def test_a_run_goes_on_from_the_one_before_to_the_same_bits(
    name: str,
    damage: Callable[[Path], object],
    run: RunFolder,
    ground: Ground,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected, expected_lines = tensors(run.checkpoint(20)), lines(run)
    # The file is mapped, and is damaged next
    expected = {key: value.clone() for key, value in expected.items()}
    damage(run.checkpoint(20) / name)
    capsys.readouterr()
    assert train(ground, run) == 0
    said = capsys.readouterr().err
    assert name in said and "continuing after update 15" in said and "Traceback" not in said
    found = tensors(run.checkpoint(20))
    assert found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )
    assert lines(run) == expected_lines


def content(folder: Path) -> dict[str, str]:
    """Every file and link of a run, but for what says who came by."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else digest_file(path)
        for path in sorted(folder.rglob("*"))
        if path.name not in (".lock", "status.json") and (path.is_symlink() or path.is_file())
    }


def test_when_all_are_damaged_nothing_is_touched(
    run: RunFolder, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, name in zip(
        (5, 10, 15, 20), ("vocab.model", "config.yaml", MANIFEST, "state.json"), strict=True
    ):
        os.truncate(run.checkpoint(step) / name, 10)
    before = content(run.path)
    with pytest.raises(Failure, match="none of its 4 checkpoints can be used"):
        find_newest(run)
    capsys.readouterr()
    assert train(ground, run) == 1
    said = capsys.readouterr().err.splitlines()
    assert (
        len(said) >= 4
        and "none of its 4 checkpoints can be used" in said[-1]
        and not any("Traceback" in s for s in said)
    )
    assert content(run.path) == before
    assert nmt_eval([str(run.path)]) == 2  # here the folder is what the user gave


@pytest.mark.parametrize("size", [0, 700, None], ids=["emptied", "cut in a line", "deleted"])
def test_a_journal_that_has_lost_lines(
    size: int | None, run: RunFolder, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (15, 20):
        shutil.rmtree(run.checkpoint(step))
    if size is None:
        run.metrics.unlink()
    else:
        os.truncate(run.metrics, size)
        assert size == 0 or run.metrics.read_bytes()[-1:] != b"\n"
    kept: list[int] = []  # updates of lines that are whole
    for line in run.metrics.read_text().split("\n")[:-1] if size else []:
        event = json.loads(line)
        if event["kind"] == "train":
            kept.append(event["step"])
    assert not size or kept
    capsys.readouterr()
    assert train(ground, run) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1 and str(run.metrics) in warnings[0]
    # Each line is whole
    found = [line["step"] for line in lines(run) if line["kind"] == "train"]
    assert found == [*kept, *range(11, 21)]
