"""Results in a folder that no other can take the place of: the current folder, and a mount point.

A store is made in its folder, whatever that is. Averages and exports take the place of a folder, so the
current one is refused before any work, with nothing touched. Any other folder is exchanged as a whole, and never lost.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pytest import FixtureRequest, MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_errors, read_stderr
from support.ground import Ground
from support.rings import amount
from support.small_disk import mount_small_disk
from support.untrained import make_checkpoint

from nmt.commands.average import main as nmt_average
from nmt.commands.export import main as nmt_export
from nmt.commands.prepare import main as nmt_prepare
from nmt.data.vocab import Vocab
from nmt.system import files
from nmt.system.files import read_json, read_manifest, verify
from nmt.system.run_folder import LEDGER_FILE, MANIFEST_FILE


@fixture(scope="module")
def ground(ground: Ground, vocab: Vocab) -> Ground:
    """Text to prepare, and two checkpoints."""
    for seed in (1, 2):
        make_checkpoint(ground.folder / f"model-{seed}", vocab, seed=seed)
    return ground


COMMANDS = ("prepare", "average", "export")


@fixture(params=["current folder", "volume"])
def fixed(request: FixtureRequest, tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "a \\ b"
    if request.param == "volume":
        with mount_small_disk(folder):
            yield folder
        return
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield Path(".")


def list_commands(ground: Ground, out: Path) -> dict[str, Callable[[], int]]:
    models = [str(ground.folder / f"model-{seed}") for seed in (1, 2)]
    config = ["--config", str(ground.config), f"data.store={out}"]
    return {
        "prepare": lambda: nmt_prepare(config),
        "average": lambda: nmt_average([*models, "-o", str(out)]),
        "export": lambda: nmt_export([models[0], "--to", "safetensors", "-o", str(out)]),
        "force": lambda: nmt_average([*models, "--force", "-o", str(out)]),
    }


def test_a_store_is_made_in_its_folder(ground: Ground, fixed: Path) -> None:
    number = fixed.stat().st_ino
    for _ in range(2):  # the second finds it complete
        assert list_commands(ground, fixed)["prepare"]() == 0
        assert fixed.resolve().stat().st_ino == number
        verify(fixed)
    beside = {path.name for path in fixed.resolve().parent.iterdir()}
    assert beside == {fixed.resolve().name}


@mark.parametrize("command", ["average", "export", "force"])
def test_the_current_folder_is_not_exchanged(
    ground: Ground,
    command: str,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list_commands(ground, Path("."))[command]() == 2
    (line,) = [line for line in read_errors(capsys) if "error: " in line]
    assert f"{tmp_path}: is the current folder" in line
    assert line.endswith("name a folder inside it")
    assert os.listdir(tmp_path) == []


@mark.parametrize("command", COMMANDS)
def test_files_of_the_user_stay(ground: Ground, fixed: Path, command: str, capsys: Capture) -> None:
    (fixed / "thesis.tex").write_text("precious")
    assert list_commands(ground, fixed)[command]() == 2
    assert f"{fixed.resolve()}: " in read_stderr(capsys)
    assert os.listdir(fixed) == ["thesis.tex"]


def test_a_root_folder_is_not_taken_for_a_store(ground: Ground, capsys: Capture) -> None:
    assert list_commands(ground, Path("/"))["prepare"]() == 2
    assert "/: exists but is not a prepared store" in read_stderr(capsys)


def test_a_kill_while_files_are_moved(
    ground: Ground, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """In `make soak` after any number of files."""
    whole = tmp_path / "whole"
    assert list_commands(ground, whole)["prepare"]() == 0
    n_files = 1 + len(read_manifest(whole))
    for n_moved in amount([1, n_files - 1], range(n_files)):
        out = tmp_path / f"out-{n_moved}"
        run = list_commands(ground, out)["prepare"]
        with monkeypatch.context() as patch:
            patch.setattr(files, "on_change", stop_after(n_moved, out))
            with raises(Killed):
                run()
        assert not (out / MANIFEST_FILE).exists()
        assert run() == 0
        verify(out)
        digests = [read_json(folder / LEDGER_FILE)["store"] for folder in (out, whole)]
        assert digests[0] == digests[1]


@mark.parametrize("command", COMMANDS[1:])
def test_a_result_that_was_being_exchanged_comes_back(
    ground: Ground, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "out"
    run = list_commands(ground, out)[command]
    assert run() == 0
    # as after a kill between the two renames of --force
    (out / "thesis.tex").write_text("precious")
    shutil.copytree(out, tmp_path / ".out.tmp")
    os.rename(out, tmp_path / ".out.old")
    assert run() == 2
    assert (out / "thesis.tex").read_text() == "precious"
    verify(out)
    (out / "thesis.tex").unlink()
    assert run() == 0
    assert os.listdir(tmp_path) == ["out"]


class Killed(BaseException):
    pass


def stop_after(n: int, folder: Path) -> Callable[[str, Path], None]:
    """Have `n` files renamed into a folder, and then none."""
    left = [n]

    def stop(what: str, path: Path) -> None:
        if what == "rename" and path.parent == folder:
            if not left[0]:
                raise Killed
            left[0] -= 1

    return stop
