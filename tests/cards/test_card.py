"""The card beside an average: what the hub's own parser reads from it, and whose it is once
somebody has edited it.
"""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from support.hostile_text import OBEYED, PAYLOADS
from support.recorded_result import RESULT
from support.untrained import make_checkpoint, make_vocab

from nmt.average.mean import average_checkpoints
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.config import CorpusConfig, DataConfig
from nmt.config_files import format_config, load_config
from nmt.data.vocab import Vocab
from nmt.evaluate.results import Result
from nmt.extras.cards.card import write_average_card
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import read_manifest, seal
from nmt.system.output_folder import is_unedited_card
from nmt.system.run_folder import MODEL_FILE, STATE_FILE, VOCAB_FILE


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    return make_vocab(tmp_path_factory.mktemp("vocab"))


@pytest.fixture
def folder(tmp_path: Path, vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return make_checkpoint(tmp_path / "average", vocab)


def result_of(folder: Path) -> Result:
    files = read_manifest(folder)
    weights, vocab = files[MODEL_FILE]["sha256"], files[VOCAB_FILE]["sha256"]
    return replace(RESULT, pair="no-en", weights_sha256=weights, vocab_sha256=vocab)


def with_config(folder: Path, **changes: object) -> None:
    config = load_config(str(folder / "config.yaml"))
    (folder / "config.yaml").write_text(format_config(replace(config, **changes)))  # type: ignore[arg-type]
    seal(folder)


def test_the_hub_reads_it(folder: Path) -> None:
    corpora = (
        CorpusConfig(dataset="wmt/wmt14", subset="de-en"),
        CorpusConfig(src="a.en", tgt="a.de"),
    )
    # No, unquoted, is false in YAML
    data_config = DataConfig(src="no", tgt="en", train=corpora)
    with_config(folder, data=data_config, license="cc-by-4.0")
    result = result_of(folder)

    def rename(test_set: str, **changes: Any) -> Result:
        return replace(result, test_set=replace(result.test_set, name=test_set), **changes)

    split = replace(result.scores[0], name="BLEU tokenised, split, plain quotes")
    results = [
        result,
        rename("my/own set", scores=result.scores[1:]),
        rename("of other weights", weights_sha256="0" * 64),
        rename("newstest2013", pair="en-no", scores=[split]),
        rename("wmt14", scores=result.scores[:1]),
    ]
    write_average_card(folder, results)
    card = ModelCard.load(folder / "README.md")
    data = card.data.to_dict()
    assert data["language"] == ["no", "en"] and data["datasets"] == ["wmt/wmt14"]
    assert data["license"] == "cc-by-4.0" and "weights is cc-by-4.0." in card.text
    assert (data["library_name"], data["pipeline_tag"]) == ("nmt", "translation")
    assert card.data.model_name == "toy" and "transformer" in data["tags"]
    shown = []
    for each in card.data.eval_results:
        assert each.verified is False and each.task_type == "translation"
        place = (each.dataset_name, each.dataset_type, each.dataset_split, each.dataset_config)
        shown.append((each.task_name, each.metric_type, *place))
    forth, back = "Translation no-en", "Translation en-no"
    assert shown == [
        (forth, "bleu", "newstest2014", "wmt/wmt14", "test", "no-en"),
        (forth, "chrf", "newstest2014", "wmt/wmt14", "test", "no-en"),
        (forth, "chrf", "my/own set", "my-own-set", "test", None),
        (back, "bleu", "newstest2013", "wmt/wmt14", "validation", "no-en"),
        (forth, "bleu", "wmt14", "wmt14", "test", None),
    ]
    first = card.data.eval_results[0]
    # its config says 2
    named = "BLEU (nrefs:1|tok:13a), with beam=4"
    assert (first.metric_value, first.metric_name) == (27.3, named)
    assert first.dataset_args == {"lines": 3003, "src_sha256": "c" * 64, "ref_sha256": "d" * 64}
    assert "&id" not in card.content and "of other weights" not in card.content
    for fact in (
        "trained with nmt",
        "step-0000010",
        "26.90 to 27.70",
        r"`nrefs:1\|tok:13a`",
        "beam 4",
        "newstest2014 no-en, 3,003 lines",
        "newstest2013 en-no, 3,003 lines",
        "label smoothing 0.1",
        "nmt-translate . < text.no > text.en",
    ):
        assert fact in card.text, fact


def fill_with(folder: Path, text: str) -> str:
    """Write `text` wherever a stranger can, and return the card."""
    corpora = (CorpusConfig(src=text, tgt=f"{text}.de"), CorpusConfig(dataset=text, subset=text))
    text = text.replace("\0", "")  # configs refuse it
    state = {"averaged": [text, text], "step": 20}
    (folder / STATE_FILE).write_text(json.dumps(state))
    data = DataConfig(src=text, tgt=f"{text}.de", train=corpora)
    with_config(folder, name=text, license=text, data=data)
    result = result_of(folder)
    scores = [replace(score, name=text, signature=text) for score in result.scores]
    test_set = replace(result.test_set, name=text)
    strange = replace(result, test_set=test_set, scores=scores, pair=text, engine=text)
    strange = replace(strange, decoding={"beam": text, "penalty": text})
    write_average_card(folder, [result, strange])
    return (folder / "README.md").read_bytes().decode()


def parse_markdown(text: str) -> tuple[list[str], str]:
    """The elements of a text but for text itself, and what its first heading shows."""
    markdown_it = pytest.importorskip("markdown_it")
    elements = []
    shown = []
    for block in markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").parse(text):
        elements.append(block.type)
        if block.children is not None:
            elements += [inline.type for inline in block.children]
            shown.append("".join(inline.content for inline in block.children))
    words = ("text", "text_special", "code_inline")
    return [kind for kind in elements if kind not in words], shown[0]


@pytest.mark.parametrize("text", PAYLOADS, ids=ascii)
def test_no_name_acts_in_a_card(folder: Path, text: str) -> None:
    """The elements of the card are those of any card, and names show as they are."""
    text = text.replace("\0", "")
    harmless = ModelCard(fill_with(folder, "harmless"))
    content = fill_with(folder, text)
    assert OBEYED.isdisjoint(content) and is_unedited_card(folder / "README.md")
    card = ModelCard(content)
    data = card.data.to_dict()
    keys = set(harmless.data.to_dict()) - {"datasets"}  # such a name is none of a dataset
    assert set(data) == keys
    assert data["model-index"][0]["name"] == escape_line(text)
    assert data["language"] == [escape_line(text), escape_line(f"{text}.de")]

    elements, title = parse_markdown(card.text)
    assert elements == parse_markdown(harmless.text)[0]
    name, language = (escape_line(re.sub(r"\s+", " ", part)) for part in (text, f"{text}.de"))
    assert title.split() == f"{name}: {name} -> {language}".split()


@pytest.mark.parametrize("is_in_run", [False, True])
def test_without_scores_it_says_so(folder: Path, is_in_run: bool) -> None:
    """And how it comes by them: nmt-eval remembers what it finds only inside a run."""
    if is_in_run:
        (folder.parent / "checkpoints").mkdir()
        (folder.parent / "config.yaml").touch()
    write_average_card(folder, [])
    card = ModelCard.load(folder / "README.md")
    assert card.data.eval_results is None and "model-index" not in card.data.to_dict()
    assert "None was computed" in card.text and "{" not in card.text
    assert ("`nmt-eval` adds what it finds." in card.text) == is_in_run
    assert ("only while this folder is in a run folder" in card.text) != is_in_run


def test_it_is_no_part_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    before = read_manifest(folder)
    for results in ([], [result_of(folder)]):
        write_average_card(folder, results)
        assert read_manifest(folder) == before and open_checkpoint(folder).step == 20
        assert is_unedited_card(folder / "README.md")
    one = make_checkpoint(tmp_path / "step", Vocab.load(folder / VOCAB_FILE))
    average_checkpoints([one], folder)
    assert open_checkpoint(folder).averaged == ["step"]


def test_one_that_was_edited_is_left_alone(folder: Path) -> None:
    card = folder / "README.md"
    write_average_card(folder, [])
    card.write_text(card.read_text().replace("No licence of the weights is known.", "CC BY 4.0."))
    edited = card.read_bytes()
    with pytest.raises(UserError, match="README.md: was edited, or was not written by nmt"):
        write_average_card(folder, [result_of(folder)])
    assert card.read_bytes() == edited
    card.unlink()
    write_average_card(folder, [result_of(folder)])
    assert "27.30" in card.read_text()


def test_other_folders_have_none(tmp_path: Path) -> None:
    """An export has its own, in its manifest; a checkpoint of training comes and goes."""
    export = tmp_path / "export"
    export.mkdir()
    (export / "README.md").write_text("of nmt-export")
    write_average_card(export, [])
    assert (export / "README.md").read_text() == "of nmt-export"
    from test_checkpoint import write

    write(tmp_path / "step-0000007")
    write_average_card(tmp_path / "step-0000007", [])
    assert not (tmp_path / "step-0000007" / "README.md").exists()


def test_many_checkpoints_with_their_ages(folder: Path) -> None:
    state = {
        "averaged": ["a", "b"],
        "step": 9,
        "elapsed_s": [600.0, 1200.0],
    }
    (folder / STATE_FILE).write_text(json.dumps(state))
    seal(folder)
    write_average_card(folder, [])
    assert "a at minute 10.0; b at minute 20.0" in (folder / "README.md").read_text()
