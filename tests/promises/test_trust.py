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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from support.once import make_once

from nmt.checkpoint import TrainState
from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.translate import main as nmt_translate
from nmt.config import ModelConfig, RunConfig, format_config
from nmt.model.transformer import Transformer
from nmt.system.files import seal, write_folder
from nmt.system.run_folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    VOCAB_FILE,
)

ROOT = Path(__file__).parents[2]
MODEL_CONFIG = ModelConfig(d_model=8, d_ff=12, n_heads=2, n_layers=2)
LINES = ["abc abd bcd cde", "dce abc bda ecd"] * 9
CANARY = "executed"  # the file that a payload would make
SECONDS, MEMORY_MB = 1.0, 200


def pieces(n: int) -> bytes:
    """A BPE model of so many pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type="bpe",
        vocab_size=n,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return model.getvalue()


def write_checkpoint(path: Path, step: int, vocab: bytes, n_pieces: int) -> None:
    torch.manual_seed(step)
    weights = {
        name: p.detach() for name, p in Transformer(MODEL_CONFIG, n_pieces).named_parameters()
    }
    moments = {
        f"{key}.{name}": torch.ones(()) if key == "step" else torch.rand_like(p)
        for name, p in weights.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }

    def fill(folder: Path) -> None:
        save_file(weights, folder / MODEL_FILE)
        save_file(moments, folder / OPTIMIZER_FILE)
        (folder / STATE_FILE).write_text(json.dumps(asdict(TrainState(step=step))))
        (folder / CONFIG_FILE).write_text(format_config(RunConfig(model=MODEL_CONFIG)))
        (folder / VOCAB_FILE).write_bytes(vocab)

    write_folder(path, fill)


# ---- what a stranger may have done: each changes a folder and leaves it sealed as its author would ------------------

Change = Callable[[Path], object]


@dataclass
class Payload:
    """Makes a file when unpickled."""

    path: Path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def text(name: str, old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        before = (folder / name).read_text()
        assert before.count(old) == 1, before
        (folder / name).write_text(before.replace(old, new))
        seal(folder)

    return change


def content(name: str, data: bytes | Callable[[Path], bytes]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(data if isinstance(data, bytes) else data(folder))
        seal(folder)

    return change


def state(values: dict[str, Any], without: str = "") -> Change:
    def change(folder: Path) -> None:
        before = json.loads((folder / STATE_FILE).read_text())
        (folder / STATE_FILE).write_text(
            json.dumps({k: v for k, v in (before | values).items() if k != without})
        )
        seal(folder)

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], name: str = MODEL_FILE) -> Change:
    def changed(folder: Path) -> None:
        values = {key: value.clone() for key, value in load_file(folder / name).items()}
        change(values)
        save_file(values, folder / name)
        seal(folder)

    return changed


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Another header before the same data."""

    def changed(folder: Path) -> None:
        data = (folder / MODEL_FILE).read_bytes()
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + size])
        change(entries)
        (folder / MODEL_FILE).write_bytes(framed(json.dumps(entries).encode()) + data[8 + size :])
        seal(folder)

    return changed


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


def manifest(change: Callable[[dict[str, Any]], Any]) -> Change:
    def changed(folder: Path) -> None:
        entries = json.loads((folder / MANIFEST_FILE).read_text())
        change(entries)
        (folder / MANIFEST_FILE).write_text(json.dumps(entries))

    return changed


def unsealed(data: bytes) -> Change:
    return lambda folder: (folder / MANIFEST_FILE).write_bytes(data)


def archive(folder: Path, member: str, data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(member, data)
    return packed.getvalue()


def pickled(folder: Path) -> bytes:
    return pickle.dumps({"model": Payload(folder.parent.parent / CANARY)})


def saved_by_torch(folder: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"model": Payload(folder.parent.parent / CANARY)}, file)
    return file.getvalue()


def named_in_the_manifest(folder: Path) -> None:
    (folder / "extra.pt").write_bytes(pickled(folder))
    seal(folder)


def yaml_of_objects(folder: Path) -> bytes:
    return (
        f"name: !!python/object/apply:builtins.open [{folder.parent.parent / CANARY}, w]\n".encode()
    )


def zeros(shape: list[int], n: int, dtype: str = "F32", start: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + n]}


HUGE = framed(json.dumps({"tgt_embedding.weight": zeros([10**10], 4 * 10**10)}).encode())
BIAS = "decoder.0.feed_forward.inner.bias"

# Name -> what is done, and which file the one line must name
CASES: dict[str, tuple[Change, str]] = {
    "config: d_model": (text(CONFIG_FILE, "d_model: 8", "d_model: 1000000"), CONFIG_FILE),
    "config: d_model 2^62": (text(CONFIG_FILE, "d_model: 8", f"d_model: {2**62}"), CONFIG_FILE),
    "config: n_layers": (text(CONFIG_FILE, "n_layers: 2", "n_layers: 100000"), MODEL_FILE),
    "config: fewer layers": (text(CONFIG_FILE, "n_layers: 2", "n_layers: 1"), MODEL_FILE),
    "config: n_layers 2^62": (text(CONFIG_FILE, "n_layers: 2", f"n_layers: {2**62}"), CONFIG_FILE),
    "config: d_ff": (text(CONFIG_FILE, "d_ff: 12", "d_ff: 1000000000000"), CONFIG_FILE),
    "config: d_k": (text(CONFIG_FILE, "d_k: null", f"d_k: {2**62}"), CONFIG_FILE),
    "config: learned positions": (
        text(
            CONFIG_FILE,
            "positions: sinusoidal\n  max_positions: 1024",
            "positions: learned\n  max_positions: 1000000000000",
        ),
        CONFIG_FILE,
    ),
    "config: sinusoids, which no file bounds": (
        text(CONFIG_FILE, "max_positions: 1024", "max_positions: 1000000000000"),
        CONFIG_FILE,
    ),
    "config: averages": (text(CONFIG_FILE, "ema: null", "ema: 0.9"), OPTIMIZER_FILE),
    "config: untied": (text(CONFIG_FILE, "tied: true", "tied: false"), MODEL_FILE),
    "config: NaN": (text(CONFIG_FILE, "dropout: 0.1", "dropout: .nan"), CONFIG_FILE),
    "config: long number": (text(CONFIG_FILE, "d_model: 8", "d_model: " + "8" * 5000), CONFIG_FILE),
    "config: what is almost a number": (
        text(CONFIG_FILE, "d_model: 8", "d_model: " + "8" * 60_000 + "x"),
        CONFIG_FILE,
    ),
    "config: extends another file": (
        text(CONFIG_FILE, "name: run", "name: run\nextends: /etc/passwd"),
        CONFIG_FILE,
    ),
    "config: objects": (content(CONFIG_FILE, yaml_of_objects), CONFIG_FILE),
    "config: aliases": (
        content(
            CONFIG_FILE,
            b"a: &a [x,x,x]\n"
            + b"".join(
                b"%c: &%c [*%c,*%c,*%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i, 97 + i)
                for i in range(20)
            ),
        ),
        CONFIG_FILE,
    ),
    "config: brackets": (content(CONFIG_FILE, b"name: " + b"[" * 5000), CONFIG_FILE),
    "config: closed brackets": (
        content(CONFIG_FILE, b"name: " + b"[" * 5000 + b"]" * 5000),
        CONFIG_FILE,
    ),
    "config: no UTF-8": (content(CONFIG_FILE, b"name: \xff\xfe"), CONFIG_FILE),
    "config: 1 TB": (sparse(CONFIG_FILE, b"name: x\n", 10**12), CONFIG_FILE),
    "tensors: 10^10 elements": (sparse(MODEL_FILE, HUGE, len(HUGE) + 4 * 10**10), MODEL_FILE),
    "tensors: 10^10 elements, no data": (content(MODEL_FILE, HUGE), MODEL_FILE),
    "tensors: fp64": (tensors(lambda t: t.update({BIAS: t[BIAS].double()})), MODEL_FILE),
    "tensors: int8": (tensors(lambda t: t.update({BIAS: t[BIAS].to(torch.int8)})), MODEL_FILE),
    "tensors: fp64 moments": (
        tensors(
            lambda t: t.update({f"exp_avg.{BIAS}": t[f"exp_avg.{BIAS}"].double()}), OPTIMIZER_FILE
        ),
        OPTIMIZER_FILE,
    ),
    "tensors: another shape of moments": (
        tensors(lambda t: t.update({f"exp_avg.{BIAS}": torch.ones(3)}), OPTIMIZER_FILE),
        OPTIMIZER_FILE,
    ),
    "tensors: many steps": (
        tensors(lambda t: t.update({f"step.{BIAS}": torch.ones(3)}), OPTIMIZER_FILE),
        OPTIMIZER_FILE,
    ),
    "tensors: one more": (tensors(lambda t: t.update(extra=torch.ones(1))), MODEL_FILE),
    "tensors: one more, to mock the terminal": (
        tensors(lambda t: t.update({"\x1b[2J\n": torch.ones(1)})),
        MODEL_FILE,
    ),
    "tensors: one less": (tensors(lambda t: t.pop(BIAS)), MODEL_FILE),
    "tensors: transposed": (tensors(lambda t: t.update({BIAS: t[BIAS][None]})), MODEL_FILE),
    "header: 100 MB": (
        sparse(MODEL_FILE, (10**8).to_bytes(8, "little") + b"{}", 10**8 + 8),
        MODEL_FILE,
    ),
    "header: 2^63 bytes": (content(MODEL_FILE, (2**63).to_bytes(8, "little") + b"{}"), MODEL_FILE),
    "header: longer than the file": (
        content(MODEL_FILE, (100).to_bytes(8, "little") + b"{}"),
        MODEL_FILE,
    ),
    "header: 100,000 layers": (
        content(
            MODEL_FILE,
            framed(json.dumps({f"encoder.{i}.x": zeros([0], 0) for i in range(100_000)}).encode()),
        ),
        MODEL_FILE,
    ),
    "header: overlap": (
        header(
            lambda h: h[BIAS].update(
                data_offsets=h["decoder.1.feed_forward.inner.bias"]["data_offsets"]
            )
        ),
        MODEL_FILE,
    ),
    "header: beyond the end": (
        header(lambda h: h[BIAS].update(data_offsets=[2**40, 2**40 + 48])),
        MODEL_FILE,
    ),
    "header: negative offsets": (
        header(lambda h: h[BIAS].update(data_offsets=[-48, 0])),
        MODEL_FILE,
    ),
    "header: a shape that overflows": (
        header(lambda h: h[BIAS].update(shape=[2**33, 2**33])),
        MODEL_FILE,
    ),
    "header: another shape of as much": (
        header(lambda h: h[BIAS].update(shape=[3, 4])),
        MODEL_FILE,
    ),
    "header: unknown type": (header(lambda h: h[BIAS].update(dtype="OBJ")), MODEL_FILE),
    "header: no JSON": (content(MODEL_FILE, framed(b"\x80\x04pickle")), MODEL_FILE),
    "header: a list": (content(MODEL_FILE, framed(b"[1]")), MODEL_FILE),
    "header: nested": (content(MODEL_FILE, framed(b"[" * 5000)), MODEL_FILE),
    "model: empty": (content(MODEL_FILE, b""), MODEL_FILE),
    "model: pickle": (content(MODEL_FILE, pickled), MODEL_FILE),
    "optimizer: pickle": (content(OPTIMIZER_FILE, pickled), OPTIMIZER_FILE),
    "model: torch.save": (content(MODEL_FILE, saved_by_torch), MODEL_FILE),
    "model: TorchScript": (
        content(
            MODEL_FILE, lambda folder: archive(folder, "archive/code/__torch__.py", b"import os")
        ),
        MODEL_FILE,
    ),
    "model: zip bomb": (
        content(MODEL_FILE, lambda folder: archive(folder, "archive/data/0", bytes(10**8))),
        MODEL_FILE,
    ),
    "vocab: zip bomb": (
        content(VOCAB_FILE, lambda folder: archive(folder, "archive/data/0", bytes(10**8))),
        VOCAB_FILE,
    ),
    "vocab: pickle": (content(VOCAB_FILE, pickled), VOCAB_FILE),
    "vocab: empty": (content(VOCAB_FILE, b""), VOCAB_FILE),
    "vocab: 1 TB": (sparse(VOCAB_FILE, b"", 10**12), VOCAB_FILE),
    "vocab: a piece that is no text": (
        content(VOCAB_FILE, lambda folder: pieces(15).replace(b"\xe2\x96\x81", b"\xe2\x96\xff")),
        VOCAB_FILE,
    ),
    "vocab: one piece less": (content(VOCAB_FILE, lambda folder: pieces(14)), MODEL_FILE),
    "a pickle named in the manifest": (named_in_the_manifest, MANIFEST_FILE),
    "state: negative step": (state({"step": -1}), STATE_FILE),
    "state: step of another folder": (state({"step": 8}), STATE_FILE),
    "state: text for a number": (state({"tokens_seen": "many"}), STATE_FILE),
    "state: true for a number": (state({"step": True}), STATE_FILE),
    "state: NaN": (state({"elapsed_s": float("nan")}), STATE_FILE),
    "state: infinity": (state({"best": float("inf")}), STATE_FILE),
    "state: huge": (state({"tokens_seen": 10**4000}), STATE_FILE),
    "state: cursor of text": (state({"cursor": {"epoch": "0", "update": 0}}), STATE_FILE),
    "state: cursor with more": (state({"cursor": {"epoch": 0, "update": 0, "x": 1}}), STATE_FILE),
    "state: no cursor": (state({}, without="cursor"), STATE_FILE),
    "state: no step": (state({}, without="step"), STATE_FILE),
    "state: unknown key": (state({"__class__": "x"}), STATE_FILE),
    "state: key to mock the terminal": (state({"\x1b[2J\n": 1}), STATE_FILE),
    "state: a list": (content(STATE_FILE, b"[1]"), STATE_FILE),
    "state: a number": (content(STATE_FILE, b"1"), STATE_FILE),
    "state: nested": (content(STATE_FILE, b"[" * 100_000), STATE_FILE),
    "state: pickle": (content(STATE_FILE, pickled), STATE_FILE),
    "state: 1 TB": (sparse(STATE_FILE, b"{}", 10**12), STATE_FILE),
    "state: half an average": (state({"averaged": ["x"]}), STATE_FILE),
    "state: an average of numbers": (
        content(STATE_FILE, b'{"averaged": [1], "step": 9}'),
        STATE_FILE,
    ),
    "manifest: ../": (
        manifest(lambda m: m.update({"../../outside": m.pop(VOCAB_FILE)})),
        MANIFEST_FILE,
    ),
    "manifest: absolute": (
        manifest(lambda m: m.update({"/etc/passwd": m[VOCAB_FILE]})),
        MANIFEST_FILE,
    ),
    "manifest: .": (manifest(lambda m: m.update({".": m[VOCAB_FILE]})), MANIFEST_FILE),
    "manifest: line in a name": (
        manifest(lambda m: m.update({"a\nb": m[VOCAB_FILE]})),
        MANIFEST_FILE,
    ),
    "manifest: NUL in a name": (
        manifest(lambda m: m.update({"a\0b": m[VOCAB_FILE]})),
        MANIFEST_FILE,
    ),
    "manifest: nested": (
        manifest(lambda m: m.update({VOCAB_FILE: {"sha256": {}, "size": [{}]}})),
        MANIFEST_FILE,
    ),
    "manifest: negative size": (manifest(lambda m: m[VOCAB_FILE].update(size=-1)), MANIFEST_FILE),
    "manifest: true for a size": (
        manifest(lambda m: m[VOCAB_FILE].update(size=True)),
        MANIFEST_FILE,
    ),
    "manifest: 10^4000": (manifest(lambda m: m[VOCAB_FILE].update(size=10**4000)), MANIFEST_FILE),
    "manifest: 5,000 digits": (
        unsealed(b'{"x": {"sha256": "", "size": ' + b"9" * 5000 + b"}}"),
        MANIFEST_FILE,
    ),
    "manifest: infinity": (
        manifest(lambda m: m[VOCAB_FILE].update(size=float("inf"))),
        MANIFEST_FILE,
    ),
    "manifest: no digest": (manifest(lambda m: m[VOCAB_FILE].update(sha256="0")), MANIFEST_FILE),
    "manifest: no vocabulary": (manifest(lambda m: m.pop(VOCAB_FILE)), VOCAB_FILE),
    "manifest: no optimizer": (manifest(lambda m: m.pop(OPTIMIZER_FILE)), OPTIMIZER_FILE),
    "manifest: deep": (unsealed(b"[" * 500_000), MANIFEST_FILE),
    "manifest: 1 GB": (sparse(MANIFEST_FILE, b"{}", 10**9), MANIFEST_FILE),
    "manifest: pickle": (lambda folder: unsealed(pickled(folder))(folder), MANIFEST_FILE),
    "manifest: none": (lambda folder: (folder / MANIFEST_FILE).unlink(), MANIFEST_FILE),
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
    model = pieces(15)
    for step in (7, 9):
        write_checkpoint(root / "good" / "checkpoints" / f"step-000000{step}", step, model, 15)
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
        timeout=300,
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_a_stranger(case: str, answers: dict[str, Answer], folder: Path) -> None:
    answer, number, name = answers[case], list(CASES).index(case), CASES[case][1]
    place = str(folder / str(number) / "checkpoints" / "step-0000009")
    begin, end = "warning: ", "; trying the previous checkpoint\n"
    assert answer.said.startswith(f"{begin}{place}") and answer.said.endswith(end)
    complaint = answer.said.removeprefix(begin).removesuffix(end)
    assert name in complaint.removeprefix(place)
    assert complaint.isprintable() and len(complaint) < len(place) + 400
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
    "model: pickle",
    "state: NaN",
    "config: d_model",
    "config: objects",
    "tensors: 10^10 elements",
    "header: 100 MB",
    "vocab: empty",
    "manifest: ../",
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
    assert (
        command(
            [str(checkpoint), *(["-o", str(tmp_path / "mean")] if command is nmt_average else [])]
        )
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and CASES[case][1] in captured.err
    assert not (tmp_path / "mean").exists() and not (checkpoint.parent.parent / CANARY).exists()
