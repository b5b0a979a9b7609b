"""Files that a stranger wrote, or that were cut or garbled, in the place of those that nmt writes.

Whatever they hold, a command says in one line what is wrong, and nothing is overwritten. Where the
work does not depend on the file it is done, and a note or a warning says what was left out.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.finished_run import (
    finished_run,  # noqa: F401 (the fixture `whole`)
    intact_run,  # noqa: F401 (the fixture `ground`)
    score_average,
)
from support.soaking import (
    Ground,
    counted,
)

from nmt.commands.average import main as nmt_average
from nmt.commands.prepare import main as nmt_prepare
from nmt.commands.train import main as nmt_train
from nmt.system.files import read_json, seal

SETTINGS = (
    "training.steps=6",
    "training.log_every=1",
    "training.validate_every=3",
    "training.checkpoint_every=3",
    "evaluation.bleu=false",
    "decoding.max_extra=1",
)
CHECKPOINT = "run/checkpoints/step-0000006"

GARBAGE = {
    "nothing": b"",
    "no text": bytes(range(256)),
    "cut off": b'{"kind": "train", "step": 1, "nl',
    "nested": b"[" * 1_500 + b"]" * 1_500,
    "nested past Python": b'{"step":' * 100_000,
    "400 digits": b'{"kind": "train", "step": 1, "nll": 1' + b"0" * 400 + b"}",
    "a step of 400 digits": b'{"kind": "train", "nll": 1, "step": 1' + b"0" * 400 + b"}",
    "1e308": b'{"kind": "train", "step": 1, "nll": 1e308}',
    "-1e308": b'{"kind": "train", "step": 1, "nll": -1e308}',
    "NaN": b'{"kind": "train", "step": 1, "nll": NaN}',
    "a list": b"[]",
    "a number": b"7",
    "no keys": b"{}",
    "other types": b'{"kind": [], "step": "1", "averaged": 1, "corpora": {}, "settings": 1}',
    "surrogates": b'{"kind": "\\ud800", "step": {}, "\\udfff": "\\ud800"}',
}
RESULTS = [name for name in GARBAGE if name != "a list"]  # no results are results, too
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


def train(ground: Ground, *settings: str) -> int:
    return nmt_train(
        ["--config", str(ground.config), f"out={ground.folder}/run", *SETTINGS, *settings]
    )


def test_metrics_are_no_reason_to_fail(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither at the start, nor after the last update, nor for the average of the best."""
    run = ground.run("run")
    lines = [*GARBAGE.values(), *ODD_LINES]
    content = b"\n".join(lines) + b"\n" + run.metrics.read_bytes()
    run.metrics.write_bytes(content)
    state = run.checkpoints / "step-0000006" / "state.json"
    values = json.loads(state.read_bytes())
    state.write_text(json.dumps(values | {"metrics_bytes": len(content)}))
    seal(state.parent)
    capsys.readouterr()

    assert train(ground, "training.steps=7") == 0
    said = capsys.readouterr().err
    assert "warning" not in said and "Traceback" not in said
    assert read_json(run.status)["state"] == "done"
    page = run.report.read_text()
    assert "line(s) of metrics.jsonl cannot be read and are left out" in page
    assert "\x1b" not in page

    assert nmt_average([str(run.path), "--best", "2", "-o", f"{ground.folder}/best"]) == 0


@pytest.mark.parametrize("garbage", counted(["nested", "400 digits", "other types"], RESULTS))
def test_scores_are_not_lost_to_a_foreign_file(
    garbage: str, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ground.folder / "run" / "results.json"
    results.write_bytes(GARBAGE[garbage])
    capsys.readouterr()
    assert score_average(ground) == 0
    told = capsys.readouterr()
    assert "BLEU" in told.out
    (line,) = told.err.splitlines()[-1:]
    assert line.startswith(f"warning: not recorded: {results}: ") and len(line) < 400
    assert results.read_bytes() == GARBAGE[garbage]


def test_a_ledger_may_hold_any_text(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples are the text of corpora, and names of files need not be UTF-8."""
    path = ground.folder / "store" / "ledger.json"
    ledger = json.loads(path.read_bytes())
    ledger["corpora"][0]["dropped"] = {"identical": 1}
    ledger["corpora"][0]["samples"] = {"identical": [["\0 <b>", "\ud800"]]}
    ledger["corpora"][0]["files"][0]["name"] = "\udcff" * 300
    path.write_text(json.dumps(ledger))
    seal(path.parent)
    for argv in (["--inspect", str(path.parent)], ["--config", str(ground.config)]):
        assert nmt_prepare(argv) == 0
    assert "en  <U+0000> <b>" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run/results.json", "store/.sources.json"])
def test_a_huge_file_is_not_read(
    name: str, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ground.folder / name
    with open(path, "r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    if name == "run/results.json":
        assert score_average(ground) == 0
    else:
        assert nmt_prepare(["--config", str(ground.config)]) == 2
    assert f"{path}: is damaged (1,099,511,627,776 bytes, but at most" in capsys.readouterr().err


REFUSED: dict[str, Callable[[Ground], int]] = {
    "store/ledger.json": lambda ground: nmt_prepare(["--inspect", f"{ground.folder}/store"]),
    "store/manifest.json": lambda ground: nmt_prepare(["--inspect", f"{ground.folder}/store"]),
    f"{CHECKPOINT}/state.json": lambda ground: nmt_average([f"{ground.folder}/run", "--last", "2"]),
    "run/average/state.json": score_average,
    "run/average/manifest.json": score_average,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_foreign_file_is_refused_in_one_line(
    name: str, garbage: str, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ground.folder / name
    path.write_bytes(GARBAGE[garbage])
    if path.name != "manifest.json":
        seal(path.parent)  # a stranger seals it
    capsys.readouterr()
    assert REFUSED[name](ground) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert f": error: {path.parent}" in line and len(line) < 500 and not told.out


@pytest.mark.parametrize("garbage", ["nested", "no text", "a list", "NaN"])
def test_what_is_known_of_the_sources_is_refused(
    garbage: str, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ground.folder / "store" / ".sources.json"
    sources.write_bytes(GARBAGE[garbage])
    assert nmt_prepare(["--config", str(ground.config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f": error: {sources}: is damaged" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept": "x"}, "corpora[0].kept: 'x' is not an integer"),
        ({"tokens": [1]}, "tokens has 1 values, not one for each language"),
        ({"samples": {"rule": []}}, "samples has a rule that dropped nothing"),
        ({"held_out": {"dev": [1]}}, "held_out must have three values for each set"),
        ({"files": [{"name": "a\0b"}]}, "corpora[0].files[0].size: is missing"),
    ],
)
def test_a_ledger_is_checked_value_by_value(
    change: dict[str, object], message: str, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ground.folder / "store" / "ledger.json"
    ledger = json.loads(path.read_bytes())
    ledger["corpora"][0] |= change
    path.write_text(json.dumps(ledger))
    seal(path.parent)
    for argv in (["--inspect", str(path.parent)], ["--config", str(ground.config)]):
        assert nmt_prepare(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"error: {path}: " in line and message in line and "prepare it again" in line


@pytest.mark.parametrize(
    ("settings", "message"),
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
    settings: list[str], message: str, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ground.folder / "new"
    assert train(ground, f"data.store={store}", f"out={ground.folder}/new-run", *settings) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and len(line) < 2_500
    assert not list(ground.folder.glob("new*"))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("x: can't allocate memory: 9 bytes")]
)
def test_memory_that_is_refused_is_one_line(
    error: Exception,
    ground: Ground,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("nmt.train.setup.Transformer", fail)
    assert train(ground, f"out={ground.folder}/new-run") == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("nmt-train: failed: out of memory; lower training.micro_tokens")


# ---- stores --------------------------------------------------------------------------------------


def rewrite(path: Path, values: bytes) -> None:
    """Write into a file in place, as no command of nmt does."""
    with open(path, "r+b") as file:
        file.seek(-len(values), 2)
        file.write(values)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("train.src.ids.npy", b"\xff" * 100, "id 65535, where the BPE model has 80 pieces"),
        ("valid.tgt.ids.npy", b"\xff" * 2, "id 65535, where the BPE model has 80 pieces"),
        ("train.tgt.offsets.npy", bytes(16), "does not match the file of ids"),
        ("valid.src.offsets.npy", bytes(8), "does not match the file of ids"),
    ],
)
def test_a_store_that_a_stranger_has_sealed_is_refused(
    name: str, values: bytes, message: str, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ground.folder / "store" / name
    rewrite(path, values)
    seal(path.parent)
    assert train(ground, f"out={ground.folder}/new-run") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert f"error: {path.parent}" in line and message in line


def test_offsets_that_fall_are_refused(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    path = ground.folder / "store" / "train.src.offsets.npy"
    offsets = np.load(path)
    offsets[5:9] = offsets[5:9][::-1]
    np.save(path, offsets)
    seal(path.parent)
    assert train(ground, f"out={ground.folder}/new-run") == 2
    assert "is damaged (offsets that do not rise)" in capsys.readouterr().err
