"""A stranger's checkpoints: whatever lies in the folder is refused in one line, soon, in little
memory, unexecuted.

Each case is a whole checkpoint with one thing wrong, sealed anew where a malicious author would, so
that digests agree. A child process with torch imported opens each as nmt-translate does and
continues the run around it as nmt-train does; it measures processor time and the peak of memory
above what it had before.
"""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.crafted_bpe import craft_model
from support.once import make_once
from test_checkpoint import STATE, write

from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.translate import main as nmt_translate
from nmt.system.files import seal
from nmt.system.run_folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    VOCAB_FILE,
)

ROOT = Path(__file__).parents[2]
CANARY = "executed"  # the file that a payload would make
SECONDS, MEMORY_MB = 1.0, 200


# ---- what a stranger may have done: each changes a folder and leaves it sealed as its author would ------------------

Change = Callable[[Path], object]


@dataclass
class Payload:
    """Makes a file when unpickled."""

    path: Path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def content(name: str, data: bytes | Callable[[Path], bytes]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(data if isinstance(data, bytes) else data(folder))
        seal(folder)

    return change


def text(name: str, old: str, new: str) -> Change:
    def edit(folder: Path) -> bytes:
        before = (folder / name).read_text()
        assert before.count(old) == 1, before
        return before.replace(old, new).encode()

    return content(name, edit)


def edit_json(name: str, edit: Callable[[dict[str, Any]], Any]) -> Change:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        edit(values)
        (folder / name).write_text(json.dumps(values))
        if name != MANIFEST_FILE:
            seal(folder)

    return change


def state(**values: Any) -> Change:
    return edit_json(STATE_FILE, lambda before: before.update(values))


def manifest(edit: Callable[[dict[str, Any]], Any]) -> Change:
    return edit_json(MANIFEST_FILE, edit)


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any], name: str = MODEL_FILE) -> Change:
    def change(folder: Path) -> None:
        values = {key: value.clone() for key, value in load_file(folder / name).items()}
        edit(values)
        save_file(values, folder / name)
        seal(folder)

    return change


def header(values: dict[str, Any]) -> Change:
    """Another header before the same data: other values for one tensor."""

    def edit(folder: Path) -> bytes:
        data = (folder / MODEL_FILE).read_bytes()
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + size])
        entries[BIAS] |= values
        return framed(json.dumps(entries).encode()) + data[8 + size :]

    return content(MODEL_FILE, edit)


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def sparse(name: str, start: bytes, size: int) -> Change:
    """A file of any size that takes no room on the disk; the manifest knows the size."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, size)
        if name != MANIFEST_FILE:
            manifest(lambda entries: entries[name].update(size=size))(folder)

    return change


def zip_bomb(_: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data/0", bytes(10**8))
    return packed.getvalue()


def pickled(folder: Path) -> bytes:
    return pickle.dumps({"model": Payload(folder.parent.parent / CANARY)})


def saved_by_torch(folder: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"model": Payload(folder.parent.parent / CANARY)}, file)
    return file.getvalue()


def yaml_of_objects(folder: Path) -> bytes:
    canary = folder.parent.parent / CANARY
    return f"name: !!python/object/apply:builtins.open [{canary}, w]\n".encode()


def yaml_of_aliases(_: Path) -> bytes:
    lines = ["a: &a [x,x,x]"]
    for before, letter in pairwise("abcdefghijklmnopqrstu"):
        lines.append(f"{letter}: &{letter} [*{before},*{before},*{before}]")
    return "\n".join(lines).encode()


def layer_names(n: int) -> bytes:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return framed(json.dumps({f"encoder.{i}.x": entry for i in range(n)}).encode())


BIAS = "decoder.0.feed_forward.inner.bias"
N_BYTES = 4 * 10**10
ENTRY = {"dtype": "F32", "shape": [10**10], "data_offsets": [0, N_BYTES]}
HUGE = framed(json.dumps({"tgt_embedding.weight": ENTRY}).encode())
LONG_HEADER = (10**8).to_bytes(8, "little") + b"{}"
MANY_DIGITS = b'{"x": {"sha256": "", "size": ' + b"9" * 5000 + b"}}"

# The file that the one line must name -> the cases: name -> what is done
OF_CONFIG: dict[str, Change] = {
    "d_model": text(CONFIG_FILE, "d_model: 8", "d_model: 1000000"),
    "n_layers 2^62": text(CONFIG_FILE, "n_layers: 1", f"n_layers: {2**62}"),
    "d_k": text(CONFIG_FILE, "d_k: null", f"d_k: {2**62}"),
    "sinusoids, which no file bounds": text(
        CONFIG_FILE, "max_positions: 1024", "max_positions: 1000000000000"
    ),
    "NaN": text(CONFIG_FILE, "dropout: 0.1", "dropout: .nan"),
    "what is almost a number": text(CONFIG_FILE, "d_model: 8", f"d_model: {'8' * 60_000}x"),
    "another file": text(CONFIG_FILE, "name: run", "name: run\nextends: /etc/passwd"),
    "objects": content(CONFIG_FILE, yaml_of_objects),
    "aliases": content(CONFIG_FILE, yaml_of_aliases),
    "brackets": content(CONFIG_FILE, b"name: " + b"[" * 5000 + b"]" * 5000),
    "1 TB": sparse(CONFIG_FILE, b"name: x\n", 10**12),
}
OF_MODEL: dict[str, Change] = {
    "100,000 layers in the config": text(CONFIG_FILE, "n_layers: 1", "n_layers: 100000"),
    "one layer less": text(CONFIG_FILE, "n_layers: 1", "n_layers: 2"),
    "10^10 elements": sparse(MODEL_FILE, HUGE, len(HUGE) + N_BYTES),
    "10^10 elements, no data": content(MODEL_FILE, HUGE),
    "fp64": tensors(lambda t: t.update({BIAS: t[BIAS].double()})),
    "one more": tensors(lambda t: t.update(extra=torch.ones(1))),
    "one more, to mock the terminal": tensors(lambda t: t.update({"\x1b[2J\n": torch.ones(1)})),
    "one less": tensors(lambda t: t.pop(BIAS)),
    "another shape": tensors(lambda t: t.update({BIAS: t[BIAS][None]})),
    "a header of 100 MB": sparse(MODEL_FILE, LONG_HEADER, 10**8 + 8),
    "a header of 2^63 bytes": content(MODEL_FILE, (2**63).to_bytes(8, "little") + b"{}"),
    "a header of 100,000 layers": content(MODEL_FILE, lambda _: layer_names(100_000)),
    "overlap": header({"data_offsets": [0, 48]}),
    "beyond the end": header({"data_offsets": [2**40, 2**40 + 48]}),
    "a nested header": content(MODEL_FILE, framed(b"[" * 5000)),
    "pickle": content(MODEL_FILE, pickled),
    "torch.save": content(MODEL_FILE, saved_by_torch),
    "zip bomb": content(MODEL_FILE, zip_bomb),
    "more pieces": content(VOCAB_FILE, craft_model()),
}
OF_OPTIMIZER: dict[str, Change] = {
    "averages": text(CONFIG_FILE, "ema: null", "ema: 0.9"),
    "many steps": tensors(lambda t: t.update({f"step.{BIAS}": torch.ones(3)}), OPTIMIZER_FILE),
    "pickle": content(OPTIMIZER_FILE, pickled),
    "not in the manifest": manifest(lambda m: m.pop(OPTIMIZER_FILE)),
}
OF_VOCAB: dict[str, Change] = {
    "pickle": content(VOCAB_FILE, pickled),
    "empty": content(VOCAB_FILE, b""),
    "1 TB": sparse(VOCAB_FILE, b"", 10**12),
    "not in the manifest": manifest(lambda m: m.pop(VOCAB_FILE)),
}
OF_STATE: dict[str, Change] = {
    "negative step": state(step=-1),
    "step of another folder": state(step=8),
    "true for a number": state(step=True),
    "NaN": state(elapsed_s=float("nan")),
    "huge": state(tokens_seen=10**4000),
    "no cursor": edit_json(STATE_FILE, lambda values: values.pop("cursor")),
    "key to mock the terminal": state(**{"\x1b[2J\n": 1}),
    "a list": content(STATE_FILE, b"[1]"),
    "nested": content(STATE_FILE, b"[" * 100_000),
    "1 TB": sparse(STATE_FILE, b"{}", 10**12),
    "half an average": state(averaged=["x"]),
}
OF_MANIFEST: dict[str, Change] = {
    "a pickle": lambda folder: content("extra.pt", pickled)(folder),
    "../": manifest(lambda m: m.update({"../../outside": m.pop(VOCAB_FILE)})),
    "absolute": manifest(lambda m: m.update({"/etc/passwd": m[VOCAB_FILE]})),
    "NUL in a name": manifest(lambda m: m.update({"a\0b": m[VOCAB_FILE]})),
    "nested": manifest(lambda m: m.update({VOCAB_FILE: {"sha256": {}, "size": [{}]}})),
    "negative size": manifest(lambda m: m[VOCAB_FILE].update(size=-1)),
    "5,000 digits": lambda folder: (folder / MANIFEST_FILE).write_bytes(MANY_DIGITS),
    "no digest": manifest(lambda m: m[VOCAB_FILE].update(sha256="0")),
    "deep": lambda folder: (folder / MANIFEST_FILE).write_bytes(b"[" * 500_000),
    "1 GB": sparse(MANIFEST_FILE, b"{}", 10**9),
    "none": lambda folder: (folder / MANIFEST_FILE).unlink(),
}
TABLES = {
    CONFIG_FILE: OF_CONFIG,
    MODEL_FILE: OF_MODEL,
    OPTIMIZER_FILE: OF_OPTIMIZER,
    VOCAB_FILE: OF_VOCAB,
    STATE_FILE: OF_STATE,
    MANIFEST_FILE: OF_MANIFEST,
}
CASES = {
    f"{name}: {case}": (change, name)
    for name, table in TABLES.items()
    for case, change in table.items()
}


def unnamed_files(folder: Path) -> None:
    for name in ("model.pt", "pytorch_model.bin", "optimizer.pkl"):
        (folder / name).write_bytes(pickled(folder))


def linked_folder(folder: Path) -> None:
    elsewhere = folder.parent.parent / folder.name
    os.rename(folder, elsewhere)
    folder.symlink_to(elsewhere)


HARMLESS: dict[str, Change] = {
    "nothing": lambda folder: None,
    "files that nothing names": unnamed_files,
    "a link to a whole folder": linked_folder,
}

OPEN_ALL = """
import contextlib, io, json, signal, sys, time
from pathlib import Path
import torch
from nmt.checkpoint import find_newest, open_checkpoint
from nmt.config import DecodingConfig
from nmt.translate.translator import make_translator
from nmt.system.run_folder import RunFolder

def read_memory_mb(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) / 1024

def give_up(*_):
    raise SystemError("no answer in 20 s")

def open_newest(run):
    make_translator(open_checkpoint(run.checkpoint(9)), torch.device("cpu"), DecodingConfig())

def continue_run(run):
    return find_newest(run).step

def answer(work, run):
    try:
        return work(run)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

signal.signal(signal.SIGALRM, give_up)
for path in map(Path, sys.argv[1:]):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    memory_before, started_at = read_memory_mb("VmRSS"), time.process_time()
    signal.alarm(20)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        step = answer(continue_run, RunFolder(path))  # it opens each checkpoint as nmt-translate does
        opened = answer(open_newest, RunFolder(path)) if step == 9 else None
    signal.alarm(0)
    seconds = time.process_time() - started_at
    memory = read_memory_mb("VmHWM") - memory_before
    print(json.dumps([opened, step, stderr.getvalue(), seconds, memory]), flush=True)
"""
ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class Answer:
    opened: str | None
    continued: int | str
    said: str
    seconds: float
    memory_mb: float


def make_cases(root: Path) -> None:
    """Write a run whose newest checkpoint of two is untouched, and one for each case; then open
    them all.
    """
    for step in (7, 9):
        path = root / "good" / "checkpoints" / f"step-000000{step}"
        write(path, step, replace(STATE, step=step))
    changes = {str(number): change for number, (change, _) in enumerate(CASES.values())} | HARMLESS
    for name, change in changes.items():
        shutil.copytree(root / "good", root / name)
        change(root / name / "checkpoints" / "step-0000009")

    runs = ["good", *HARMLESS, *map(str, range(len(CASES)))]  # the first one warms up
    done = subprocess.run(
        [sys.executable, "-c", OPEN_ALL, *(str(root / name) for name in runs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    (root / ANSWERS_FILE).write_text(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "trust", make_cases)


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Answer]:
    lines = (folder / ANSWERS_FILE).read_text().splitlines()
    found = [Answer(*json.loads(line)) for line in lines]
    return dict(zip((*HARMLESS, *CASES), found[1:], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_a_stranger(case: str, answers: dict[str, Answer], folder: Path) -> None:
    answer, number, name = answers[case], list(CASES).index(case), CASES[case][1]
    place = str(folder / str(number) / "checkpoints" / "step-0000009")
    begin, end = "warning: ", "; trying the previous checkpoint\n"
    assert answer.said.startswith(f"{begin}{place}") and answer.said.endswith(end)
    complaint = answer.said.removeprefix(begin).removesuffix(end)
    assert name in complaint.removeprefix(place)
    assert complaint.isprintable() and len(complaint) < 2_100  # as docs/security.md says
    assert answer.continued == 7
    # Opened twice, maybe on a busy machine
    assert answer.seconds < 4 * SECONDS and answer.memory_mb < MEMORY_MB
    assert not (folder / str(number) / CANARY).exists()


def test_the_payloads_would_have_worked(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "x"
    checkpoint.mkdir(parents=True)
    for attempt in (
        lambda: pickle.loads(pickled(checkpoint)),
        lambda: torch.load(io.BytesIO(saved_by_torch(checkpoint)), weights_only=False),
    ):
        attempt()
        (tmp_path / CANARY).unlink()


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_changes_are_accepted(case: str, answers: dict[str, Answer], folder: Path) -> None:
    answer = answers[case]
    assert (answer.opened, answer.continued, answer.said) == (None, 9, "")
    assert answer.memory_mb < MEMORY_MB and not (folder / case / CANARY).exists()


REFUSED = [
    f"{MODEL_FILE}: pickle",
    f"{STATE_FILE}: NaN",
    f"{CONFIG_FILE}: d_model",
    f"{CONFIG_FILE}: objects",
    f"{MODEL_FILE}: a header of 100 MB",
    f"{VOCAB_FILE}: empty",
    f"{MANIFEST_FILE}: ../",
]


@pytest.mark.parametrize(
    ("command", "case"),
    [
        *((nmt_translate, case) for case in REFUSED),
        *((command, case) for command in (nmt_eval, nmt_average) for case in REFUSED[:2]),
    ],
)
def test_commands_refuse_in_one_line(
    command: Callable[[list[str]], int],
    case: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = folder / str(list(CASES).index(case)) / "checkpoints" / "step-0000009"
    out = ["-o", str(tmp_path / "mean")] if command is nmt_average else []
    assert command([str(checkpoint), *out]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and CASES[case][1] in captured.err
    assert not (tmp_path / "mean").exists() and not (checkpoint.parent.parent / CANARY).exists()
