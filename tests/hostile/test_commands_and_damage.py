"""Commands that meet something else in the place of nmt's own files: links, folders, garbage, files that
are cut, flipped, emptied or exchanged.

One table says which command meets what in the place of which file, and what becomes of it: it is
refused in one line, the work is done without it and a line says so, or it is replaced. What the
user keeps elsewhere stays as it is to the byte and to the time of its last change. Damage to the
newest checkpoint is named, and a run that goes on from the one before ends in the bits of the
undisturbed one. `make test` tries one kind in every other place; `make soak` tries all kinds in
all places, and ten times as many places of damage.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from pytest import MonkeyPatch, TempPathFactory, fixture, mark, raises
from support.canary import record
from support.capture import Capture, read_errors, read_stderr
from support.crafted_bpe import craft_readable, craft_refused
from support.crafted_checkpoints import NEWEST as NEWEST_STEP
from support.crafted_checkpoints import find_canary, write_run
from support.crafted_checkpoints import list_cases as list_crafted
from support.damages import DAMAGES, GARBAGE
from support.ground import digest_checkpoint, make_ground, untime
from support.in_process import Main, succeed
from support.once import make_once
from support.rings import amount
from support.untrained import make_checkpoint

from nmt.checkpoint.run_checkpoints import find_newest, list_steps
from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.export import main as nmt_export
from nmt.commands.prepare import main as nmt_prepare
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from nmt.config import ModelConfig, RunConfig
from nmt.config_files import load_config, load_recorded_config, override_config
from nmt.data.vocab import Vocab
from nmt.system.errors import Failure
from nmt.system.files import digest_file, read_json, seal, write_json
from nmt.system.run_folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    VOCAB_FILE,
    RunFolder,
)

SETTINGS = (
    "training.steps=20",
    "training.micro_tokens=300",
    "training.log_every=1",
    "training.validate_every=5",
    "training.checkpoint_every=5",
    "training.keep_checkpoints=10",
    "evaluation.bleu=false",
    "decoding.max_extra=1",
)
# Paths are relative to a folder that is copied for each test.
RUN = RunFolder(Path("run"))
NEWEST = "run/checkpoints/step-0000020"
CONFIG = ["--config", "toy.yaml"]


TRAIN = [*CONFIG, "out=run", *SETTINGS]
LONGER = [*TRAIN, "training.steps=21"]
DEV_SET = ["--src", "valid.en", "--ref", "valid.de"]

COMMANDS: dict[str, tuple[Main, list[str]]] = {
    "train": (nmt_train, LONGER),
    "draw epochs": (nmt_train, [*LONGER, "out=run2", "vocab.bpe_dropout=0.1"]),
    "average": (nmt_average, ["run", "--last", "2"]),
    "average the best": (nmt_average, ["run", "--best", "2"]),
    "score the average": (nmt_eval, ["run/average", *DEV_SET, "decoding.beam=1"]),
    "translate": (nmt_translate, ["run", "-i", "valid.en", "-o", "out", "--beam", "1"]),
    "export the average": (nmt_export, ["run/average", "--to", "safetensors", "-o", "out"]),
    "prepare": (nmt_prepare, CONFIG),
    "prepare anew": (nmt_prepare, [*CONFIG, "data.store=new"]),
    "inspect": (nmt_prepare, ["--inspect", "store"]),
}


def call(command: str) -> int:
    main, argv = COMMANDS[command]
    return main(argv)


def make_outside(folder: Path) -> None:
    """A run with checkpoints at 5, 10, 15 and 20, an average and results; in `other` the model has
    another size. And what the user keeps there: a file and a folder.
    """
    config = make_ground(folder).config
    config.write_text(
        config.read_text().replace(f"{folder}/store", "store").replace(str(folder), ".")
    )
    with chdir(folder):
        assert nmt_train(TRAIN) == call("average") == call("score the average") == 0
        succeed(nmt_train, *TRAIN, "out=other", "model.d_ff=16", "training.checkpoint_every=20")
    (folder / "precious").write_bytes(b"precious data\nwithout an end")
    (folder / "empty").mkdir()


@fixture(scope="module")
def outside(tmp_path_factory: TempPathFactory) -> Path:
    """What must stay as it is."""
    return make_once(tmp_path_factory, "outside", make_outside)


@fixture(scope="module")
def before(outside: Path) -> dict[str, object]:
    return record(outside)


@fixture
def ground(outside: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A copy, in which a test may break what it likes; it is the current folder."""
    others = shutil.ignore_patterns("other")
    shutil.copytree(outside, tmp_path / "ground", symlinks=True, ignore=others)
    monkeypatch.chdir(tmp_path / "ground")
    return Path.cwd()


# ---- the table --------------------------------------------------------------------------------------------------

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
LINKS = ("link", "link to nothing", "link to a device")

# What becomes of a command if one of the files is of another kind:
REFUSED = "refused"  # one line and exit code 2
WARNED = "warned"  # one line, and the work is done without the file
REPLACED = "replaced"  # by a new file; a folder is refused or warned of


@dataclass(frozen=True)
class Place:
    command: str
    name: str  # of a file
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


SIZE = "1 TB"
# What a stranger writes into a file, and seals
WRITTEN = [
    Place("inspect", "store/ledger.json", REFUSED),
    Place("inspect", "store/manifest.json", REFUSED),
    Place("average", f"{NEWEST}/state.json", REFUSED),
    Place("score the average", "run/average/state.json", REFUSED),
    Place("score the average", "run/average/manifest.json", REFUSED),
]


def list_cases() -> Iterator[tuple[Place, str]]:
    for i, place in enumerate(list_places()):
        usual = [(*LINKS, "folder")[i // 2 % 4]] if i % 2 else []
        for kind in amount(usual, [*LINKS, "folder"]):
            yield place, kind
    for place in WRITTEN:
        for kind in amount(["nothing", "nested past Python", "NaN", "other types"], GARBAGE):
            yield place, kind
    for kind in (SIZE, "nested", "400 digits", "other types"):
        yield Place("score the average", "run/results.json", WARNED), kind
    for kind in (SIZE, "nested", "a list", "NaN"):
        yield Place("prepare", "store/.sources.json", REFUSED), kind


def put(kind: str, path: Path, outside: Path) -> str:
    """Put something else in the place of a file, and return what messages say of it."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if kind == SIZE:
        os.truncate(path, 1 << 40)  # takes no room on the disk
        return "is damaged (1,099,511,627,776 bytes, but at most"
    if kind in GARBAGE:
        path.write_bytes(GARBAGE[kind])
        manifest = path.with_name(MANIFEST_FILE)
        entries = {} if path == manifest or not manifest.exists() else read_json(manifest)
        if path.name in entries:
            size = path.stat().st_size
            entries[path.name] = {"sha256": digest_file(path), "size": size}
            write_json(manifest, entries)
        return ""
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


@fixture
def try_command(
    ground: Path, outside: Path, before: dict[str, object], capsys: Capture
) -> TryCommand:
    """Run a command that meets `path`; nothing outside may change."""

    def run(command: str, path: Path) -> Trial:
        capsys.readouterr()
        code = call(command)
        said = capsys.readouterr()
        lines = said.err.splitlines()
        assert record(outside) == before and not (code and said.out)
        # a manifest speaks of its folder, and of other files in it
        place = str(path.parent) if path.name == MANIFEST_FILE else str(path)
        about_path = [line for line in lines if place in line and not line.startswith("its curves")]
        return Trial(code, lines, about_path)

    return run


# no device is waited for; the fixtures may have to compile first
@mark.parametrize("place, kind", list_cases(), ids=str)
def test_what_is_not_nmts_own_file(
    place: Place, kind: str, outside: Path, try_command: TryCommand
) -> None:
    path = Path(place.name)
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
        assert len(line) < 500 and (what in line or "README.md: was edited" in line)
    assert kind not in GARBAGE or path.read_bytes() == GARBAGE[kind]


@mark.parametrize(
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
    ground: Path,
    outside: Path,
    try_command: TryCommand,
) -> None:
    path = Path(name)
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(outside / target)
    try_command(command, path).check(outcome)
    if outcome == REPLACED:
        assert not os.path.lexists(path) or path.resolve().is_relative_to(ground)


def test_links_of_the_user_and_links_inside_work(ground: Path, tmp_path: Path) -> None:
    """The user's own folder, corpora and model may lie behind links; `best` and `last` are links."""
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    for name in ("run", "store", "train.en"):
        os.rename(name, elsewhere / name)
        Path(name).symlink_to(elsewhere / name)
    for command in ("train", "average", "score the average", "translate", "inspect", "prepare"):
        assert call(command) == 0
    succeed(nmt_average, "run/checkpoints/last", "-o", "mean")
    Path("bpe").symlink_to(elsewhere / "store/vocab.model")
    succeed(nmt_prepare, *CONFIG, "vocab.model=bpe", "data.store=new")


def begins_with(name: str, line: str) -> bool:
    """Whether the error is about this path, which the command may have made absolute."""
    return f"error: {name}" in line or f"error: {Path.cwd()}/{name}" in line


# ---- what a stranger writes into files ---------------------------------------------------------------------------

# Lines of numbers and text that are read, but that nothing can be drawn or computed from.
ODD_LINES = [
    b'{"kind": "train", "step": 1, "nll": 1e100, "tgt_tokens_per_s": -1e100, "elapsed_s": -1e99}',
    b'{"kind": "train", "step": 9223372036854775807, "nll": -1e100, "loss": 5e-324}',
    b'{"kind": "train", "step": 2, "nll": true, "loss": "x", "elapsed_s": []}',
    b'{"kind": "valid", "step": 3, "nll": 5e-324, "bleu": 9007199254740993, "signature": {}}',
    b'{"kind": "valid", "step": 3, "nll": 0, "bleu": 0, "signature": "\\ud800"}',
    b'{"kind": "warning", "step": 4, "problem": ["stalled"], "message": 5}',
    b'{"kind": "warning", "step": 4, "problem": "\\udc80", "message": "\\ud800\\u001b[31m"}',
    b'{"kind": "train", "step": -1, "nll": 1}',
    b'{"kind": "train", "step": 5, "message": "' + b"x" * 1_000_000 + b'"}',
]


def test_metrics_are_no_reason_to_fail(run: RunFolder, capsys: Capture) -> None:
    """Neither at the start, nor after the last update, nor for the average of the best."""
    lines = [*GARBAGE.values(), *ODD_LINES]
    content = b"\n".join(lines) + b"\n" + run.metrics.read_bytes()
    run.metrics.write_bytes(content)
    state = run.checkpoints / "step-0000020" / "state.json"
    values = read_json(state)
    state.write_text(json.dumps(values | {"metrics_bytes": len(content)}))
    seal(state.parent)
    capsys.readouterr()

    assert call("train") == 0
    said = read_stderr(capsys)
    assert "warning" not in said and "Traceback" not in said
    assert read_json(run.status)["state"] == "done"
    page = run.report.read_text()
    assert "line(s) of metrics.jsonl are left out: damaged" in page
    assert "\x1b" not in page

    assert call("average the best") == 0


def test_a_ledger_may_hold_any_text(ground: Path, capsys: Capture) -> None:
    """Samples are the text of corpora, and names of files need not be UTF-8."""
    path = Path("store/ledger.json")
    ledger = read_json(path)
    ledger["corpora"][0]["dropped"] = {"identical": 1}
    ledger["corpora"][0]["samples"] = {"identical": [["\0 <b>", "\ud800"]]}
    ledger["corpora"][0]["files"][0]["name"] = "\udcff" * 300
    path.write_text(json.dumps(ledger))
    seal(path.parent)
    for argv in (["--inspect", "store"], CONFIG):
        assert nmt_prepare(argv) == 0
    assert "en  <U+0000> <b>" in capsys.readouterr().out


@mark.parametrize(
    "change, message",
    [
        ({"kept": "x"}, "corpora[0].kept: 'x' is not an integer"),
        ({"tokens": [1]}, "tokens has 1 values, not one for each language"),
        ({"samples": {"rule": []}}, "samples has a rule that dropped nothing"),
        ({"held_out": {"dev": [1]}}, "held_out must have three values for each set"),
        ({"files": [{"name": "a\0b"}]}, "corpora[0].files[0].size: is missing"),
    ],
)
def test_a_ledger_is_checked_value_by_value(
    change: dict[str, object], message: str, ground: Path, capsys: Capture
) -> None:
    path = Path("store/ledger.json")
    ledger = read_json(path)
    ledger["corpora"][0] |= change
    path.write_text(json.dumps(ledger))
    seal(path.parent)
    for argv in (["--inspect", "store"], CONFIG):
        assert nmt_prepare(argv) == 2
        (line,) = read_errors(capsys)
        assert begins_with(f"{path}: ", line) and message in line and "prepare it again" in line


@mark.parametrize(
    "settings, message",
    [
        (["model.d_model=1000000000"], "model: its weights alone would take"),
        (["model.n_layers=1000000000000"], "model: its weights alone would take"),
        (["data.workers=1000000000"], "data.workers is 1000000000; it must be between 1 and 4096"),
        ([f"training.src_tokens={2**62}"], "it must be between 1 and 2^40"),
        (["decoding.beam=1000000000"], "decoding.beam is 1000000000; it must be between 1 and"),
        (["data.train=[{src: " + "x" * 900_000 + "}]"], "needs both src and tgt"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_the_data_is_prepared(
    settings: list[str], message: str, ground: Path, capsys: Capture
) -> None:
    assert nmt_train([*TRAIN, "data.store=new", "out=new-run", *settings]) == 2
    *notes, line = read_errors(capsys)
    assert message in line and len(line) < 2_500
    assert all("is given 2 times" in note for note in notes) and not list(ground.glob("new*"))


@mark.parametrize("error", [MemoryError(), RuntimeError("x: can't allocate memory: 9 bytes")])
def test_memory_that_is_refused_is_one_line(
    error: Exception,
    ground: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("nmt.train.setup.Transformer", fail)
    assert nmt_train([*TRAIN, "out=new-run"]) == 1
    (line,) = read_errors(capsys)[-1:]
    assert line.startswith("nmt-train: failed: out of memory; lower training.micro_tokens")


def fill_end(value: bytes) -> Callable[[Path], None]:
    """Overwrite the end of a file."""

    def change(path: Path) -> None:
        with open(path, "r+b") as file:
            file.seek(-len(value), os.SEEK_END)
            file.write(value)

    return change


def swap_offsets(path: Path) -> None:
    offsets = np.load(path)
    offsets[5:9] = offsets[5:9][::-1]
    np.save(path, offsets)


@mark.parametrize(
    "name, change, message",
    [
        ("train.src.ids.npy", fill_end(b"\xff" * 100), "id 65535, where the BPE model has 80"),
        ("valid.tgt.ids.npy", fill_end(b"\xff" * 2), "id 65535, where the BPE model has 80"),
        ("train.tgt.offsets.npy", fill_end(bytes(16)), "does not match the file of ids"),
        ("valid.src.offsets.npy", fill_end(bytes(8)), "does not match the file of ids"),
        ("train.src.offsets.npy", swap_offsets, "is damaged (offsets that do not rise)"),
    ],
)
def test_a_store_that_a_stranger_has_sealed_is_refused(
    name: str,
    change: Callable[[Path], None],
    message: str,
    ground: Path,
    capsys: Capture,
) -> None:
    path = Path("store") / name
    change(path)
    seal(path.parent)
    assert nmt_train([*TRAIN, "out=new-run"]) == 2
    (line,) = [line for line in read_errors(capsys) if "error: " in line]
    assert begins_with(str(path.parent), line) and message in line


# ---- what a stranger has crafted ---------------------------------------------------------------------------------

REFUSED_RUNS = [
    f"{MODEL_FILE}: pickle",
    f"{STATE_FILE}: NaN",
    f"{CONFIG_FILE}: d_model",
    f"{CONFIG_FILE}: objects",
    f"{MODEL_FILE}: a header of 100 MB",
    f"{VOCAB_FILE}: empty",
    f"{MANIFEST_FILE}: ../",
]


@mark.parametrize(
    "command, name",
    [
        *((nmt_translate, name) for name in REFUSED_RUNS),
        *((command, name) for command in (nmt_eval, nmt_average) for name in REFUSED_RUNS[:2]),
    ],
)
def test_a_crafted_checkpoint_is_refused_in_one_line(
    command: Main,
    name: str,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    write_run(tmp_path)
    (case,) = [case for case in list_crafted() if case.name == name]
    case.write(tmp_path)
    checkpoint = RunFolder(tmp_path).checkpoint(NEWEST_STEP)
    out = ["-o", str(tmp_path / "mean")] if command is nmt_average else []
    assert command([str(checkpoint), *out]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and case.file in captured.err
    assert not (tmp_path / "mean").exists() and not find_canary(checkpoint).exists()


TINY = ModelConfig(d_model=8, d_ff=8, n_heads=1, n_layers=1)


@mark.parametrize("name", ["duplicate pieces", "65,537 pieces", "byte not UTF-8", "9 MB"])
def test_a_crafted_model_is_refused_in_one_line(name: str, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", Vocab(craft_readable()["plain"]), TINY)
    (checkpoint / VOCAB_FILE).write_bytes(craft_refused()[name])
    seal(checkpoint)
    (tmp_path / "text").write_text("a b\n")
    (tmp_path / "other").write_text("b a\n")
    prepare = ["-c", "demo.yaml", f"data.root={tmp_path}", "data.train=[{src: text, tgt: other}]"]
    prepare += ["vocab.model=model/vocab.model", f"data.store={tmp_path}/store"]
    out = ["-o", str(tmp_path / "out")]
    for command, argv in (
        (nmt_translate, [str(checkpoint), "-i", str(tmp_path / "text"), *out]),
        (nmt_export, [str(checkpoint), "--to", "safetensors", *out]),
        (nmt_prepare, prepare),
    ):
        assert command(argv) == 2
        (line,) = read_errors(capsys)
        assert VOCAB_FILE in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other", "text"]


def test_a_strange_model_translates(tmp_path: Path, capsys: Capture) -> None:
    source = tmp_path / "text"
    source.write_text("ab c\n\u263a\n\na\n")
    for name in amount(["escape sequences", "scores NaN", "words"], [*craft_readable()]):
        checkpoint = make_checkpoint(tmp_path / name, Vocab(craft_readable()[name]), TINY)
        out = tmp_path / f"{name}.out"
        succeed(nmt_translate, checkpoint, "-i", source, "-o", out)
        assert out.read_bytes().count(b"\n") == 4, name
        assert not [
            line
            for line in read_errors(capsys)
            if "are mostly <unk>" not in line and "decoding.max_extra" not in line  # true of some
        ]


# ---- damaged checkpoints ----------------------------------------------------------------------------------------

FILES = (*CHECKPOINT_FILES, OPTIMIZER_FILE)
SCALE = amount(1, 20)


@fixture
def run(ground: Path) -> RunFolder:
    """A run to be damaged."""
    assert list_steps(RUN) == [5, 10, 15, 20]
    assert {path.name for path in RUN.checkpoint(20).iterdir()} == set(FILES)
    return RUN


@cache
def load_run_config() -> RunConfig:
    """Each copy has the same one."""
    return load_recorded_config(RUN.config)


def told(run: RunFolder, capsys: Capture) -> tuple[int, list[str]]:
    """Which checkpoint is taken and what is said about the others."""
    capsys.readouterr()
    found = find_newest(run, load_run_config())  # as a training that continues
    assert found is not None and found.path == run.checkpoint(found.step)
    return found.step, read_errors(capsys)


def check_named(run: RunFolder, name: str, capsys: Capture) -> None:
    """That `name` of step 20 is said to be damaged and step 15 is taken."""
    step, lines = told(run, capsys)
    assert step == 15 and len(lines) == 1, lines
    # It speaks of another file
    place = run.checkpoint(20) if name == MANIFEST_FILE else run.checkpoint(20) / f"{name}:"
    assert lines[0].startswith(f"warning: {place}") and name in lines[0], lines


def spoil(file: Path, kind: str, rng: Random) -> None:
    if kind == "deleted":
        file.unlink()
    else:
        file.write_bytes(DAMAGES[kind](file.read_bytes(), rng))


def test_damage_is_found_and_named(run: RunFolder, capsys: Capture) -> None:
    rng = Random(1)
    for kind, n in (("cut", 6), ("flipped", 24), ("zeroed", 6), ("emptied", 6), ("deleted", 6)):
        for name in (FILES * n * SCALE)[: n * SCALE]:  # each in turn
            file = run.checkpoint(20) / name
            data = file.read_bytes()
            while (
                file.exists() and file.read_bytes() == data
            ):  # zeros that were zeros are no damage
                spoil(file, kind, rng)
            check_named(run, name, capsys)
            file.write_bytes(data)
    assert told(run, capsys) == (20, [])  # nothing is wrong any more


def test_files_of_another_checkpoint_are_found(
    run: RunFolder, outside: Path, capsys: Capture
) -> None:
    n_exchanged = 0
    for name in FILES:
        file = run.checkpoint(20) / name
        data = file.read_bytes()
        for other in (run.checkpoint(15), RunFolder(outside / "other").checkpoint(20)):
            strange = (other / name).read_bytes()
            if strange == data:
                continue  # config and vocabulary of one run are the same in all its checkpoints
            n_exchanged += 1
            file.write_bytes(strange)
            if name == MANIFEST_FILE:
                assert told(run, capsys)[0] == 15
            else:
                check_named(run, name, capsys)
        file.write_bytes(data)
    assert n_exchanged >= 9 and told(run, capsys) == (20, [])


def test_exchanged_folders_are_not_taken_for_what_their_names_say(
    run: RunFolder, capsys: Capture
) -> None:
    aside = run.checkpoints / "aside"
    for a, b in ((15, aside), (20, 15), (aside, 20)):
        places = [run.checkpoint(x) if isinstance(x, int) else x for x in (a, b)]
        os.rename(*places)
    step, lines = told(run, capsys)
    assert step == 10 and len(lines) == 2
    assert str(run.checkpoint(20) / "state.json") in lines[0] and "step 15" in lines[0]
    assert str(run.checkpoint(15) / "state.json") in lines[1] and "step 20" in lines[1]


def test_a_checkpoint_of_another_run_is_passed_over(
    run: RunFolder, outside: Path, capsys: Capture
) -> None:
    shutil.rmtree(run.checkpoint(20))
    shutil.copytree(RunFolder(outside / "other").checkpoint(20), run.checkpoint(20))
    # more updates do not make it another run
    config = override_config(load_config("toy.yaml"), [*SETTINGS, "training.steps=30"])
    capsys.readouterr()
    found = find_newest(run, config)
    assert found is not None and found.step == 15
    assert "model.d_ff: 32 -> 16" in read_stderr(capsys)


@mark.parametrize(
    "name, kind",
    [
        (MODEL_FILE, "flipped"),
        (OPTIMIZER_FILE, "cut"),
        (STATE_FILE, "emptied"),
        (MANIFEST_FILE, "deleted"),
    ],
)
def test_a_run_goes_on_from_the_one_before_to_the_same_bits(
    name: str, kind: str, run: RunFolder, capsys: Capture
) -> None:
    expected = digest_checkpoint(run.checkpoint(20)), untime(run)
    spoil(run.checkpoint(20) / name, kind, Random(1))
    capsys.readouterr()
    assert nmt_train(TRAIN) == 0
    said = read_stderr(capsys)
    assert name in said and "continuing after update 15" in said and "Traceback" not in said
    assert (digest_checkpoint(run.checkpoint(20)), untime(run)) == expected


def content(folder: Path) -> dict[str, str]:
    """Every file and link of a run, but for what says who came by."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else digest_file(path)
        for path in sorted(folder.rglob("*"))
        if path.name not in (".lock", "status.json") and (path.is_symlink() or path.is_file())
    }


def test_when_all_are_damaged_nothing_is_touched(run: RunFolder, capsys: Capture) -> None:
    for step, name in zip(
        (5, 10, 15, 20), ("vocab.model", "config.yaml", MANIFEST_FILE, "state.json"), strict=True
    ):
        os.truncate(run.checkpoint(step) / name, 10)
    before = content(run.path)
    with raises(Failure, match="none of its 4 checkpoints can be used"):
        find_newest(run)
    capsys.readouterr()
    assert nmt_train(TRAIN) == 1
    said = read_errors(capsys)
    assert (
        len(said) >= 4
        and "none of its 4 checkpoints can be used" in said[-1]
        and not any("Traceback" in s for s in said)
    )
    assert content(run.path) == before
    assert nmt_eval([str(run.path)]) == 2  # here the folder is what the user gave


@mark.parametrize("size", [0, 700, None], ids=["emptied", "cut in a line", "deleted"])
def test_a_journal_that_has_lost_lines(size: int | None, run: RunFolder, capsys: Capture) -> None:
    for step in (15, 20):
        shutil.rmtree(run.checkpoint(step))
    if size is None:
        run.metrics.unlink()
    else:
        os.truncate(run.metrics, size)
        assert size == 0 or run.metrics.read_bytes()[-1:] != b"\n"
    kept: list[int] = []  # updates of lines that are whole
    for line in run.metrics.read_text().split("\n")[:-1] if size else []:
        event = json.loads(line)
        if event["kind"] == "train":
            kept.append(event["step"])
    assert not size or kept
    capsys.readouterr()
    assert nmt_train(TRAIN) == 0
    warnings = [line for line in read_errors(capsys) if "warning" in line]
    assert len(warnings) == 1 and str(run.metrics) in warnings[0]
    # Each line is whole
    found = [line["step"] for line in untime(run) if line["kind"] == "train"]
    assert found == [*kept, *range(11, 21)]
