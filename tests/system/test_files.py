"""What nmt.system.files promises: a file or folder is complete or absent, damage is seen, a lock
dies with its holder.

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
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pytest import MonkeyPatch, mark, raises
from support.checkout import ROOT

from nmt.system.errors import UserError
from nmt.system.files import (
    FileMode,
    FolderInUse,
    check_own_folder,
    digest_file,
    has_plain_file,
    lock,
    make_folder,
    open_plain_file,
    point_link,
    read_bytes,
    read_json,
    verify,
    write_folder,
    write_json,
    write_text,
)
from nmt.system.run_folder import MANIFEST_FILE


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
    child.communicate()


# ---- plain files only -------------------------------------------------------------------------------------------

MODES: tuple[FileMode, ...] = ("rb", "r+b", "a+b", "wb", "xb")
KINDS = {
    "link": "a link to outside/precious",
    "link to nothing": "a link to outside/nothing",
    "link to a device": "a link to /dev/zero",
    "folder": "a folder, not a file",
}


def put(kind: str, path: Path) -> None:
    """Put something else than a file there; beside it is a folder `outside` with a file."""
    outside = path.with_name("outside")
    outside.mkdir()
    (outside / "precious").write_text("precious")
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(KINDS[kind].removeprefix("a link to "))


def check_outside(path: Path) -> None:
    outside = path.with_name("outside")
    assert os.listdir(outside) == ["precious"]
    assert (outside / "precious").read_text() == "precious"


@mark.parametrize("kind", KINDS)
def test_only_plain_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    put(kind, path)
    message = f"{path}: is {KINDS[kind]}; remove it, or put a plain file there"
    for read in (has_plain_file, read_bytes, read_json, digest_file):
        with raises(UserError, match=f"^{re.escape(message)}$"):
            read(path)
    for mode in MODES:
        with raises(UserError, match=f"^{re.escape(message)}$"):
            open_plain_file(path, mode)
    check_outside(path)


def test_plain_files_open_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert not has_plain_file(path)
    with raises(FileNotFoundError):
        open_plain_file(path)
    with open_plain_file(path, "xb") as file:
        file.write(b"one")
    with open_plain_file(path, "a+b") as file:
        file.write(b"two")
    with open_plain_file(path, "r+b") as file:
        file.write(b"O")
    assert has_plain_file(path) and read_bytes(path) == b"Onetwo"
    (tmp_path / "linked").symlink_to(tmp_path)  # the user's own folder
    assert read_bytes(tmp_path / "linked" / "file") == b"Onetwo"


@mark.parametrize("kind", KINDS)
def test_a_write_replaces_what_is_there_and_not_what_it_leads_to(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    put(kind, path)
    if kind == "folder":
        with raises(UserError, match="file: is a folder, not a file"):
            write_text(path, "new")
    else:
        write_text(path, "new")
        assert not path.is_symlink() and path.read_text() == "new"
    check_outside(path)
    assert sorted(os.listdir(tmp_path)) == ["file", "outside"]


def test_a_link_in_place_of_a_temporary_name_leads_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    put("link", tmp_path / ".step-1.tmp")
    (tmp_path / ".step-1.old").symlink_to("outside")
    for content in ("one", "two"):
        write_folder(path, filler(content))
    assert (path / "weights").read_text() == "two" and not path.is_symlink()
    check_outside(path)
    assert sorted(os.listdir(tmp_path)) == ["outside", "step-1"]


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
            with raises(UserError, match=rf"{name}: is a link to .*, outside {folder};"):
                check_own_folder(folder / name, inside=folder)


# ---- files ------------------------------------------------------------------------------------------------------


def test_text_is_written_as_it_is(tmp_path: Path) -> None:
    text = "Größe\r\n\u2028zwei\n"
    write_text(tmp_path / "a", text)
    assert (tmp_path / "a").read_bytes() == text.encode()
    assert os.listdir(tmp_path) == ["a"]


@mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file(
    tmp_path: Path, monkeypatch: MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a"
    write_text(path, "old")
    with monkeypatch.context() as patch, raises(Injected):
        patch.setattr(os, step, fail)
        write_text(path, "new, and longer")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_text(path, "old")
    kill(
        start(
            """
        import os, sys, time
        from pathlib import Path
        from nmt.system.files import write_text
        os.replace = lambda *_: (print("here", flush=True), time.sleep(60))
        write_text(Path(sys.argv[1]), "new")
        """,
            path,
        )
    )
    assert path.read_text() == "old"


def test_json_round_trip_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 3, "names": ["ä"], "best": None})
    assert read_json(path) == {"step": 3, "names": ["ä"], "best": None}
    path.write_bytes(path.read_bytes()[:-4])
    with raises(UserError, match=r"state\.json: is damaged"):
        read_json(path)
    with raises(UserError, match=r"none\.json: cannot be read"):
        read_json(tmp_path / "none.json")


def test_digest_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")  # the test vector of FIPS 180
    assert (
        digest_file(tmp_path / "a")
        == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_point_replaces_a_link(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        (tmp_path / name).mkdir()
        point_link(tmp_path / "last", name)
        assert os.readlink(tmp_path / "last") == name
    assert sorted(os.listdir(tmp_path)) == ["last", "step-1", "step-2"]


def test_make_folder_can_be_called_by_many_threads_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: make_folder(tmp_path / "a"), range(2_000))) == {
            tmp_path / "a"
        }
    assert not list((tmp_path / "a").iterdir())


def test_make_folder_complains_at_once(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "a/b").is_dir()
    assert make_folder(tmp_path / "a/b") == tmp_path / "a/b"
    assert os.listdir(tmp_path / "a/b") == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/inside", Path("/proc/nothing")):
        with raises(
            UserError,
            match=rf"^{re.escape(str(path))}: cannot be written .*; choose another folder$",
        ):
            make_folder(path)


# ---- folders ----------------------------------------------------------------------------------------------------


def filler(content: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text(content)
        (folder / "state").write_text("{}")

    return fill


def test_a_folder_appears_whole_and_verifies(tmp_path: Path) -> None:
    path = tmp_path / "deep/step-1"
    write_folder(path, filler("one"))
    verify(path)
    assert sorted(os.listdir(path)) == [MANIFEST_FILE, "state", "weights"]
    assert read_json(path / MANIFEST_FILE)["weights"] == {
        "sha256": digest_file(path / "weights"),
        "size": 3,
    }
    write_folder(path, filler("three"))
    verify(path)
    assert (path / "weights").read_text() == "three"
    assert os.listdir(path.parent) == ["step-1"]


def test_of_two_who_write_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        with raises(FolderInUse, match="twice: is in use by a command that writes it on"):
            write_folder(tmp_path / "twice", lambda other: write_text(other / "a", "second"))
        write_text(folder / "a", "first")

    (tmp_path / ".twice.lock.tmp").write_text("of a killed process")
    write_folder(tmp_path / "twice", fill)
    verify(tmp_path / "twice")
    assert (tmp_path / "twice" / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["twice"]


@mark.parametrize("is_there", [False, True])
def test_a_failure_in_the_middle_leaves_no_half_folder(tmp_path: Path, is_there: bool) -> None:
    def fill(folder: Path) -> None:
        filler("new")(folder)
        fail()

    path = tmp_path / "step-1"
    if is_there:
        write_folder(path, filler("old"))
    with raises(Injected):
        write_folder(path, fill)
    assert os.listdir(tmp_path) == ["step-1"] * is_there
    if is_there:
        verify(path)
        assert (path / "weights").read_text() == "old"


@mark.parametrize("is_there", [False, True])
def test_a_killed_writer_leaves_no_half_folder(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "step-1"
    if is_there:
        write_folder(path, filler("old"))
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
    assert path.exists() == is_there
    write_folder(path, filler("new"))  # what the dead one left behind is in nobody's way
    verify(path)
    assert (path / "weights").read_text() == "new"
    assert os.listdir(tmp_path) == ["step-1"]


def damage_nothing(path: Path) -> None:
    path.with_name("notes").write_text("files of others do not matter")


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def remove(path: Path) -> None:
    path.unlink()


@mark.parametrize(
    "damage, complaint",
    [
        (damage_nothing, None),
        (flip_last_byte, "sha256"),
        (truncate, "2 bytes, not 3"),
        (lengthen, "4 bytes, not 3"),
        (remove, "missing"),
    ],
)
def test_verify_names_the_damaged_file(
    tmp_path: Path, damage: Callable[[Path], None], complaint: str | None
) -> None:
    path = tmp_path / "step-1"
    write_folder(path, filler("one"))
    damage(path / "weights")
    if complaint is None:
        verify(path)
    else:
        with raises(
            UserError, match=rf"step-1/weights: .*{complaint}.*; if it is a prepared store"
        ):
            verify(path)


def test_verify_wants_a_manifest_that_stays_in_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    write_folder(path, filler("one"))
    (tmp_path / "outside").write_text("x")
    write_json(
        path / MANIFEST_FILE,
        {"../outside": {"sha256": digest_file(tmp_path / "outside"), "size": 1}},
    )
    with raises(UserError, match="outside"):
        verify(path)
    (path / MANIFEST_FILE).unlink()
    with raises(UserError, match=rf"has no {MANIFEST_FILE}, so it is no checkpoint or store; give"):
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
    try:
        with (
            raises(
                UserError,
                match=rf"in use by training on .*pid {holder.pid}\b.*choose another folder",
            ),
            lock(tmp_path, "averaging"),
        ):
            pass
    finally:
        kill(holder)
    with lock(tmp_path, "averaging"):
        assert (
            f"averaging on {os.uname().nodename}, pid {os.getpid()}"
            in (tmp_path / ".lock").read_text()
        )
    with lock(tmp_path, "again"):
        assert (tmp_path / ".lock").read_text().startswith("again on ")


def test_a_lock_file_that_its_last_holder_removes_is_made_anew(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    path, flock = tmp_path / ".run.lock", fcntl.flock
    removals = [path.unlink]

    def remove_and_lock(*args: int) -> None:
        if removals:
            removals.pop()()
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with lock(tmp_path / "run", "training", path.name):
        assert path.exists()  # otherwise another could take it
        with raises(UserError, match="in use by training"):
            lock(tmp_path / "run", "averaging", path.name).__enter__()
    assert not path.exists()


@mark.parametrize("kind", KINDS)
def test_a_lock_is_a_plain_file(tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / ".lock")
    with raises(UserError, match=rf"/\.lock: is {KINDS[kind]}"), lock(tmp_path, "training"):
        pass
    check_outside(tmp_path / ".lock")


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


def test_a_file_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    locked: list[int] = []

    def lock_late(file: BinaryIO, operation: int, flock: Any = fcntl.flock) -> None:
        if not locked:
            next(tmp_path.glob(".*.tmp")).unlink()  # by another process that writes the same file
        locked.append(operation)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text" and len(locked) == 2
    assert os.listdir(tmp_path) == ["file"]
