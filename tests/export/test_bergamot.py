"""What nmt-export writes for Bergamot: the bytes, what the engine would abort on, and, where the npm package
is installed, the engine itself.
"""

import json
import os
import re
import shutil
import struct
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.marian_models import LINES, PLAIN, SHAPES, make_exportable, make_shaped

from nmt.commands.export import main as nmt_export
from nmt.config import ModelConfig
from nmt.data.vocab import Vocab
from nmt.extras.export import bergamot
from nmt.extras.export.export import export
from nmt.extras.export.parity import OwnEngine
from nmt.translate.translator import make_translator

TRANSLATE = """
const [path, folder, precision, names, lines] = JSON.parse(process.argv[1]);
const {Worker} = require("node:worker_threads"), {readFileSync} = require("node:fs");
const worker = new Worker(path);
function call(name, ...args) {
  return new Promise((found, failed) => {
    worker.once("message", ({result, error}) => error ? failed(error.message) : found(result));
    worker.once("error", failed);
    worker.postMessage({id: 1, name, args});
  });
}
const read = name => new Uint8Array(readFileSync(`${folder}/${name}`)).buffer;
const pair = {from: "a", to: "b"}, texts = lines.map(text => ({text, html: true, qualityScores: true}));
(async () => {
  await call("initialize", {});
  const config = {"gemm-precision": precision, "skip-cost": "false"};
  const files = {model: read("model.bin"), vocabs: names.map(read), shortlist: new ArrayBuffer(0)};
  await call("loadTranslationModel", pair, {...files, config});
  for (const text of texts) {
    const [{target}] = await call("translate", {models: [pair], texts: [text]});
    console.log(target.text);
  }
  process.exit();
})();
"""


def test_a_file_is_laid_out_as_bergamot_reads_it() -> None:
    items = {"a": (0x404, (1, 2), b"12345678"), "bc": (0x101, (3,), b"abc")}
    file = bergamot.pack_items(items)
    front = struct.pack("<10Q", 1, 2, 2, 0x404, 2, 256, 3, 0x101, 1, 256)
    front += b"a\0bc\0" + struct.pack("<3iQ", 1, 2, 3, 151)
    assert file == front + bytes(151) + b"12345678".ljust(256, b"\0") + b"abc".ljust(256, b"\0")


@pytest.mark.parametrize(
    "name, rows", [("a_Wq", [64, 16, -127, 0, 32, 127]), ("a_Wemb", [64, -127, 32, 16, 0, 127])]
)
def test_a_matrix_is_rounded_by_its_largest_number(name: str, rows: list[int]) -> None:
    matrix = np.array([[1.0, -2.0, 0.5], [0.25, 0.0, 2.0]], np.float32)
    item = bergamot.quantize(name, matrix)
    assert item == (0x4101, (2, 3), struct.pack("<6bf", *rows, 63.5))


@pytest.fixture(autouse=True)
def compare_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.extras.export.export.MAX_COMPARED", 20)


@pytest.mark.parametrize("name", SHAPES)
def test_each_model_agrees(name: str, tmp_path: Path) -> None:
    checkpoint, out = make_shaped(name, tmp_path), tmp_path / "rounded"
    exact = export(checkpoint, "bergamot", tmp_path / "exact", "float32", LINES)
    assert exact.differing == 0 and exact.largest < 2e-5
    rounded = export(checkpoint, "bergamot", out, "int8", LINES)
    assert 1e-4 < rounded.mean < 0.05
    items = bergamot.unpack_items((out / "model.bin").read_bytes())
    in_8_bits = [key for key, (kind, *_) in items.items() if kind == 0x4101]
    multiplied = [key for key in in_8_bits if not key.endswith("Wemb")]
    assert len(multiplied) > 20 and all(f"{key}_QuantMultA" in items for key in multiplied)
    assert json.loads((out / "model_info.json").read_text()) == {
        "modelName": "English-German toy",
        "shortName": "en-de-toy",
        "type": "toy",
        "src": "English",
        "trg": "German",
        "version": 1,
        "API": 1,
    }


@pytest.mark.parametrize(
    "width, shape", [("d_model", replace(PLAIN, d_model=96)), ("d_ff", replace(PLAIN, d_ff=96))]
)
def test_8_bits_are_the_default_and_need_widths_that_the_engine_has(
    width: str, shape: ModelConfig, vocab: Vocab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_exportable(shape, tmp_path / "average", vocab)
    command = [str(checkpoint.path), "--to", "bergamot", "-o", str(tmp_path / "out")]
    assert nmt_export(command) == 2
    assert f"model.{width} is 96: in 8 bits" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert nmt_export([*command, "--quantization", "float32"]) == 0


def translate_in_node(folder: Path) -> list[tuple[str, float]]:
    """Return the translation of each of LINES, and the mean of the log-probabilities of its words."""
    path = Path(os.environ.get("NMT_NODE_MODULES", ""), "@browsermt/bergamot-translator/worker")
    if not shutil.which("node") or not (path / "package.json").is_file():
        pytest.skip(
            "NMT_NODE_MODULES names no folder with the npm package @browsermt/bergamot-translator "
            'and {"type": "commonjs"} as package.json in its worker/'
        )
    settings = yaml.safe_load((folder / "config.intgemm8bitalpha.yml").read_text())
    vocabs = list(dict.fromkeys(settings["vocabs"]))
    given = [
        str(path / "translator-worker.js"),
        str(folder),
        settings["gemm-precision"],
        vocabs,
        LINES,
    ]
    command = ["node", "-e", TRANSLATE, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        score = re.findall('sentence-score="(.*?)"', line)[0]
        found.append((unescape(re.sub("<.*?>", "", line)), float(score)))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_the_engine_itself(name: str, tmp_path: Path) -> None:
    checkpoint = make_shaped(name, tmp_path)
    for quantization in ("float32", "int8"):
        export(checkpoint, "bergamot", tmp_path / quantization, quantization, LINES)
    translator = make_translator(checkpoint, torch.device("cpu"), checkpoint.config.decoding)
    ours, expected = OwnEngine(translator.model), []
    for ids in checkpoint.vocab.src.encode(LINES):
        expected += ours.translate_greedily([ids], 2 * (len(ids) + 1))
    texts, scores = zip(*translate_in_node(tmp_path / "float32"), strict=True)
    assert list(texts) == checkpoint.vocab.tgt.decode(expected)
    _, rounded_scores = zip(*translate_in_node(tmp_path / "int8"), strict=True)
    assert np.mean(rounded_scores) == pytest.approx(np.mean(scores), abs=0.1)
