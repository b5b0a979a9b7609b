"""What nmt-translate --attention writes: as many lines as fit, complete or not at all."""

import builtins
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hostile_text import PAYLOADS
from support.needs import needs_package
from support.untrained import DECODING, make_model, make_vocab

from nmt.data.vocab import Vocab
from nmt.report.attention_file import draw_attention_image, open_attention_file
from nmt.system.errors import UserError
from nmt.translate.attention_maps import AttentionMap, compute_attention_maps
from nmt.translate.translator import Translator

LINES = ["red dog", "", "the blue cat", "a tree"]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    return make_vocab(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def translator(vocab: Vocab) -> Translator:
    return Translator(make_model(vocab), vocab, DECODING, torch.device("cpu"))


def write(path: Path, translator: Translator, n_chunks: int = 1) -> None:
    best = translator.translate(LINES)
    with open_attention_file(path, "a title") as file:
        for _ in range(n_chunks):
            file.add(translator, LINES, best)


def test_json_has_an_object_for_each_line(
    translator: Translator, vocab: Vocab, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    write(path, translator, n_chunks=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.pop("line") for row in rows] == list(range(1, 9))
    best = translator.translate(LINES)
    for number, row in enumerate(rows):
        line, ids = LINES[number % 4], best[number % 4].piece_ids
        if line:
            (one,) = compute_attention_maps(translator.model, vocab, vocab.encode([line]), [ids])
            assert row == one.to_json()
        else:
            assert row == {"source": [], "target": [], "alignment": [], "attention": {}}


def test_a_page_has_as_many_lines_as_fit(
    translator: Translator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "a.html"
    write(path, translator)
    assert path.read_text().count("application/json") == 3
    assert capsys.readouterr().err == ""

    monkeypatch.setattr("nmt.report.attention_file.MAX_PAGE_LINES", 4)
    write(path, translator, n_chunks=3)
    message = "the first 6 of 12 lines"  # one of four is empty
    assert path.read_text().count("application/json") == 4
    assert message in path.read_text() and message in capsys.readouterr().err

    monkeypatch.setattr("nmt.report.attention_file.MAX_PAGE_WEIGHTS", 10)
    write(path, translator)
    assert "the first 0 of 4 lines" in path.read_text()


@needs_package("vl_convert")
def test_an_image_shows_the_first_line(
    translator: Translator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib import image

    path = tmp_path / "a.png"
    write(path, translator)
    assert "shows the first 2 of 4 lines" in capsys.readouterr().err  # the second is empty
    pixels = image.imread(path)  # decodes it
    one = next(translator.map_attention(LINES, translator.translate(LINES)))
    assert one is not None
    # a white grid, and the strongest weight as dark as the scale allows
    assert pixels.shape[0] >= 40 * len(one.target) and pixels.shape[1] >= 40 * len(one.source)
    darkest = np.array([0x2C, 0x7A, 0xE8]) / 255
    assert (np.abs(pixels[:, :, :3] - darkest).max(-1) < 0.03).any()


@needs_package("vl_convert")
def test_an_image_of_hostile_pieces_and_of_too_many(tmp_path: Path) -> None:
    def make_map(source: list[str]) -> AttentionMap:
        weights = np.full((1, 1, 2, len(source)), 1 / len(source), np.float32)
        return AttentionMap(source, ["a", "</s>"], [0], weights)

    data = draw_attention_image(make_map([*PAYLOADS, "</s>"]))
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 40 * len(PAYLOADS) and height < 1_000
    with pytest.raises(UserError, match="room for 250 pieces, and the line has 251"):
        draw_attention_image(make_map(["a"] * 251))


def test_what_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_it(name: str) -> None:
        with open_attention_file(tmp_path / name, "title"):
            raise AssertionError("too late")

    with pytest.raises(UserError, match="does not exist"):
        open_it("nowhere/a.html")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="belongs to a run"):
        open_it("a.html")
    (tmp_path / "manifest.json").unlink()

    real = builtins.__import__

    def without_vl_convert(name: str, *rest: Any) -> Any:
        if name == "vl_convert":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_vl_convert)
    with pytest.raises(UserError, match=r"pip install '.\[report\]'"):
        open_it("a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_what_was_there(translator: Translator, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), open_attention_file(path, "title") as file:
        file.add(translator, LINES, translator.translate(LINES))
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
