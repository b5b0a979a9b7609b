"""kill -9 at any moment of any command but nmt-train (test_kills.py) loses work, but nothing else.

Each command is killed before the first change that it makes to a file, before the second, and so on
to the last. Started again, it ends in what an undisturbed start makes, and nothing is left over.
`make test` tries two moments of two commands, `make soak` all moments of all.
"""

import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from pytest import fixture, mark
from support.canary import digest_tensors
from support.faults import Faults
from support.forks import Start
from support.ground import Ground
from support.rings import amount
from support.text_lines import read_text_lines

# Files of results, and what differs in them between any two starts.
TIMES = re.compile(
    rb'"(when|seconds|[a-z_]*_s|metrics_bytes|memory_bytes|command)": [^,\n}]+|'
    rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\dZ?|sha256 of all above: \w+"
)


@dataclass(frozen=True)
class Case:
    """A command whose files are all in the folder WORK, which begins as a copy of some others."""

    command: str
    argv: str  # WORK and GROUND stand for the two folders
    begins_with: tuple[str, ...] = ()
    watched: str = ""  # what of WORK is watched; everything


DROPOUT = "vocab.bpe_dropout=0.1"
PREPARE = "--config GROUND/toy.yaml data.store=WORK/store"
CASES = {
    "prepare with BPE-dropout": Case("prepare", f"{PREPARE} {DROPOUT}"),
    "train with BPE-dropout": Case(
        "train",
        f"{PREPARE} out=WORK/run {DROPOUT} training.steps=4",
        ("store",),
        watched="store.epochs",
    ),
    "average": Case("average", "WORK/run --last 2", ("run",)),
    "export to safetensors": Case("export", "GROUND/run --to safetensors -o WORK/export"),
    "export to ctranslate2": Case("export", "GROUND/run --to ctranslate2 -o WORK/export"),
    "export to huggingface": Case("export", "GROUND/run --to huggingface -o WORK/export"),
    "eval --ladder --json": Case(
        "eval",
        "WORK/run --src GROUND/valid.en --ref GROUND/valid.de --ladder --force "
        "--json WORK/scores.json --output WORK/out.txt",
        ("run",),
    ),
}
QUICK_CASES = ("average", "export to safetensors")


@fixture(scope="module")
def ground(ground: Ground) -> Ground:
    """A corpus, its store and a run."""
    ground.finish("run")
    return ground


@dataclass
class Scene:
    """Where one command is killed again and again."""

    case: Case
    ground: Ground
    work: Path
    changes: list[str] = field(default_factory=list)

    def begin(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name in self.case.begins_with:
            shutil.copytree(self.ground.folder / name, self.work / name, symlinks=True)

    def start(self, die_at: int = 0) -> Start:
        """Start the command, which dies before the change of that number."""
        argv = self.case.argv.replace("WORK", str(self.work))
        argv = argv.replace("GROUND", str(self.ground.folder))
        faults = Faults(watched=f"{self.work}/{self.case.watched}", die_at=die_at)
        folder = self.work.with_name("ranks")
        start = Start(folder, argv.split(), faults=faults, command=self.case.command)
        codes = start.wait()
        assert codes == [-signal.SIGKILL if die_at else 0] or codes == [0], start.told()
        self.changes = read_text_lines(start.folders[0] / "changes")
        return start

    def list_results(self) -> dict[str, str]:
        """Every file and link of the folder, and what must be the same in any two starts."""
        files = [path for path in self.work.rglob("*") if path.is_symlink() or not path.is_dir()]
        return {str(path.relative_to(self.work)): digest(path) for path in files}


def digest(path: Path) -> str:
    if path.is_symlink():
        return str(path.readlink())
    if path.name in ("manifest.json", ".sources.json", "status.json", "report.html", ".lock"):
        return ""  # it tells of the others, or of times
    if path.suffix == ".safetensors":
        return digest_tensors(path)
    return sha256(TIMES.sub(b"", path.read_bytes())).hexdigest()


def list_moments() -> Iterator[int]:
    yield from amount([9, 21], range(1, 10_000))


@mark.timeout(3600)
@mark.parametrize("name", amount(QUICK_CASES, tuple(CASES)))
def test_a_killed_command_starts_again(name: str, ground: Ground, tmp_path: Path) -> None:
    scene = Scene(CASES[name], ground, tmp_path / "work")
    scene.begin()
    scene.start()
    whole = scene.list_results()
    n_changes, n_kills = len(scene.changes), 0
    for moment in list_moments():
        scene.begin()
        scene.start(die_at=moment)
        if len(scene.changes) < moment or n_kills == n_changes:
            break
        n_kills += 1
        told = scene.changes[-1]
        again = scene.start()
        assert scene.list_results() == whole, f"killed before {told}\n{again.told()}"
    print(f"\n{name}: {n_kills} kills, before each of {n_changes} changes of a file")
    assert n_kills == amount(2, n_changes)
