"""Where caches go when the home cannot be written, or is none."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_errors, read_stderr

from nmt.system import caches
from nmt.system.caches import COMPILER_CACHES, provide_caches
from nmt.system.errors import UserError
from nmt.system.progress import say_once

VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "NUMBA_CACHE_DIR",
    "HF_HOME",
    "SACREBLEU",
)


@fixture
def home(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The home of an environment that holds nothing else, with an empty current folder."""
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path / "home")})
    monkeypatch.setattr(caches, "make_temporary_folder", lambda: str(tmp_path / "temporary"))
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    return tmp_path / "home"


def check_moved(tmp_path: Path) -> None:
    provide_caches()
    provide_caches()  # nothing changes
    assert {os.environ[name] for name in VARIABLES} == {str(tmp_path / "temporary")}
    assert list((tmp_path / "current").iterdir()) == []


def test_caches_are_kept_in_the_home(home: Path) -> None:
    provide_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{home}/.cache/nmt/inductor"
    assert os.environ["TRITON_CACHE_DIR"] == f"{home}/.cache/nmt/triton"
    assert "HF_HOME" not in os.environ and "SACREBLEU" not in os.environ


@mark.parametrize("name", ["/dev/null", "/proc/nope", "~", "relative", "/" + "x" * 300])
def test_without_a_home_caches_are_temporary(name: str, home: Path, tmp_path: Path) -> None:
    os.environ["HOME"] = name
    check_moved(tmp_path)


def test_an_unknown_user_has_no_home(home: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    check_moved(tmp_path)


# Each makes a way for another user to put something into the numba folder of `caches`; and where.
STRANGER = 54321
INTRUSIONS: dict[str, Callable[[Path], object]] = {
    "caches are another user's": lambda user: chown(user),
    "everybody writes in caches": lambda user: user.chmod(0o777),
    "a group writes in caches": lambda user: give_to_group(user),
    "everybody writes in ours": lambda user: (user / "nmt").chmod(0o777),
    "ours is a sticky folder": lambda user: (user / "nmt").chmod(0o1777),
    "ours is a link to another's": lambda user: exchange(user / "nmt", owner=STRANGER),
    "ours is a link to all": lambda user: exchange(user / "nmt", mode=0o1777),
    "numba is a link": lambda user: exchange(user / "nmt" / "numba", owner=STRANGER),
    "numba is another user's": lambda user: chown(user / "nmt" / "numba"),
    "a file is another user's": lambda user: chown(user / "nmt" / "numba" / "a" / "f.nbi"),
    "a file is a link": lambda user: (user / "nmt" / "numba" / "a" / "g.nbi").symlink_to("f.nbi"),
    "a file is a pipe": lambda user: os.mkfifo(user / "nmt" / "numba" / "a" / "g.nbi"),
}
NEEDS_ROOT = ("another", "group", "numba is a link")


def chown(path: Path, owner: int = STRANGER) -> None:
    os.chown(path, owner, owner)


def give_to_group(path: Path) -> None:
    os.chown(path, -1, STRANGER)
    path.chmod(0o775)


def exchange(folder: Path, owner: int = 0, mode: int = 0o755) -> None:
    """Put a link to a folder of that owner in the place of a folder."""
    other = folder.parents[2] / "elsewhere"
    folder.rename(other)
    other.chmod(mode)
    if owner:
        chown(other, owner)
    folder.symlink_to(other)


@fixture
def open_home(home: Path) -> Iterator[Path]:
    """A home that others can enter, which pytest's folders are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        os.environ["HOME"] = f"{folder}/home"
        yield Path(folder) / "home"


@mark.parametrize("name", INTRUSIONS)
def test_code_that_another_user_could_exchange_is_not_run(
    name: str, open_home: Path, tmp_path: Path, capsys: Capture
) -> None:
    if os.geteuid() != 0 and any(word in name for word in NEEDS_ROOT):
        pytest.skip("only root can give files away")
    code = open_home / ".cache" / "nmt" / "numba" / "a"
    code.mkdir(parents=True)
    (code / "f.nbi").touch()
    provide_caches()
    assert os.environ.pop("NUMBA_CACHE_DIR") == str(code.parent), "what is this user's is used"
    for variable in COMPILER_CACHES:
        os.environ.pop(variable, None)

    INTRUSIONS[name](open_home / ".cache")
    say_once.cache_clear()
    provide_caches()
    assert os.environ["NUMBA_CACHE_DIR"] == str(tmp_path / "temporary")
    (line,) = read_errors(capsys)
    assert (
        "so compiled code is not kept; remove it, or make it yours and writable by you alone"
        in line
    )
    assert "HF_HOME" not in os.environ  # it holds no compiled code, and can be written


def test_own_folders_stay_caches(home: Path, tmp_path: Path, capsys: Capture) -> None:
    """With a link to a disk of their own, in a folder like /tmp, and a umask that hides nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o1777)
    (disk / "mine").mkdir(0o755)
    home.mkdir()
    (home / ".cache").symlink_to(disk / "mine")
    usual = os.umask(0)
    try:
        for _ in range(2):
            for variable in COMPILER_CACHES:
                os.environ.pop(variable, None)
            provide_caches()
            assert os.environ["NUMBA_CACHE_DIR"] == str(disk / "mine" / "nmt" / "numba")
            (disk / "mine" / "nmt" / "numba" / "code").mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(usual)
    assert stat.S_IMODE((disk / "mine" / "nmt").stat().st_mode) == 0o700
    assert read_stderr(capsys) == ""


def test_where_no_code_is_kept_downloads_are_in_a_folder_like_any(open_home: Path) -> None:
    own = open_home / ".cache"
    (own / "nmt").mkdir(parents=True)
    (own / "nmt").chmod(0o777)
    provide_caches()
    assert (own / "huggingface").stat().st_mode == own.stat().st_mode


def test_earlier_downloads_are_read_where_they_are(home: Path, tmp_path: Path) -> None:
    """Nothing can be made in these folders: as a read-only disk, but root can write to any."""
    os.environ["HOME"] = "/proc/self"
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "read-only")
    hub = tmp_path / "read-only" / "huggingface"
    hub.mkdir(parents=True)

    def refuse(path: Path, mode: int) -> Path:
        raise UserError(f"{path}: cannot be written")

    with MonkeyPatch.context() as patch:
        patch.setattr(caches, "make_folder", refuse)
        provide_caches()
    assert os.environ["HF_HOME"] == str(tmp_path / "temporary")
    assert os.environ["HF_HUB_CACHE"] == str(hub / "hub")


def test_a_folder_of_the_user_that_cannot_be_written_is_told(
    home: Path, tmp_path: Path, capsys: Capture
) -> None:
    os.environ["TRITON_CACHE_DIR"] = "/dev/null/triton"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp_path}/mine"
    provide_caches()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "temporary")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/mine"
    (line,) = read_errors(capsys)
    assert line.startswith("warning: TRITON_CACHE_DIR=/dev/null/triton: cannot be written")


CODE = """
import os
from nmt.system.caches import provide_caches

provide_caches()
folder = os.environ["TRITON_CACHE_DIR"]
print(folder, oct(os.stat(folder).st_mode), flush=True)
if not os.fork():
    raise SystemExit  # a fork leaves the folder
os.wait()
assert os.path.isdir(folder)
"""


def test_a_temporary_folder_is_private_and_goes_with_its_process(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", CODE],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "HOME": "/dev/null", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    folder, mode = told.stdout.split()
    assert stat.S_IMODE(int(mode, 8)) == 0o700 and Path(folder).parent == tmp_path, told.stderr
    assert told.returncode == 0 and list(tmp_path.iterdir()) == []


def test_nothing_at_all_can_be_written(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/dev/null"})

    def refuse(prefix: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with raises(UserError, match="set TMPDIR"):
        provide_caches()
