"""A mirror holds what the run folder holds, complete or not at all; a machine that has nothing goes on
from it with the same bits; and nothing that goes wrong there stops a run.
"""

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.soaking import Order, check_done, check_same, counted, make_ground

from nmt.checkpoint import TrainState, list_steps
from nmt.config import DataConfig, RunConfig, TrainingConfig, format_config, load_config
from nmt.system.errors import Failure, UserError
from nmt.system.files import make_folder, verify, write_folder, write_json, write_text
from nmt.system.remote import Remote, RemoteError
from nmt.system.run_folder import MODEL_FILE, OPTIMIZER_FILE, RunFolder
from nmt.train import mirror as mirror_room
from nmt.train.mirror import Mirror, claim_mirror, fetch_run, list_mirrored_steps


def make_config(folder: Path, **training: Any) -> RunConfig:
    """A run in a folder of a machine; the mirror lies beside all machines."""
    return RunConfig(
        out=str(folder / "run"),
        data=DataConfig(store=str(folder / "store")),
        training=TrainingConfig(
            mirror=f"file://{folder.parent}/mirror", keep_checkpoints=2, **training
        ),
    )


def start_run(config: RunConfig) -> RunFolder:
    run = RunFolder(config.folder)
    make_folder(run.checkpoints)
    write_text(run.config, format_config(config))
    return run


def add_checkpoint(
    run: RunFolder,
    step: int,
    text: str = "weights",
    best_step: int = 0,
    has_moments: bool = True,
) -> None:
    """A folder that is sealed as a checkpoint is, without tensors."""

    def fill(folder: Path) -> None:
        write_text(folder / MODEL_FILE, f"{text} of {step}")
        if has_moments:
            write_text(folder / OPTIMIZER_FILE, f"moments of {step}")
        write_json(folder / "state.json", asdict(TrainState(step=step, best_step=best_step)))

    write_folder(run.checkpoint(step), fill)
    with open(run.metrics, "a") as file:
        file.write(f"line of {step}\n")


def open_mirror(config: RunConfig, run: RunFolder) -> Mirror:
    return Mirror(config.training, Path(config.data.store), run)


def copy(config: RunConfig, run: RunFolder, best_steps: set[int], last_step: int) -> Mirror:
    mirror = open_mirror(config, run)
    mirror.update(best_steps, last_step)
    mirror.close()
    return mirror


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_mirror_follows_the_run_folder(tmp_path: Path) -> None:
    config = make_config(tmp_path / "one")
    run = start_run(config)
    write_folder(Path(config.data.store), lambda folder: write_text(folder / "ids", "1 2 3"))
    write_folder(run.average, lambda folder: write_text(folder / "model.safetensors", "mean"))
    mirror = open_mirror(config, run)
    for step in range(1, 6):
        add_checkpoint(run, step, best_step=2)
    mirror.update({2}, 5)
    mirror.close()
    far = tmp_path / "mirror"
    assert list_mirrored_steps(mirror.remote) == {2, 4, 5}  # the best and the two newest
    for name in ("checkpoints/step-0000002", "checkpoints/step-0000005", "store", "average"):
        verify(far / name)
    assert (far / "metrics.jsonl").read_bytes() == run.metrics.read_bytes()
    assert (far / "config.yaml").read_bytes() == run.config.read_bytes()

    # a checkpoint that was written again, and one more
    add_checkpoint(run, 5, "other weights")
    add_checkpoint(run, 6)
    mirror = copy(config, run, {2}, 6)
    assert list_mirrored_steps(mirror.remote) == {2, 5, 6}
    assert (far / "checkpoints/step-0000005/model.safetensors").read_text() == "other weights of 5"


def test_a_machine_that_has_nothing_fetches_the_run(tmp_path: Path) -> None:
    one = make_config(tmp_path / "one")
    run = start_run(one)
    write_folder(Path(one.data.store), lambda folder: write_text(folder / "ids", "1 2 3"))
    for step in (1, 2, 3, 4):
        add_checkpoint(run, step, best_step=1)
    mirror = copy(one, run, {1}, 4)

    two = make_config(tmp_path / "two", log_every=7)  # which may change
    fetch_run(two)
    fetched = RunFolder(two.folder)
    assert list_steps(fetched) == [1, 4]  # the best and the newest
    verify(Path(two.data.store))
    assert fetched.metrics.read_bytes() == run.metrics.read_bytes()
    assert fetched.config.read_bytes() == run.config.read_bytes()
    # the one that averages need comes later, and nothing is lost in the mirror
    mirror = copy(two, fetched, {1}, 4)
    assert list_steps(fetched) == [1, 3, 4] and list_mirrored_steps(mirror.remote) == {1, 3, 4}

    # what is here and as new is left alone
    write_text(fetched.metrics, "mine")
    fetch_run(two)
    assert fetched.metrics.read_text() == "mine"


def test_a_store_is_fetched_into_the_current_folder_by_the_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_config(tmp_path / "one")
    write_folder(Path(one.data.store), lambda folder: write_text(folder / "ids", "1 2 3"))
    copy(one, start_run(one), set(), 0)
    two = make_config(tmp_path / "two")
    store = make_folder(Path(two.data.store).resolve())
    (store / ".lock").touch()  # of the first try, which failed
    monkeypatch.chdir(store)
    fetch_run(two)
    verify(store)


def test_a_new_machine_gets_what_training_continues_from(tmp_path: Path) -> None:
    one = make_config(tmp_path / "one")
    run = start_run(one)
    for step in (1, 2, 3, 4):
        add_checkpoint(run, step, has_moments=step == 2)
    copy(one, run, {1, 2}, 4)

    two = make_config(tmp_path / "two")
    fetch_run(two)
    assert list_steps(RunFolder(two.folder)) == [2]


def test_a_damaged_checkpoint_is_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_config(tmp_path / "one")
    run = start_run(one)
    for step in (1, 2):
        add_checkpoint(run, step)
    copy(one, run, set(), 2)
    damaged = tmp_path / "mirror" / "checkpoints" / "step-0000002" / "model.safetensors"
    damaged.write_text("weights 0f 2")
    two = make_config(tmp_path / "two")
    fetch_run(two)
    assert list_steps(RunFolder(two.folder)) == [1]
    assert "step-0000002: " in capsys.readouterr().err
    # the machine that has it makes it good
    copy(one, run, set(), 2)
    verify(damaged.parent)


def test_failures_are_told_once_and_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_down = True
    put_file = Remote.put_file

    def put(remote: Remote, path: Path, name: str) -> None:
        if is_down:
            raise RemoteError("the cable is out")
        put_file(remote, path, name)

    monkeypatch.setattr(Remote, "put_file", put)
    monkeypatch.setattr(mirror_room, "RETRY_S", 0.01)
    monkeypatch.setattr(mirror_room, "END_RETRY_S", 0.01)
    config = make_config(tmp_path / "one")
    run = start_run(config)
    add_checkpoint(run, 1)
    mirror = open_mirror(config, run)
    mirror.update(set(), 1)
    wait_until(lambda: mirror.failures > 3)
    assert list_mirrored_steps(mirror.remote) == set()
    [warning] = mirror.take_warnings()
    assert "the cable is out" in warning and not mirror.take_warnings()
    is_down = False
    wait_until(lambda: list_mirrored_steps(mirror.remote) == {1})
    mirror.close()
    err = capsys.readouterr().err
    assert err.count("the cable is out") == 1 and "is up to date again" in err
    # a run that ends without it says so
    is_down = True
    add_checkpoint(run, 2)
    mirror = copy(config, run, set(), 2)
    assert "is not up to date" in capsys.readouterr().err


def test_a_run_does_not_begin_anew_because_its_mirror_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_nothing(remote: Remote, name: str) -> set[str]:
        raise RemoteError("the cable is out")

    monkeypatch.setattr(Remote, "list_sealed", find_nothing)
    config = make_config(tmp_path / "one")
    with pytest.raises(Failure, match="the cable is out; try again"):
        fetch_run(config)
    add_checkpoint(start_run(config), 1)
    fetch_run(config)
    assert "the cable is out; continuing from what is here" in capsys.readouterr().err


def test_another_run_is_refused_and_a_place_that_cannot_be(tmp_path: Path) -> None:
    one = make_config(tmp_path / "one")
    run = start_run(one)
    claim_mirror(one, run)
    fetch_run(replace(one, training=replace(one.training, steps=7)))
    with pytest.raises(UserError, match="different settings .*seed: 1 -> 2"):
        fetch_run(replace(one, seed=2))
    (tmp_path / "file").write_text("")
    elsewhere = replace(one.training, mirror=f"file://{tmp_path}/file/mirror")
    with pytest.raises(Failure, match="is it the right place"):
        claim_mirror(replace(one, training=elsewhere), run)
    for url in ("bucket/prefix", "s3://", "ftp://me:secret@host/x"):
        with pytest.raises(UserError, match=r"mirror is .*; give a URL"):
            load_config("demo.yaml", [f"training.mirror='{url}'"])


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    config = make_config(tmp_path / "one")
    run, far = start_run(config), tmp_path / "mirror"
    (far / "store").mkdir(parents=True)
    (far / "store" / "manifest.json").write_text("mine")
    with pytest.raises(UserError, match="contains 'store', but no config.yaml of a run"):
        fetch_run(config)
    with pytest.raises(UserError, match="training.mirror=file:///: contains "):
        fetch_run(replace(config, training=replace(config.training, mirror="file:///")))
    assert (far / "store" / "manifest.json").read_text() == "mine"

    # what a machine left that was killed while it claimed the mirror
    shutil.rmtree(far)
    far.mkdir()
    (far / "config.yaml.part").write_text("na")
    fetch_run(config)
    claim_mirror(config, run)
    fetch_run(config)


def test_nothing_is_fetched_through_a_link(tmp_path: Path) -> None:
    one, two = make_config(tmp_path / "one"), make_config(tmp_path / "two")
    run = start_run(one)
    add_checkpoint(run, 1)
    copy(one, run, set(), 1)
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    RunFolder(two.folder).path.mkdir(parents=True)
    RunFolder(two.folder).metrics.symlink_to(theirs)
    with pytest.raises(UserError, match="is a link to .*theirs"):
        fetch_run(two)
    RunFolder(two.folder).metrics.unlink()
    RunFolder(two.folder).checkpoints.rmdir()
    RunFolder(two.folder).checkpoints.symlink_to(tmp_path)
    with pytest.raises(UserError, match="outside"):
        fetch_run(two)
    assert theirs.read_text() == "precious"


@pytest.mark.timeout(3600)
def test_killed_machines_end_in_the_bits_of_a_whole_run(tmp_path: Path) -> None:
    """Each start is on a new machine; it is killed when a checkpoint is half copied, or complete."""
    ground = make_ground(tmp_path)
    steps = counted(6, 16)
    whole = ground.finish("whole", f"training.steps={steps}")
    checkpoints = tmp_path / "mirror" / "checkpoints"
    settings = [f"training.mirror=file://{tmp_path}/mirror", f"training.steps={steps}"]
    slow = Order([], "", slow={"update": 0.05})

    def is_copied(n: int) -> bool:
        return len(list(checkpoints.glob("step-*/manifest.json"))) >= n

    def is_half_copied() -> bool:
        folders = checkpoints.glob("step-*")
        return any(not (folder / "manifest.json").exists() for folder in folders)

    moments: list[Callable[[], bool]] = [is_half_copied]
    moments += counted([], [lambda: is_copied(1), is_half_copied, lambda: is_copied(2)] * 10)
    for moment in moments:
        start = ground.start("killed", *settings, order=slow)
        while not moment() and start.codes == [None]:
            time.sleep(0.001)
        start.signal(signal.SIGKILL)
        assert start.wait() in ([-signal.SIGKILL], [0]), start.told()
        # A copy that the last kill cut short may be found before this start has made its folders.
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
    run = ground.finish("killed", *settings)
    check_done(run, steps)
    check_same(run, whole)
