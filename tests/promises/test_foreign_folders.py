"""Runs, stores, checkpoints and averages of a stranger, in which a file is a link or a folder.

Whatever has the name of a file that a command opens: what the user keeps elsewhere stays as it is
to the byte and to the time of its last change, and one line names the file and what it is.
`make test` tries one kind of link in each place and folders in some, NMT_SOAK=1 all kinds.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.canary import record
from support.finished_run import (
    finished_run,  # noqa: F401 (the fixture `whole`)
    intact_run,  # noqa: F401 (the fixture `ground`)
    score_average,
)
from support.soaking import IS_SOAK, Ground

from nmt.commands.average import main as nmt_average
from nmt.commands.export import main as nmt_export
from nmt.commands.prepare import main as nmt_prepare
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate

SETTINGS = (
    "training.steps=10",
    "training.log_every=5",
    "training.validate_every=5",
    "training.checkpoint_every=5",
    "training.keep_checkpoints=10",
    "evaluation.bleu=false",
    "decoding.max_extra=1",
)
NEWEST = "run/checkpoints/step-0000010"
CHECKPOINT_FILES = (
    "config.yaml",
    "manifest.json",
    "model.safetensors",
    "state.json",
    "vocab.model",
)
TRAIN_FILES = ("train.src.ids.npy", "train.src.offsets.npy", "train.tgt.ids.npy")
DEV_FILES = ("valid.src.ids.npy", "valid.src.txt", "valid.tgt.offsets.npy", "valid.tgt.txt")
STORE_FILES = ("manifest.json", "ledger.json", "vocab.model", *TRAIN_FILES, *DEV_FILES)
KINDS = ("link", "link to nothing", "link to a device", "folder")

# What becomes of a command if one of the files is of another kind:
REFUSED = "refused"  # one line and exit code 2
WARNED = "warned"  # one line, and the work is done without the file
REPLACED = "replaced"  # by a new file; a folder is refused or warned of


def list_commands(ground: Ground) -> dict[str, Callable[[], int]]:
    run, text = str(ground.folder / "run"), str(ground.folder / "valid.en")
    average = f"{run}/average"
    train = ["--config", str(ground.config), f"out={run}", *SETTINGS, "training.steps=11"]
    prepare = ["--config", str(ground.config)]
    out = str(ground.folder / "exported")
    return {
        "train": lambda: nmt_train(train),
        "draw epochs": lambda: nmt_train([*train, "out=" + run + "2", "vocab.bpe_dropout=0.1"]),
        "average": lambda: nmt_average([run, "--last", "2"]),
        "average the best": lambda: nmt_average([run, "--best", "2"]),
        "score the average": lambda: score_average(ground),
        "translate": lambda: nmt_translate([run, "-i", text, "-o", out, "--beam", "1"]),
        "export the average": lambda: nmt_export([average, "--to", "safetensors", "-o", out]),
        "prepare": lambda: nmt_prepare(prepare),
        "prepare anew": lambda: nmt_prepare([*prepare, f"data.store={ground.folder}/new"]),
        "inspect": lambda: nmt_prepare(["--inspect", str(ground.folder / "store")]),
    }


@dataclass(frozen=True)
class Place:
    command: str
    name: str  # below the ground
    outcome: str

    def __str__(self) -> str:
        return f"{self.command}: {self.name}"


def list_places() -> list[Place]:
    places = [
        Place("train", "run/.lock", REFUSED),
        Place("train", "run/config.yaml", REFUSED),
        Place("train", "run/metrics.jsonl", REFUSED),
        Place("train", "run/vocab.model", REPLACED),
        Place("train", "run/status.json", REPLACED),
        Place("train", "run/report.html", REPLACED),
        Place("train", f"{NEWEST}/optimizer.safetensors", WARNED),
        Place("draw epochs", "run2/.lock", REFUSED),
        Place("average", "run/config.yaml", REFUSED),
        Place("average", f"{NEWEST}/optimizer.safetensors", REFUSED),
        Place("average", "run/results.json", WARNED),
        Place("average", "run/average/README.md", REFUSED),
        Place("average the best", "run/metrics.jsonl", REFUSED),
        Place("score the average", "run/.results.lock", WARNED),
        Place("score the average", "run/results.json", WARNED),
        Place("score the average", "run/config.yaml", WARNED),
        Place("score the average", "run/average/README.md", WARNED),
        Place("prepare", "store/manifest.json", REFUSED),
        Place("prepare", "store/ledger.json", REFUSED),
        Place("prepare", "store/.sources.json", REFUSED),
        Place("prepare anew", "new/.nmt-prepare/.lock", REFUSED),
    ]
    for name in CHECKPOINT_FILES:
        places += [
            Place("train", f"{NEWEST}/{name}", WARNED),
            Place("translate", f"{NEWEST}/{name}", WARNED),
            Place("average", f"{NEWEST}/{name}", REFUSED),
            Place("score the average", f"run/average/{name}", REFUSED),
            Place("export the average", f"run/average/{name}", REFUSED),
        ]
    for name in STORE_FILES:
        places += [
            Place("train", f"store/{name}", REFUSED),
            Place("inspect", f"store/{name}", REFUSED),
        ]
    return places


def list_cases() -> Iterator[tuple[Place, str]]:
    for i, place in enumerate(list_places()):
        is_usual = {KINDS[i % 3]: True, "folder": i % 4 == 0}  # a link everywhere
        for kind in KINDS:
            if IS_SOAK or is_usual.get(kind):
                yield place, kind


@pytest.fixture(scope="module")
def outside(whole: Ground) -> Path:
    """What the user keeps elsewhere: a file, and a copy of everything that the run has."""
    folder = Path(f"{whole.folder}.outside")
    shutil.copytree(f"{whole.folder}.whole", folder, symlinks=True)
    (folder / "precious").write_bytes(b"precious data\nwithout an end")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def before(outside: Path) -> dict[str, object]:
    return record(outside)


def put(kind: str, path: Path, outside: Path) -> str:
    """Put something else in the place of a file, and return what messages call it."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
        return "is a folder"
    names = {"link": "precious", "link to nothing": "nothing", "link to a device": "/dev/zero"}
    path.symlink_to(outside / names[kind])
    return "is a link"


@dataclass(frozen=True)
class Trial:
    """What became of a command that met something else in the place of a file."""

    code: int
    lines: list[str]
    about_path: list[str]

    def check(self, outcome: str) -> None:
        if outcome == REFUSED:
            assert self.code == 2 and self.lines[-1:] == self.about_path, self
            assert "error: " in self.about_path[0], self
        elif outcome == WARNED:
            assert self.code == 0 and len(self.about_path) == 1, self
            assert "warning: " in self.about_path[0], self
        else:
            assert self.code == 0 and not self.about_path, self


TryCommand = Callable[[str, Path], Trial]


@pytest.fixture
def try_command(
    ground: Ground, outside: Path, before: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> TryCommand:
    """Run a command that meets `path`; nothing outside may change."""

    def run(command: str, path: Path) -> Trial:
        capsys.readouterr()
        code = list_commands(ground)[command]()
        lines = capsys.readouterr().err.splitlines()
        assert record(outside) == before
        return Trial(code, lines, [line for line in lines if f"{path}: " in line])

    return run


@pytest.mark.timeout(20)  # no device is waited for
@pytest.mark.parametrize("place, kind", list_cases(), ids=str)
def test_nothing_but_plain_files_is_opened(
    place: Place, kind: str, ground: Ground, outside: Path, try_command: TryCommand
) -> None:
    path = ground.folder / place.name
    what = put(kind, path, outside)
    trial = try_command(place.command, path)
    if place.outcome != REPLACED:
        trial.check(place.outcome)
    elif kind == "folder":
        assert trial.code in (0, 2) and trial.about_path, trial
    else:
        trial.check(REPLACED)
        assert path.is_file() and not path.is_symlink()
    for line in trial.about_path:
        assert what in line or "README.md: was edited" in line


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "command, name, target, outcome",
    [
        ("train", "run/checkpoints", "run/checkpoints", REFUSED),
        ("train", "run/checkpoints", "empty", REFUSED),
        ("train", NEWEST, NEWEST, WARNED),
        ("train", "run/checkpoints/best", NEWEST, REPLACED),
        ("train", "run/checkpoints/last", "empty", REPLACED),
        ("translate", "run/checkpoints", "run/checkpoints", REFUSED),
        ("translate", NEWEST, NEWEST, WARNED),
        ("average", NEWEST, NEWEST, REFUSED),
        ("average", "run/average", "run/average", REFUSED),
        ("average", "run/average", "empty", REFUSED),
        ("average", "run/.average.tmp", "run", REPLACED),
        ("average", "run/.average.old", "run/average", REPLACED),
        ("draw epochs", "store.epochs", "empty", REFUSED),
        ("prepare anew", "new/.nmt-prepare", "empty", REFUSED),
    ],
)
def test_no_folder_is_a_link_out_of_the_run(
    command: str,
    name: str,
    target: str,
    outcome: str,
    ground: Ground,
    outside: Path,
    try_command: TryCommand,
) -> None:
    path = ground.folder / name
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(outside / target)
    try_command(command, path).check(outcome)
    if outcome == REPLACED:
        assert not os.path.lexists(path) or path.resolve().is_relative_to(ground.folder.resolve())


def test_links_of_the_user_and_links_inside_work(ground: Ground, tmp_path: Path) -> None:
    """The user's own folder, corpora and model may lie behind links; `best` and `last` are links."""
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    for name in ("run", "store", "train.en"):
        os.rename(ground.folder / name, elsewhere / name)
        (ground.folder / name).symlink_to(elsewhere / name)
    commands = list_commands(ground)
    for command in ("train", "average", "score the average", "translate", "inspect", "prepare"):
        assert commands[command]() == 0
    last = str(ground.folder / "run/checkpoints/last")
    assert nmt_average([last, "-o", str(tmp_path / "mean")]) == 0
    (ground.folder / "bpe").symlink_to(elsewhere / "store/vocab.model")
    given = [f"vocab.model={ground.folder}/bpe", f"data.store={tmp_path}/new"]
    assert nmt_prepare(["--config", str(ground.config), *given]) == 0
