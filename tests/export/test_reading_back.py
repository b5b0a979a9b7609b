"""What nmt exported to Marian or Bergamot is a model again, which every command takes."""

import hashlib
from pathlib import Path

import torch
from pytest import MonkeyPatch, mark
from support.capture import Capture
from support.checkout import ROOT
from support.in_process import refuse, succeed
from support.marian_models import LINES, SHAPES, make_shaped

from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.translate import main as nmt_translate
from nmt.extras.cards.card import render_export_card
from nmt.extras.export.export import export
from nmt.extras.export.marian import convert_if_published
from nmt.extras.export.parity import Agreement, OwnEngine, compare_engines
from nmt.system.files import read_json, write_json
from nmt.translate.translator import make_translator


@mark.parametrize("name", SHAPES)
def test_it_computes_what_was_exported(name: str, tmp_path: Path) -> None:
    found = compare_with_copy(name, "marian", "float32", tmp_path)
    assert found.differing == 0 and found.largest < 2e-5


@mark.parametrize("name", ["pair", "tied-logits-scaled-rows", "untied-small-heads"])
def test_8_bits_compute_nearly_the_same(name: str, tmp_path: Path) -> None:
    assert 1e-4 < compare_with_copy(name, "bergamot", "int8", tmp_path).mean < 0.05


def compare_with_copy(name: str, to: str, quantization: str, tmp_path: Path) -> Agreement:
    checkpoint, out = make_shaped(name, tmp_path), tmp_path / "out"
    export(checkpoint, to, out, quantization, LINES)
    (out / "README.md").write_text("the owner's words")
    again = open_checkpoint(convert_if_published(out, tmp_path / "again", False))
    assert "| weights | those of out" in render_export_card(again, to, "int8", "", "", "")
    engines = []
    for model in (checkpoint, again):
        cpu = torch.device("cpu")
        engines.append(OwnEngine(make_translator(model, cpu, model.config.decoding).model))
    src = checkpoint.vocab.src.encode(LINES)
    return compare_engines(engines[0], engines[1], src, 20)


@mark.parametrize("to, file", [("marian", "model.npz"), ("bergamot", "model.bin")])
def test_a_damaged_file_is_named(to: str, file: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    export(make_shaped("tied", tmp_path), to, out, "float32", LINES)
    content = bytearray((out / file).read_bytes())
    content[len(content) // 2] ^= 1
    (out / file).write_bytes(content)
    assert f"{out / file}: " in refuse(capsys, nmt_translate, out, "-i", tmp_path / "missing")
    (out / file).write_bytes(b"PK" * 50)
    entries = read_json(out / "manifest.json")
    digest = hashlib.sha256(b"PK" * 50).hexdigest()
    write_json(out / "manifest.json", {**entries, file: {"size": 100, "sha256": digest}})
    message = refuse(capsys, nmt_translate, out, "-i", tmp_path / "missing")
    assert f"{out}: its weights, pieces and settings do not fit each other" in message


def test_the_shipped_model_translates_by_its_name(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # it may have been converted before
    Path("in").write_text("The vote will take place tomorrow.\n")
    succeed(nmt_translate, "en-fr", "-i", "in", "-o", "out")
    assert Path("out").read_text() == "Le vote aura lieu demain.\n"
    Path("en-fr").mkdir()  # one's own comes first
    assert "en-fr: has no manifest.json" in refuse(capsys, nmt_translate, "en-fr", "-i", "in")


def test_the_shipped_model_is_small() -> None:
    files = (ROOT / "nmt/shipped/en-fr").iterdir()
    assert sum(file.stat().st_size for file in files) < 8_000_000
