"""What nmt.system.files promises: a file or folder is complete or absent, damage is seen, a lock
dies with its holder, and nothing but a plain file of ours is opened or replaced.

Failures are injected in the middle of writing, and a process is killed with SIGKILL there, which no
`finally` survives; what a reader then finds is compared with the old content.
"""

import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from nmt.system.errors import UserError
from nmt.system.files import (
    NEW_FOLDER,
    FileMode,
    check_own_folder,
    digest_file,
    finish_write,
    has_plain_file,
    lock,
    make_folder,
    open_plain_file,
    point_link,
    read_bytes,
    read_json,
    remove_leftovers,
    verify,
    write_folder,
    write_json,
    write_text,
)
from nmt.system.run_folder import CARD_FILE, MANIFEST_FILE

ROOT = Path(__file__).parents[2]
MODES: tuple[FileMode, ...] = ("rb", "r+b", "a+b", "wb", "xb")
LINKS = {"link": "outside/precious", "link to nothing": "outside/nothing", "device": "/dev/zero"}


class Injected(Exception):
    pass


def fail(*_: object) -> NoReturn:
    raise Injected


def start(program: str, *arguments: Path) -> "subprocess.Popen[str]":
    """Run a program that prints a line once it is where the test wants it."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    return child


def kill(child: "subprocess.Popen[str]") -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=10)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "outside" / "precious"
    path.parent.mkdir()
    path.write_text("precious")
    return path


# ---- plain files only -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*LINKS, "folder"])
def test_only_plain_files_are_opened(tmp_path: Path, precious: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(LINKS[kind])
    attempts: list[Callable[[Path], object]] = [has_plain_file, read_bytes, read_json, digest_file]
    attempts += [partial(open_plain_file, mode=mode) for mode in MODES]
    for attempt in attempts:
        with pytest.raises(UserError, match="/file: is .*; remove it, or put a plain file there$"):
            attempt(path)
    if kind == "folder":
        with pytest.raises(UserError, match="file: is a folder, not a file"):
            write_text(path, "new")
    else:  # the link is replaced, and not what it leads to
        write_text(path, "new")
        assert not path.is_symlink() and path.read_text() == "new"
    assert precious.read_text() == "precious" and os.listdir(precious.parent) == ["precious"]
    assert sorted(os.listdir(tmp_path)) == ["file", "outside"]


def test_plain_files_open_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert not has_plain_file(path)
    with pytest.raises(FileNotFoundError):
        open_plain_file(path)
    modes: dict[FileMode, bytes] = {"xb": b"one", "a+b": b"two", "r+b": b"O"}
    for mode, data in modes.items():
        with open_plain_file(path, mode) as file:
            file.write(data)
    (tmp_path / "linked").symlink_to(tmp_path)  # the user's own folder
    assert read_bytes(tmp_path / "linked" / "file") == b"Onetwo"


def test_links_at_temporary_names_lead_nowhere(tmp_path: Path, precious: Path) -> None:
    path = tmp_path / "step-1"
    for content in ("one", "two"):
        path.mkdir(exist_ok=True)
        (path / NEW_FOLDER).symlink_to(precious.parent)
        write_folder(path, filler(content))
    assert (path / "weights").read_text() == "two" and not path.is_symlink()
    assert os.listdir(precious.parent) == ["precious"]


def test_a_folder_is_no_link_that_leads_out(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run / "step-1", other):
        folder.mkdir(parents=True)
    (run / "best").symlink_to("step-1")
    (tmp_path / "linked").symlink_to(run)
    (run / "out").symlink_to(other)
    (run / "up").symlink_to("..")
    for folder in (run, tmp_path / "linked"):
        for name in ("step-1", "best", "nothing"):
            check_own_folder(folder / name, inside=folder)
        for name in ("out", "up"):
            with pytest.raises(UserError, match=rf"{name}: is a link to .*, outside {folder};"):
                check_own_folder(folder / name, inside=folder)


# ---- files ------------------------------------------------------------------------------------------------------


def test_text_json_digests_and_links(tmp_path: Path) -> None:
    text = "Größe\r\n\u2028zwei\n"
    write_text(tmp_path / "a", text)
    assert (tmp_path / "a").read_bytes() == text.encode() and os.listdir(tmp_path) == ["a"]
    write_text(tmp_path / "a", "abc")  # the test vector of FIPS 180
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest_file(tmp_path / "a") == sha256
    for name in ("one", "two"):
        point_link(tmp_path / "last", name)
        assert os.readlink(tmp_path / "last") == name
    assert sorted(os.listdir(tmp_path)) == ["a", "last"]
    path = tmp_path / "state.json"
    write_json(path, {"step": 3, "names": ["ä"], "best": None})
    assert read_json(path) == {"step": 3, "names": ["ä"], "best": None}
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"state\.json: is damaged"):
        read_json(path)
    with pytest.raises(UserError, match=r"none\.json: cannot be read"):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a"
    write_text(path, "old")
    with monkeypatch.context() as patch, pytest.raises(Injected):
        patch.setattr(os, step, fail)
        write_text(path, "new, and longer")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_killed_writer_left_goes_and_a_living_one_stays(tmp_path: Path) -> None:
    name = f".{hashlib.sha256(b'card').hexdigest()[:16]}"
    left, living = tmp_path / f"{name}.1.tmp", tmp_path / f"{name}.2.tmp"
    other = tmp_path / ".0123456789abcdef.3.tmp"  # of another file
    for path in (left, living, other):
        path.touch()
    with open_plain_file(living, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_text(tmp_path / "card", "text")
    assert set(tmp_path.iterdir()) == {living, other, tmp_path / "card"}


def test_make_folder_complains_at_once_and_works_in_many_threads(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(make_folder, [folder] * 500)) == {folder}
    assert os.listdir(folder) == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/inside", Path("/proc/nothing")):
        place = re.escape(str(path))
        complaint = rf"^{place}: cannot be written .*; choose another folder$"
        with pytest.raises(UserError, match=complaint):
            make_folder(path)


# ---- folders ----------------------------------------------------------------------------------------------------


def filler(content: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text(content)
        (folder / "state").write_text("{}")

    return fill


def test_a_folder_is_replaced_whole_and_verifies(tmp_path: Path) -> None:
    path = tmp_path / "deep/step-1"
    for content in ("one", "three"):
        write_folder(path, filler(content))
        verify(path)
        assert (path / "weights").read_text() == content
        entry = {"sha256": digest_file(path / "weights"), "size": len(content)}
        assert read_json(path / MANIFEST_FILE)["weights"] == entry
    assert sorted(os.listdir(path)) == [MANIFEST_FILE, "state", "weights"]
    assert os.listdir(path.parent) == ["step-1"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path: Path, is_there: bool) -> None:
    def fill(folder: Path) -> None:
        filler("new")(folder)
        fail()

    path = tmp_path / "step-1"
    if is_there:
        write_folder(path, filler("old"))
    with pytest.raises(Injected):
        write_folder(path, fill)
    assert os.listdir(tmp_path) == ["step-1"] * is_there
    if is_there:
        verify(path)
        assert sorted(os.listdir(path)) == [MANIFEST_FILE, "state", "weights"]
        assert (path / "weights").read_text() == "old"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("is_there", [False, True])
def test_a_kill_before_any_move_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """The old folder is whole, or the next process can finish the new one."""
    rename = os.rename
    outcomes = []
    for n in range(9):
        path = tmp_path / f"{n}" / "step-1"
        if is_there:
            write_folder(path, filler("old"))
        done: list[Path] = []

        def rename_or_die(source: Path, target: Path, n: int = n, done: list[Path] = done) -> None:
            if len(done) == n:
                raise Killed
            done.append(target)
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename_or_die)
            try:
                patch.setattr(
                    "shutil.rmtree", lambda *_, **__: None
                )  # a dead process clears nothing away
                write_folder(path, filler("new"))
                break
            except Killed:
                pass
        remove_leftovers(path.parent)
        verify(path)
        assert sorted(os.listdir(path)) == [MANIFEST_FILE, "state", "weights"]
        outcomes.append((path / "weights").read_text())
    assert outcomes == ["new"] * 3


def test_a_killed_fill_leaves_nothing_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    kill(
        start(
            """
        import sys, time
        from pathlib import Path
        from nmt.system.files import write_folder
        def fill(folder):
            (folder / "weights").write_text("half")
            print("here", flush=True)
            time.sleep(60)
        write_folder(Path(sys.argv[1]), fill)
        """,
            path,
        )
    )
    finish_write(path)  # there is nothing to finish
    assert os.listdir(path) == [NEW_FOLDER]
    with pytest.raises(UserError, match=f"has no {MANIFEST_FILE}"):
        verify(path)
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda path: path.with_name("notes").touch(), None),  # files of others do not matter
        (lambda path: path.with_name(CARD_FILE).write_text("edited"), None),
        (flip_last_byte, "sha256"),
        (lambda path: path.write_text("on"), "2 bytes, not 3"),
        (lambda path: path.write_text("one."), "4 bytes, not 3"),
        (Path.unlink, "missing"),
    ],
)
def test_verify_names_the_damaged_file(
    tmp_path: Path, damage: Callable[[Path], None], complaint: str | None
) -> None:
    def fill(folder: Path) -> None:
        filler("one")(folder)
        (folder / CARD_FILE).write_text("# Card")

    path = tmp_path / "step-1"
    write_folder(path, fill)
    damage(path / "weights")
    if complaint is None:
        verify(path)
    else:
        with pytest.raises(UserError, match=rf"step-1/weights: .*{complaint}"):
            verify(path)


def test_a_manifest_names_only_files_of_its_folder(tmp_path: Path, precious: Path) -> None:
    path = tmp_path / "step-1"
    write_folder(path, filler("one"))
    entry = {"sha256": digest_file(precious), "size": 8}
    for name in ("../outside/precious", str(precious), "..", ".hidden", "a/b", ""):
        write_json(path / MANIFEST_FILE, {name: entry})
        with pytest.raises(UserError, match=re.escape(f"is damaged (entry {name!r})")):
            verify(path)
    for damaged in ({"size": -1}, {"size": True}, {"sha256": "x"}, {"size": 8.0}):
        write_json(path / MANIFEST_FILE, {"weights": entry | damaged})
        with pytest.raises(UserError, match="is damaged"):
            verify(path)


# ---- locks ------------------------------------------------------------------------------------------------------


def test_a_lock_refuses_the_second_by_name_and_dies_with_its_holder(tmp_path: Path) -> None:
    holder = start(
        """
        import sys, time
        from pathlib import Path
        from nmt.system.files import lock
        with lock(Path(sys.argv[1]), "training"):
            print("here", flush=True)
            time.sleep(60)
        """,
        tmp_path,
    )
    refusal = rf"in use by training on .*pid {holder.pid}, since 20\S+00:00; .*another folder"
    try:
        with pytest.raises(UserError, match=refusal), lock(tmp_path, "averaging"):
            pass
    finally:
        kill(holder)
    for doing in ("averaging", "again"):
        with lock(tmp_path, doing):
            text = (tmp_path / ".lock").read_text()
            assert text.startswith(f"{doing} on {os.uname().nodename}, pid {os.getpid()}")
