"""Each command where its home cannot be written, and where the disk is full.

A home costs time at most: the results are those of an undisturbed run, the current folder gets no
`~`, and temporary folders are gone. Every command runs without a home and as a user without one;
every other kind of home is tried with one command, because which folder is taken does not depend on
the command.

A full disk ends a command in one line, at every page of what it writes; what is there then is
complete or absent, and with room again the same command gives what it gives undisturbed. Homes and
disks are not combined: nothing that a command makes is below the home. A run may be mounted;
test_fixed_folders.py has other mounted results. `make soak` tries everything.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest import MonkeyPatch, fixture, mark
from support.canary import record
from support.capture import Capture, read_errors
from support.ground import check_readable
from support.in_process import succeed
from support.rings import amount
from support.small_disk import SmallDisk, mount_small_disk
from support.toy_commands import CASES, COMMANDS, MAINS, Bench, Outcome, make_bench, results

from nmt.corpus.prepare import WORK_FOLDER
from nmt.system.files import verify
from nmt.system.run_folder import MANIFEST_FILE, RunFolder

# Another user, who may read everything, because Python itself may lie in somebody's home.
NOBODY = ["setpriv", "--reuid", "54321", "--clear-groups"]
for kind in ("inh", "ambient", "bounding"):
    suffix = "set" if kind == "bounding" else "caps"
    NOBODY.append(f"--{kind}-{suffix}=-all,+dac_read_search")
MOUNT = 'mount -t tmpfs -o ro none "$HOME" && exec "$@"'
READ_ONLY = ["unshare", "--mount", "sh", "-c", MOUNT, "sh"]

HOMES: dict[str, tuple[list[str], str | None]] = {
    "device": ([], "/dev/null"),
    "impossible": ([], "/proc/nope"),
    "not expanded": ([], "~"),
    "relative": ([], "home"),
    "unset, of an unknown user": (NOBODY, None),
    "missing, of another user": (NOBODY, "/nonexistent"),
    "of another user": (NOBODY, "{home}"),
    "root folder of another user": (NOBODY, "/"),
    "read-only": (READ_ONLY, "{home}"),
}
UNSET = "unset, of an unknown user"


def list_homes() -> Iterator[tuple[str, str]]:
    yield from amount([("average", "impossible")], [])
    for case in amount([], CASES):
        yield case, "device"
        yield case, UNSET
    for home in amount([], [*HOMES]):
        if home not in ("device", UNSET):
            yield "translate", home


@fixture(scope="module")
def bench(module_path: Path) -> Bench:
    return make_bench(module_path)


@fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users can reach, as they cannot that of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@mark.parametrize("case, home", list_homes())
def test_a_home_costs_time_at_most(
    case: str, home: str, bench: Bench, shared_folder: Path, tmp_path: Path
) -> None:
    prefix, name = HOMES[home]
    if prefix and subprocess.run([*prefix, "true"], env={"HOME": str(tmp_path)}).returncode:
        pytest.skip(f"needs root, for {prefix[0]}")
    temporary, home_folder = tmp_path / "temporary", tmp_path / "home"
    temporary.mkdir(mode=0o1777)
    temporary.chmod(0o1777)
    home_folder.mkdir(mode=0o755)
    before = record(home_folder)
    changes = {
        "HOME": name and name.replace("{home}", str(home_folder)),
        "TMPDIR": str(temporary),
        "XDG_CACHE_HOME": None,
        "XDG_STATE_HOME": None,
    }
    outcome = bench.start(case, shared_folder / "work", prefix=prefix, changes=changes)
    assert outcome == bench.expect(case)
    assert list(temporary.iterdir()) == []
    assert record(home_folder) == before


# ---- full disks -------------------------------------------------------------------------------------------------

PAGE = 4096
N_PAGES = 256  # of the small disk
WRITING_CASES = [*MAINS, "export huggingface", "export ctranslate2"]
# test_checkpoint_writer.py fills the disk of a training.
USUAL_CASES = ["prepare", "average", "eval", "translate", "export"]


class Roomy:
    """The answer to the question how much is free: somebody else takes it before the write."""

    free = 1 << 40


def run_here(bench: Bench, case: str, work: Path, capsys: Capture) -> Outcome:
    name, _, export_format = case.partition(" ")
    argv = bench.argv(name, work)
    if export_format:
        argv[argv.index("safetensors")] = export_format
    capsys.readouterr()
    code = MAINS[COMMANDS.get(name, name)](argv)
    return Outcome(code, b"", results(work))


def check_complete_or_absent(work: Path, whole: Outcome, translated: bytes) -> None:
    """What has its name is what an undisturbed run makes; what is hidden or being made is nothing.
    Translations are written as they come, and the next start goes on after them.
    """
    for path in work.iterdir():
        if path.name == "run":
            check_readable(RunFolder(path))
        elif path.is_dir() and not path.name.startswith("."):
            if not (path / MANIFEST_FILE).exists():
                assert (path / WORK_FOLDER).is_dir(), path  # an unfinished store
                continue
            verify(path)
        elif whole.results.keys() == {"out.txt"}:
            assert translated.startswith(path.read_bytes())
        elif path.is_file() and not path.name.startswith("."):
            assert results(work)[path.name] == whole.results[path.name]


@mark.timeout(amount(60, 1_000))
@mark.parametrize("case", amount(USUAL_CASES, WRITING_CASES))
def test_a_full_disk(
    case: str,
    bench: Bench,
    small_disk: SmallDisk,
    capsys: Capture,
    monkeypatch: MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Roomy)
    bench.expect("train")
    work = small_disk.path / "work"
    work.mkdir()
    whole = run_here(bench, case, work, capsys)
    assert whole.code == 0
    text = work / "out.txt"
    translated = text.read_bytes() if text.exists() else b""
    given = record(bench.folder)
    n_failures = 0
    step = amount(24, 12 if case == "train" else 2)  # a training takes a second
    # Twice as much is there while the old result is being replaced, or has been moved.
    for n_pages in range(0, N_PAGES, step):
        shutil.rmtree(work)
        work.mkdir()
        ballast = small_disk.fill(n_pages * PAGE)
        outcome = run_here(bench, case, work, capsys)
        lines = read_errors(capsys)
        ballast.unlink()
        check_complete_or_absent(work, whole, translated)
        if outcome == whole:
            break
        n_failures += 1
        if outcome.code == 0:
            assert any("warning" in line for line in lines), lines
        else:
            assert outcome.code in (1, 2) and f"nmt-{case.split()[0]}: " in lines[-1], lines
            assert "No space left" in lines[-1] or "disk" in lines[-1], lines
        if n_failures <= amount(1, N_PAGES):
            assert run_here(bench, case, work, capsys) == whole, f"after {n_pages} pages"
    else:
        pytest.fail("the disk was never large enough")
    assert n_failures and record(bench.folder) == given

    # what was there stays
    if case.startswith(("average", "export")):
        small_disk.fill(2 * PAGE)
        assert run_here(bench, case, work, capsys) == Outcome(1, b"", whole.results)
        check_complete_or_absent(work, whole, translated)


# ---- mount points -----------------------------------------------------------------------------------------------


@mark.soak  # test_fixed_folders.py mounts results
@mark.parametrize("name", ["run", "run/checkpoints"])
def test_a_run_or_its_checkpoints_may_be_mounted(
    name: str, bench: Bench, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Roomy)
    whole = bench.expect("train").results
    folder = tmp_path / "work" / name
    folder.parent.mkdir(parents=True)
    with mount_small_disk(folder, megabytes=8):  # room for the report
        train = MAINS["train"]
        argv = bench.argv("train", tmp_path / "work")
        assert train([*argv, "training.steps=3"]) == train(argv) == 0
        assert results(tmp_path / "work") == whole
        succeed(MAINS["average"], tmp_path / "work/run", "--last", "2")
