"""Where caches go when the home cannot be written, or is none."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nmt.system import caches
from nmt.system.caches import provide_caches
from nmt.system.errors import UserError

VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "NUMBA_CACHE_DIR",
    "HF_HOME",
    "SACREBLEU",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


@pytest.mark.parametrize("name", ["/dev/null", "/proc/nope", "~", "relative", "/" + "x" * 300])
def test_without_a_home_caches_are_temporary(name: str, home: Path, tmp_path: Path) -> None:
    os.environ["HOME"] = name
    check_moved(tmp_path)


def test_an_unknown_user_has_no_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    check_moved(tmp_path)


def test_a_cache_of_another_user_is_not_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".cache" / "nmt").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    provide_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "temporary")
    assert "HF_HOME" not in os.environ  # it holds no compiled code, and can be written


def test_earlier_downloads_are_read_where_they_are(home: Path, tmp_path: Path) -> None:
    """Nothing can be made in these folders: as a read-only disk, but root can write to any."""
    os.environ["HOME"] = "/proc/self"
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "read-only")
    hub = tmp_path / "read-only" / "huggingface"
    hub.mkdir(parents=True)

    def refuse(path: Path) -> Path:
        raise UserError(f"{path}: cannot be written")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "make_folder", refuse)
        provide_caches()
    assert os.environ["HF_HOME"] == str(tmp_path / "temporary")
    assert os.environ["HF_HUB_CACHE"] == str(hub / "hub")


def test_a_folder_of_the_user_that_cannot_be_written_is_told(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["TRITON_CACHE_DIR"] = "/dev/null/triton"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp_path}/mine"
    provide_caches()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "temporary")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/mine"
    (line,) = capsys.readouterr().err.splitlines()
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


def test_nothing_at_all_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/dev/null"})

    def refuse(prefix: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(UserError, match="set TMPDIR"):
        provide_caches()
