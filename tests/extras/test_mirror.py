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
from uuid import uuid4

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from pytest import FixtureRequest, MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_errors, read_stderr
from support.ground import Ground, check_done, check_same
from support.prepared_toy import prepare_toy
from support.rings import amount

import nmt.api
from nmt.checkpoint.checkpoint import TrainState
from nmt.checkpoint.run_checkpoints import list_steps
from nmt.config import DataConfig, RunConfig, TrainingConfig
from nmt.config_files import format_config, load_config
from nmt.extras.mirror import copy_run, fetch_run, list_mirrored, open_mirror
from nmt.system.errors import Failure, UserError
from nmt.system.files import (
    make_folder,
    remove_folder,
    verify,
    write_folder,
    write_json,
    write_text,
)
from nmt.system.run_folder import MODEL_FILE, OPTIMIZER_FILE, RunFolder


@fixture(params=["file", "memory"])
def url(request: FixtureRequest, tmp_path: Path) -> str:
    """A place that does not exist yet."""
    place = {"file": tmp_path / "a[1]" / "mirror", "memory": f"/{uuid4()}"}[request.param]
    return f"{request.param}://{place}"


def make_config(folder: Path, url: str, **training: Any) -> RunConfig:
    """A run in a folder of a machine."""
    return RunConfig(
        out=str(folder / "run"),
        data=DataConfig(store=str(folder / "store")),
        training=TrainingConfig(mirror=url, **training),
    )


def start_run(config: RunConfig) -> RunFolder:
    run = RunFolder(config.folder)
    make_folder(run.checkpoints)
    write_text(run.config, format_config(config))
    write_folder(Path(config.data.store), lambda folder: write_text(folder / "ids", "1 2 3"))
    return run


def mirror_run(config: RunConfig) -> None:
    copy_run(str(config.training.mirror), RunFolder(config.folder), Path(config.data.store))


def fetch(config: RunConfig) -> RunConfig | None:
    return fetch_run(str(config.training.mirror), config)


def add_checkpoint(run: RunFolder, step: int, text: str = "weights") -> None:
    """A folder that is sealed as a checkpoint is, without tensors."""

    def fill(folder: Path) -> None:
        write_text(folder / MODEL_FILE, f"{text} of {step}")
        write_text(folder / OPTIMIZER_FILE, f"moments of {step}")
        write_json(folder / "state.json", asdict(TrainState(step=step)))

    write_folder(run.checkpoint(step), fill)
    with open(run.metrics, "a") as file:
        file.write(f"line of {step}\n")


def list_complete(config: RunConfig) -> list[str]:
    with open_mirror(str(config.training.mirror)) as mirror:
        return list_mirrored(mirror)


def test_the_mirror_follows_the_run_folder(url: str, tmp_path: Path) -> None:
    config = make_config(tmp_path / "one", url)
    run = start_run(config)
    write_folder(run.average, lambda folder: write_text(folder / MODEL_FILE, "mean"))
    for step in (1, 2, 3):
        add_checkpoint(run, step)
    (run.checkpoints / "last").symlink_to("step-0000003")
    mirror_run(config)
    far = fsspec.filesystem(url.partition(":")[0])
    steps = [f"checkpoints/step-000000{step}" for step in (1, 2, 3)]
    assert list_complete(config) == ["average", *steps, "store"]
    for path in (run.metrics, run.config, run.checkpoint(2) / OPTIMIZER_FILE):
        assert far.cat_file(f"{url}/{path.relative_to(run.path)}") == path.read_bytes()
    assert not [name for name in far.find(url) if "last" in name or name.endswith(".part")]

    # an average of the same size that was made anew, a checkpoint that was written again, and one less
    write_folder(run.average, lambda folder: write_text(folder / MODEL_FILE, "MEAN"))
    add_checkpoint(run, 3, "others")
    remove_folder(run.checkpoint(1))
    mirror_run(config)
    assert list_complete(config) == ["average", *steps[1:], "store"]
    assert far.cat_file(f"{url}/average/{MODEL_FILE}") == b"MEAN"
    assert far.cat_file(f"{url}/{steps[2]}/{MODEL_FILE}") == b"others of 3"
    assert not far.exists(f"{url}/{steps[0]}/{MODEL_FILE}")


def test_what_is_cut_off_counts_as_absent(
    url: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    config = make_config(tmp_path / "one", url)
    run = start_run(config)
    add_checkpoint(run, 1)
    mirror_run(config)
    add_checkpoint(run, 1, "other weights")
    add_checkpoint(run, 2)
    service = type(fsspec.filesystem(url.partition(":")[0]))
    with monkeypatch.context() as patched, raises(Failure, match="no space"):
        patched.setattr(service, "put_file", refuse(OPTIMIZER_FILE))
        mirror_run(config)
    assert list_complete(config) == ["store"]
    mirror_run(config)
    assert len(list_complete(config)) == 3


def test_a_manifest_that_is_cut_off_counts_as_absent(
    url: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    config = make_config(tmp_path / "one", url)
    start_run(config)
    service = type(fsspec.filesystem(url.partition(":")[0]))
    pipe_file = service.pipe_file

    def cut_off(service: Any, name: str, content: bytes) -> None:
        pipe_file(service, name, content[: len(content) // 2])
        raise OSError("no space")

    with monkeypatch.context() as patched, raises(Failure, match="no space"):
        patched.setattr(service, "pipe_file", cut_off)
        mirror_run(config)
    assert list_complete(config) == []
    mirror_run(config)
    assert list_complete(config) == ["store"]


def refuse(part: str) -> Callable[..., None]:
    put_file = MemoryFileSystem.put_file

    def put(service: Any, path: str, name: str, **options: Any) -> None:
        if part in name:
            raise OSError("no space")
        if isinstance(service, MemoryFileSystem):
            put_file(service, path, name, **options)
        else:
            service.cp_file(path, name)

    return put


def test_a_machine_that_has_nothing_or_less_fetches_the_run(url: str, tmp_path: Path) -> None:
    one = make_config(tmp_path / "one", url)
    run = start_run(one)
    add_checkpoint(run, 1)
    mirror_run(one)
    stale = make_config(tmp_path / "stale", url)
    fetch(stale)
    for step in (2, 3):
        add_checkpoint(run, step)
    mirror_run(one)

    for machine in (make_config(tmp_path / "two", url, log_every=7), stale):  # which may change
        assert fetch(machine) == one  # what the run began with
        fetched = RunFolder(machine.folder)
        assert list_steps(fetched) == [1, 2, 3]
        for folder in (*map(fetched.checkpoint, (1, 2, 3)), Path(machine.data.store)):
            verify(folder)
        assert fetched.metrics.read_bytes() == run.metrics.read_bytes()
        assert fetched.config.read_bytes() == run.config.read_bytes()

    # what is here and as new is left alone
    write_text(fetched.metrics, "mine")
    assert fetch(stale) is None
    assert fetched.metrics.read_text() == "mine"


@mark.parametrize("file", [MODEL_FILE, OPTIMIZER_FILE, "manifest.json"])
def test_a_damaged_file_is_refused(file: str, tmp_path: Path) -> None:
    one = make_config(tmp_path / "one", f"file://{tmp_path}/mirror")
    run = start_run(one)
    add_checkpoint(run, 1)
    mirror_run(one)
    damaged = tmp_path / "mirror" / "checkpoints" / "step-0000001" / file
    damaged.write_text(damaged.read_text().replace("1", "2", 1))
    two = make_config(tmp_path / "two", f"file://{tmp_path}/mirror")
    with raises(UserError, match=f"training.mirror=file://.*{MODEL_FILE}|{file}.*damaged"):
        fetch(two)
    assert list_steps(RunFolder(two.folder)) == []
    # the machine that has it makes it good
    shutil.rmtree(damaged.parent)
    mirror_run(one)
    fetch(two)
    assert list_steps(RunFolder(two.folder)) == [1]


def test_training_goes_on_with_one_line_where_a_copy_fails(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    config = prepare_toy(tmp_path)
    training = replace(
        config.training,
        mirror=f"memory:///{uuid4()}",
        steps=3,
        checkpoint_every=1,
        validate_every=9,
    )
    config = replace(config, training=training)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "put_file", refuse("step-0000002"))
        assert nmt.api.train(config) == 0
    warnings = [line for line in read_errors(capsys) if "no space" in line]
    assert warnings and all("training goes on" in line for line in warnings)
    # the same command copies the rest, even if the run is done
    assert "checkpoints/step-0000002" not in list_complete(config)
    assert nmt.api.train(config) == 0
    assert len(list_complete(config)) == 4 and "no space" not in read_stderr(capsys)

    # at the start a place where nothing can be written is an error
    elsewhere = replace(training, mirror=f"memory:///{uuid4()}")
    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse("config.yaml"))
    with raises(Failure, match=r"training.mirror=memory:.*no space"):
        nmt.api.train(replace(config, out=str(tmp_path / "other"), training=elsewhere))


def test_another_run_and_files_of_the_user_are_refused(tmp_path: Path) -> None:
    far = tmp_path / "mirror"
    one = make_config(tmp_path / "one", f"file://{far}")
    start_run(one)
    far.mkdir()
    (far / "manifest.json").write_text("mine")
    with raises(UserError, match=r"holds something .*manifest.json"):
        fetch(one)
    assert (far / "manifest.json").read_text() == "mine"
    # what a machine left that was killed when it began the mirror
    (far / "manifest.json").rename(far / "config.yaml.part")
    fetch(one)
    mirror_run(one)
    fetch(replace(one, training=replace(one.training, steps=7)))
    with raises(UserError, match="holds something .*seed: 1 -> 2"):
        fetch(replace(one, seed=2))


def test_what_is_no_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one = make_config(tmp_path / "one", f"file://{tmp_path}/file/mirror")
    start_run(one)
    with raises(Failure, match="training.mirror=file://.*; try again"):
        mirror_run(one)
    with raises(Failure, match="training.mirror=nothing://place: .*nothing"):
        fetch(make_config(tmp_path / "two", "nothing://place"))
    with raises(UserError, match=r"training.mirror=s3://.*s3fs.*pip install -e .*\[mirror\]'"):
        fetch(make_config(tmp_path / "two", "s3://bucket/run"))
    for url in ("bucket/prefix", "s3://", "ftp://me:secret@host/x"):
        with raises(UserError, match=r"mirror is .*; give a URL"):
            load_config("demo.yaml", [f"training.mirror='{url}'"])


def test_nothing_is_fetched_through_a_link(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    one, two = make_config(tmp_path / "one", url), make_config(tmp_path / "two", url)
    add_checkpoint(start_run(one), 1)
    mirror_run(one)
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    RunFolder(two.folder).path.mkdir(parents=True)
    RunFolder(two.folder).checkpoints.symlink_to(tmp_path)
    with raises(UserError, match="outside"):
        fetch(two)
    RunFolder(two.folder).checkpoints.unlink()
    RunFolder(two.folder).metrics.symlink_to(theirs)
    fetch(two)
    assert theirs.read_text() == "precious"


@mark.timeout(3600)
def test_killed_machines_end_in_the_bits_of_a_whole_run(ground: Ground, tmp_path: Path) -> None:
    """Each start is on a new machine; it is killed when a checkpoint is half copied, or complete."""
    steps = amount(6, 16)
    whole = ground.finish("whole", f"training.steps={steps}")
    checkpoints = tmp_path / "mirror" / "checkpoints"
    settings = [f"training.mirror=file://{tmp_path}/mirror", f"training.steps={steps}"]

    def is_copied(n: int) -> bool:
        return len(list(checkpoints.glob("step-*/manifest.json"))) >= n

    def is_half_copied() -> bool:
        folders = checkpoints.glob("step-*")
        return any(not (folder / "manifest.json").exists() for folder in folders)

    moments: list[Callable[[], bool]] = [is_half_copied, lambda: is_copied(1)]
    moments += amount([], [lambda: is_copied(1), is_half_copied, lambda: is_copied(2)] * 10)
    for moment in moments:
        start = ground.start("killed", *settings, slow={"update": 0.05})
        while not moment() and start.codes == [None]:
            time.sleep(0.001)
        start.signal(signal.SIGKILL)
        assert start.wait() in ([-signal.SIGKILL], [0]), start.told()
        # A copy that the last kill cut short may be found before this start has made its folders.
        shutil.rmtree(ground.folder / "killed", ignore_errors=True)
        shutil.rmtree(ground.folder / "store", ignore_errors=True)
    last = ground.start("killed", *settings)
    assert last.wait() == [0] and "continuing after update" in last.told()
    run = ground.run("killed")
    check_done(run, steps)
    check_same(run, whole)
