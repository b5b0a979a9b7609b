"""A stranger's checkpoints: whatever lies in the folder is refused in one line, soon, in little memory, unexecuted.

Each case is a whole checkpoint with one thing wrong, sealed anew where a malicious author would, so that digests agree.
A child process with torch imported opens each as nmt-translate does and continues the run around it as nmt-train does;
it measures processor time and the peak of memory above what it had before.
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

from nmt.checkpoint import CONFIG, MODEL, OPTIMIZER, STATE, VOCAB, TrainState
from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.translate import main as nmt_translate
from nmt.config import ModelConfig, RunConfig, dump
from nmt.model.transformer import Transformer
from nmt.system.files import MANIFEST, seal, write_folder

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
        save_file(weights, folder / MODEL)
        save_file(moments, folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps(asdict(TrainState(step=step))))
        (folder / CONFIG).write_text(dump(RunConfig(model=MODEL_CONFIG)))
        (folder / VOCAB).write_bytes(vocab)

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
        before = json.loads((folder / STATE).read_text())
        (folder / STATE).write_text(
            json.dumps({k: v for k, v in (before | values).items() if k != without})
        )
        seal(folder)

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], name: str = MODEL) -> Change:
    def changed(folder: Path) -> None:
        values = {key: value.clone() for key, value in load_file(folder / name).items()}
        change(values)
        save_file(values, folder / name)
        seal(folder)

    return changed


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Another header before the same data."""

    def changed(folder: Path) -> None:
        data = (folder / MODEL).read_bytes()
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + size])
        change(entries)
        (folder / MODEL).write_bytes(framed(json.dumps(entries).encode()) + data[8 + size :])
        seal(folder)

    return changed


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def sparse(name: str, start: bytes, size: int) -> Change:
    """A file of any size that takes no room on the disk; the manifest knows the size."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, size)
        if name != MANIFEST:
            manifest(lambda entries: entries[name].update(size=size))(folder)

    return change


def manifest(change: Callable[[dict[str, Any]], Any]) -> Change:
    def changed(folder: Path) -> None:
        entries = json.loads((folder / MANIFEST).read_text())
        change(entries)
        (folder / MANIFEST).write_text(json.dumps(entries))

    return changed


def unsealed(data: bytes) -> Change:
    return lambda folder: (folder / MANIFEST).write_bytes(data)


def instead(name: str, make: Callable[[Path], object]) -> Change:
    """No file but something else of its name."""

    def change(folder: Path) -> None:
        os.replace(folder / name, folder.parent.parent / f"outside-{name}")
        make(folder / name)

    return change


def link(path: Path) -> None:
    path.symlink_to(
        path.parent.parent.parent / f"outside-{path.name}"
    )  # the very content, elsewhere


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
PART_NAMES = (MODEL, OPTIMIZER, STATE, CONFIG, VOCAB)

CASES: dict[
    str, tuple[Change, str]
] = {  # name -> what is done, and which file the one line must name
    "config: d_model": (text(CONFIG, "d_model: 8", "d_model: 1000000"), MODEL),
    "config: d_model 2^62": (text(CONFIG, "d_model: 8", f"d_model: {2**62}"), CONFIG),
    "config: n_layers": (text(CONFIG, "n_layers: 2", "n_layers: 100000"), MODEL),
    "config: fewer layers": (text(CONFIG, "n_layers: 2", "n_layers: 1"), MODEL),
    "config: n_layers 2^62": (text(CONFIG, "n_layers: 2", f"n_layers: {2**62}"), MODEL),
    "config: d_ff": (text(CONFIG, "d_ff: 12", "d_ff: 1000000000000"), MODEL),
    "config: d_k": (text(CONFIG, "d_k: null", f"d_k: {2**62}"), CONFIG),
    "config: learned positions": (
        text(
            CONFIG,
            "positions: sinusoidal\n  max_positions: 1024",
            "positions: learned\n  max_positions: 1000000000000",
        ),
        MODEL,
    ),
    "config: untied": (text(CONFIG, "tied: true", "tied: false"), MODEL),
    "config: NaN": (text(CONFIG, "dropout: 0.1", "dropout: .nan"), CONFIG),
    "config: long number": (text(CONFIG, "d_model: 8", "d_model: " + "8" * 5000), CONFIG),
    "config: what is almost a number": (
        text(CONFIG, "d_model: 8", "d_model: " + "8" * 60_000 + "x"),
        CONFIG,
    ),
    "config: extends another file": (
        text(CONFIG, "name: run", "name: run\nextends: /etc/passwd"),
        CONFIG,
    ),
    "config: objects": (content(CONFIG, yaml_of_objects), CONFIG),
    "config: aliases": (
        content(
            CONFIG,
            b"a: &a [x,x,x]\n"
            + b"".join(
                b"%c: &%c [*%c,*%c,*%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i, 97 + i)
                for i in range(20)
            ),
        ),
        CONFIG,
    ),
    "config: brackets": (content(CONFIG, b"name: " + b"[" * 5000), CONFIG),
    "config: closed brackets": (content(CONFIG, b"name: " + b"[" * 5000 + b"]" * 5000), CONFIG),
    "config: no UTF-8": (content(CONFIG, b"name: \xff\xfe"), CONFIG),
    "config: 1 TB": (sparse(CONFIG, b"name: x\n", 10**12), CONFIG),
    "tensors: 10^10 elements": (sparse(MODEL, HUGE, len(HUGE) + 4 * 10**10), MODEL),
    "tensors: 10^10 elements, no data": (content(MODEL, HUGE), MODEL),
    "tensors: fp64": (tensors(lambda t: t.update({BIAS: t[BIAS].double()})), MODEL),
    "tensors: int8": (tensors(lambda t: t.update({BIAS: t[BIAS].to(torch.int8)})), MODEL),
    "tensors: fp64 moments": (
        tensors(lambda t: t.update({f"exp_avg.{BIAS}": t[f"exp_avg.{BIAS}"].double()}), OPTIMIZER),
        OPTIMIZER,
    ),
    "tensors: another shape of moments": (
        tensors(lambda t: t.update({f"exp_avg.{BIAS}": torch.ones(3)}), OPTIMIZER),
        OPTIMIZER,
    ),
    "tensors: many steps": (
        tensors(lambda t: t.update({f"step.{BIAS}": torch.ones(3)}), OPTIMIZER),
        OPTIMIZER,
    ),
    "tensors: one more": (tensors(lambda t: t.update(extra=torch.ones(1))), MODEL),
    "tensors: one more, to mock the terminal": (
        tensors(lambda t: t.update({"\x1b[2J\n": torch.ones(1)})),
        MODEL,
    ),
    "tensors: one less": (tensors(lambda t: t.pop(BIAS)), MODEL),
    "tensors: transposed": (tensors(lambda t: t.update({BIAS: t[BIAS][None]})), MODEL),
    "header: 100 MB": (sparse(MODEL, (10**8).to_bytes(8, "little") + b"{}", 10**8 + 8), MODEL),
    "header: 2^63 bytes": (content(MODEL, (2**63).to_bytes(8, "little") + b"{}"), MODEL),
    "header: longer than the file": (content(MODEL, (100).to_bytes(8, "little") + b"{}"), MODEL),
    "header: 100,000 layers": (
        content(
            MODEL,
            framed(json.dumps({f"encoder.{i}.x": zeros([0], 0) for i in range(100_000)}).encode()),
        ),
        MODEL,
    ),
    "header: overlap": (
        header(
            lambda h: h[BIAS].update(
                data_offsets=h["decoder.1.feed_forward.inner.bias"]["data_offsets"]
            )
        ),
        MODEL,
    ),
    "header: beyond the end": (
        header(lambda h: h[BIAS].update(data_offsets=[2**40, 2**40 + 48])),
        MODEL,
    ),
    "header: negative offsets": (header(lambda h: h[BIAS].update(data_offsets=[-48, 0])), MODEL),
    "header: a shape that overflows": (
        header(lambda h: h[BIAS].update(shape=[2**33, 2**33])),
        MODEL,
    ),
    "header: another shape of as much": (header(lambda h: h[BIAS].update(shape=[3, 4])), MODEL),
    "header: unknown type": (header(lambda h: h[BIAS].update(dtype="OBJ")), MODEL),
    "header: no JSON": (content(MODEL, framed(b"\x80\x04pickle")), MODEL),
    "header: a list": (content(MODEL, framed(b"[1]")), MODEL),
    "header: nested": (content(MODEL, framed(b"[" * 5000)), MODEL),
    "model: empty": (content(MODEL, b""), MODEL),
    "model: pickle": (content(MODEL, pickled), MODEL),
    "optimizer: pickle": (content(OPTIMIZER, pickled), OPTIMIZER),
    "model: torch.save": (content(MODEL, saved_by_torch), MODEL),
    "model: TorchScript": (
        content(MODEL, lambda folder: archive(folder, "archive/code/__torch__.py", b"import os")),
        MODEL,
    ),
    "model: zip bomb": (
        content(MODEL, lambda folder: archive(folder, "archive/data/0", bytes(10**8))),
        MODEL,
    ),
    "vocab: zip bomb": (
        content(VOCAB, lambda folder: archive(folder, "archive/data/0", bytes(10**8))),
        VOCAB,
    ),
    "vocab: pickle": (content(VOCAB, pickled), VOCAB),
    "vocab: empty": (content(VOCAB, b""), VOCAB),
    "vocab: 1 TB": (sparse(VOCAB, b"", 10**12), VOCAB),
    "vocab: a piece that is no text": (
        content(VOCAB, lambda folder: pieces(15).replace(b"\xe2\x96\x81", b"\xe2\x96\xff")),
        VOCAB,
    ),
    "vocab: one piece less": (content(VOCAB, lambda folder: pieces(14)), MODEL),
    "a pickle named in the manifest": (named_in_the_manifest, MANIFEST),
    "state: negative step": (state({"step": -1}), STATE),
    "state: step of another folder": (state({"step": 8}), STATE),
    "state: text for a number": (state({"tokens_seen": "many"}), STATE),
    "state: true for a number": (state({"step": True}), STATE),
    "state: NaN": (state({"elapsed_s": float("nan")}), STATE),
    "state: infinity": (state({"best": float("inf")}), STATE),
    "state: huge": (state({"tokens_seen": 10**4000}), STATE),
    "state: cursor of text": (state({"cursor": {"epoch": "0", "update": 0}}), STATE),
    "state: cursor with more": (state({"cursor": {"epoch": 0, "update": 0, "x": 1}}), STATE),
    "state: no cursor": (state({}, without="cursor"), STATE),
    "state: no step": (state({}, without="step"), STATE),
    "state: unknown key": (state({"__class__": "x"}), STATE),
    "state: key to mock the terminal": (state({"\x1b[2J\n": 1}), STATE),
    "state: a list": (content(STATE, b"[1]"), STATE),
    "state: a number": (content(STATE, b"1"), STATE),
    "state: nested": (content(STATE, b"[" * 100_000), STATE),
    "state: pickle": (content(STATE, pickled), STATE),
    "state: 1 TB": (sparse(STATE, b"{}", 10**12), STATE),
    "state: half an average": (state({"averaged": ["x"]}), STATE),
    "state: an average of numbers": (content(STATE, b'{"averaged": [1], "step": 9}'), STATE),
    "manifest: ../": (manifest(lambda m: m.update({"../../outside": m.pop(VOCAB)})), MANIFEST),
    "manifest: absolute": (manifest(lambda m: m.update({"/etc/passwd": m[VOCAB]})), MANIFEST),
    "manifest: .": (manifest(lambda m: m.update({".": m[VOCAB]})), MANIFEST),
    "manifest: line in a name": (manifest(lambda m: m.update({"a\nb": m[VOCAB]})), MANIFEST),
    "manifest: NUL in a name": (manifest(lambda m: m.update({"a\0b": m[VOCAB]})), MANIFEST),
    "manifest: nested": (
        manifest(lambda m: m.update({VOCAB: {"sha256": {}, "size": [{}]}})),
        MANIFEST,
    ),
    "manifest: negative size": (manifest(lambda m: m[VOCAB].update(size=-1)), MANIFEST),
    "manifest: true for a size": (manifest(lambda m: m[VOCAB].update(size=True)), MANIFEST),
    "manifest: 10^4000": (manifest(lambda m: m[VOCAB].update(size=10**4000)), MANIFEST),
    "manifest: 5,000 digits": (
        unsealed(b'{"x": {"sha256": "", "size": ' + b"9" * 5000 + b"}}"),
        MANIFEST,
    ),
    "manifest: infinity": (manifest(lambda m: m[VOCAB].update(size=float("inf"))), MANIFEST),
    "manifest: no digest": (manifest(lambda m: m[VOCAB].update(sha256="0")), MANIFEST),
    "manifest: no vocabulary": (manifest(lambda m: m.pop(VOCAB)), VOCAB),
    "manifest: no optimizer": (manifest(lambda m: m.pop(OPTIMIZER)), OPTIMIZER),
    "manifest: deep": (unsealed(b"[" * 500_000), MANIFEST),
    "manifest: 1 GB": (sparse(MANIFEST, b"{}", 10**9), MANIFEST),
    "manifest: pickle": (lambda folder: unsealed(pickled(folder))(folder), MANIFEST),
    "manifest: none": (lambda folder: (folder / MANIFEST).unlink(), MANIFEST),
}
for _name in (*PART_NAMES, MANIFEST):
    CASES |= {
        f"a link for {_name}": (instead(_name, link), _name),
        f"/dev/zero for {_name}": (
            instead(_name, lambda path: path.symlink_to("/dev/zero")),
            _name,
        ),
        f"a pipe for {_name}": (instead(_name, os.mkfifo), _name),
        f"a folder for {_name}": (instead(_name, Path.mkdir), _name),
        f"a link in a circle for {_name}": (
            instead(_name, lambda path: path.symlink_to(path.name)),
            _name,
        ),
    }


def unnamed_files(folder: Path) -> None:
    for name in ("model.pt", "pytorch_model.bin", "optimizer.pkl"):
        (folder / name).write_bytes(pickled(folder))
    os.mkfifo(folder / "notes")


def linked_folder(folder: Path) -> None:
    elsewhere = folder.parent.parent / folder.name
    os.rename(folder, elsewhere)
    folder.symlink_to(elsewhere)


HARMLESS: dict[str, Change] = {
    "nothing": lambda folder: None,
    "files that nothing names": unnamed_files,
    "a link to a whole folder": linked_folder,
    "positions that no file bounds": text(
        CONFIG, "max_positions: 1024", "max_positions: 1000000000000"
    ),
}

CHILD = """
import contextlib, io, json, signal, sys, time
from pathlib import Path
import torch
from nmt.checkpoint import load, newest
from nmt.config import DecodingConfig
from nmt.translate.translator import make_translator
from nmt.system.files import RunFolder

def memory(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1024

def hung(*_):
    raise SystemError("no answer in 20 s")

def opened(run):
    make_translator(load(run.checkpoint(9)), torch.device("cpu"), DecodingConfig())

def continued(run):
    return newest(run).state["step"]

def told(work, run):
    try:
        return work(run)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

signal.signal(signal.SIGALRM, hung)
for path in map(Path, sys.argv[1:]):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before, began = memory("VmRSS"), time.process_time()
    signal.alarm(20)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        results = [told(opened, RunFolder(path)), told(continued, RunFolder(path))]
    signal.alarm(0)
    print(json.dumps([*results, said.getvalue(), time.process_time() - began, memory("VmHWM") - before]), flush=True)
"""


@dataclass(frozen=True)
class Answer:
    opened: str | None
    continued: int | str
    said: str
    seconds: float
    memory_mb: float


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose newest checkpoint of two is untouched, and one for each case."""
    root = tmp_path_factory.mktemp("trust")
    model = pieces(15)
    for step in (7, 9):
        write_checkpoint(root / "good" / "checkpoints" / f"step-000000{step}", step, model, 15)
    changes = {str(number): change for number, (change, _) in enumerate(CASES.values())} | HARMLESS
    for name, change in changes.items():
        shutil.copytree(root / "good", root / name)
        change(root / name / "checkpoints" / "step-0000009")
    return root


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Answer]:
    runs = ["good", *HARMLESS, *map(str, range(len(CASES)))]  # the first one warms up
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *(str(folder / name) for name in runs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    found = [Answer(*json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip((*HARMLESS, *CASES), found[1:], strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_a_stranger(case: str, answers: dict[str, Answer], folder: Path) -> None:
    answer, number, name = answers[case], list(CASES).index(case), CASES[case][1]
    place = str(folder / str(number) / "checkpoints" / "step-0000009")
    complaint = str(answer.opened)
    assert complaint.startswith(f"UserError: {place}") and name in complaint.removeprefix(
        f"UserError: {place}"
    )
    assert complaint.isprintable() and len(complaint) < len(place) + 400
    assert answer.continued == 7
    assert (
        answer.said == f"warning: {complaint.removeprefix('UserError: ')}; trying the one before\n"
    )
    assert (
        answer.seconds < 4 * SECONDS and answer.memory_mb < MEMORY_MB
    )  # opened twice, maybe on a busy machine
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
def test_what_does_no_harm_is_accepted(case: str, answers: dict[str, Answer], folder: Path) -> None:
    answer = answers[case]
    assert (answer.opened, answer.continued, answer.said) == (None, 9, "")
    assert answer.memory_mb < MEMORY_MB and not (folder / case / CANARY).exists()


@pytest.mark.parametrize(
    "case",
    [
        "config: d_model",
        "config: objects",
        "tensors: 10^10 elements",
        "header: 100 MB",
        "model: pickle",
        "vocab: empty",
        "state: NaN",
        "manifest: ../",
        f"a pipe for {MODEL}",
        f"/dev/zero for {MANIFEST}",
    ],
)
@pytest.mark.parametrize("command", [nmt_translate, nmt_eval, nmt_average])
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
