"""What nmt-translate --attention writes: as many lines as fit, complete or not at all."""

from pathlib import Path

from pytest import MonkeyPatch, fixture, raises
from support.capture import Capture, read_stderr
from support.processor import CPU
from support.text_lines import read_json_lines
from support.untrained import DECODING, make_model

from nmt.data.vocab import Vocab
from nmt.extras.maps.attention_maps import compute_attention_maps
from nmt.extras.report.attention_file import open_attention_file
from nmt.system.errors import UserError
from nmt.translate.translator import Translator

LINES = ["red dog", "", "the blue cat", "a tree"]


@fixture(scope="module")
def translator(vocab: Vocab) -> Translator:
    return Translator(make_model(vocab), vocab, DECODING, CPU)


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
    rows = read_json_lines(path)
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
    capsys: Capture,
    monkeypatch: MonkeyPatch,
) -> None:
    path = tmp_path / "a.html"
    write(path, translator)
    assert path.read_text().count("application/json") == 3
    assert read_stderr(capsys) == ""

    monkeypatch.setattr("nmt.extras.report.attention_file.MAX_PAGE_LINES", 4)
    write(path, translator, n_chunks=3)
    message = "the first 6 of 12 lines"  # one of four is empty
    assert path.read_text().count("application/json") == 4
    assert message in path.read_text() and message in read_stderr(capsys)

    monkeypatch.setattr("nmt.extras.report.attention_file.MAX_PAGE_WEIGHTS", 10)
    write(path, translator)
    assert "the first 0 of 4 lines" in path.read_text()


def test_only_a_whole_file_replaces_what_was_there(translator: Translator, tmp_path: Path) -> None:
    with raises(UserError, match="does not exist"):
        write(tmp_path / "nowhere" / "a.html", translator)
    (tmp_path / "manifest.json").write_text("{}")
    with raises(UserError, match="belongs to a run"):
        write(tmp_path / "a.html", translator)
    (tmp_path / "manifest.json").unlink()

    path = tmp_path / "a.json"
    path.write_text("old")
    with raises(KeyboardInterrupt), open_attention_file(path, "title") as file:
        file.add(translator, LINES, translator.translate(LINES))
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
