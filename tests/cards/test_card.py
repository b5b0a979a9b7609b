"""The card beside an average: what the hub's own parser reads from it, and whose it is once
somebody has edited it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from pytest import MonkeyPatch, fixture, importorskip
from support.golden import check_golden
from support.hostile_text import OBEYED, PAYLOADS, check_together
from support.recipes import list_recipes
from support.recorded_result import RESULT
from support.untrained import change_config, make_checkpoint

from nmt.average.mean import average_checkpoints
from nmt.checkpoint.checkpoint import Checkpoint, Origin, TrainState, read_origin
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.config import CorpusConfig, DataConfig, RunConfig
from nmt.data.vocab import Vocab, VocabPair, Vocabulary
from nmt.evaluate.results import DecodingSetting, Result
from nmt.extras.cards.card import render_export_card, write_average_card
from nmt.system.escapes import escape_line
from nmt.system.files import read_manifest
from nmt.system.output_folder import is_unedited_card
from nmt.system.run_folder import MODEL_FILE, STATE_FILE, VOCAB_FILE


@fixture
def folder(tmp_path: Path, vocab: Vocab) -> Path:
    return make_checkpoint(tmp_path / "average", vocab)


def result_of(folder: Path) -> Result:
    files = read_manifest(folder)
    weights, vocab = files[MODEL_FILE]["sha256"], files[VOCAB_FILE]["sha256"]
    return replace(RESULT, pair="no-en", weights_sha256=weights, vocab_sha256=vocab)


def test_the_hub_reads_it(folder: Path) -> None:
    corpora = (
        CorpusConfig(dataset="wmt/wmt14", subset="de-en"),
        CorpusConfig(src="a.en", tgt="a.de"),
    )
    # No, unquoted, is false in YAML
    data_config = DataConfig(src="no", tgt="en", train=corpora)
    change_config(folder, data=data_config, license="cc-by-4.0")
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
    assert data["license"] == "cc-by-4.0"
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


def fill_with(folder: Path, texts: Sequence[str]) -> str:
    """Write the texts wherever a stranger can, all in a row where there is one of its kind, and
    return the card.
    """
    row = " ".join(texts)
    corpora = []
    strange = []
    result = result_of(folder)
    for text in texts:
        corpora.append(CorpusConfig(src=text, tgt=f"{text}.de"))
        corpora.append(CorpusConfig(dataset=text, subset=text))
        scores = [replace(score, name=text, signature=text) for score in result.scores]
        test_set = replace(result.test_set, name=text)
        decoding: dict[str, DecodingSetting] = {"beam": text, "penalty": text}
        again = replace(result, test_set=test_set, scores=scores, pair=text, engine=text)
        strange.append(replace(again, decoding=decoding))
    state = {"averaged": [*texts, *texts], "step": 20}
    (folder / STATE_FILE).write_text(json.dumps(state))
    data = DataConfig(src=row, tgt=f"{row}.de", train=tuple(corpora))
    change_config(folder, name=row, license=row, data=data)
    write_average_card(folder, [result, *strange])
    return (folder / "README.md").read_bytes().decode()


def parse_markdown(text: str) -> tuple[list[str], str]:
    """The elements of a text but for text itself, and what its first heading shows."""
    markdown_it = importorskip("markdown_it")
    elements = []
    shown = []
    for block in markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").parse(text):
        elements.append(block.type)
        if block.children is not None:
            elements += [inline.type for inline in block.children]
            shown.append("".join(inline.content for inline in block.children))
    words = ("text", "text_special", "code_inline")
    return [kind for kind in elements if kind not in words], shown[0]


def check_card(folder: Path, texts: Sequence[str]) -> None:
    """The elements of the card are those of any card, and names show as they are."""
    texts = [text.replace("\0", "") for text in texts]  # configs refuse it
    harmless = ModelCard(fill_with(folder, [f"harmless {i}" for i in range(len(texts))]))
    content = fill_with(folder, texts)
    assert OBEYED.isdisjoint(content) and is_unedited_card(folder / "README.md")
    card = ModelCard(content)
    data = card.data.to_dict()
    keys = set(harmless.data.to_dict()) - {"datasets"}  # such a name is none of a dataset
    assert set(data) == keys
    row = " ".join(texts)
    assert data["model-index"][0]["name"] == escape_line(row)
    assert data["language"] == [escape_line(row), escape_line(f"{row}.de")]

    elements, title = parse_markdown(card.text)
    assert elements == parse_markdown(harmless.text)[0]
    name, language = (escape_line(re.sub(r"\s+", " ", part)) for part in (row, f"{row}.de"))
    assert title.split() == f"{name}: {name} -> {language}".split()


def test_no_name_acts_in_a_card(folder: Path) -> None:
    check_together(PAYLOADS, partial(check_card, folder))


def test_golden_cards(folder: Path, vocab: Vocab, monkeypatch: MonkeyPatch) -> None:
    """Of averages, and of exports."""
    digests = read_manifest(folder)
    weights = digests[MODEL_FILE]["sha256"]

    def hide_digests(text: str) -> str:
        text = text.replace(weights, "WEIGHTS").replace(vocab.digest, "VOCAB")
        return re.sub(r"(?<=sha256 of all above: )\w+", "DIGEST", text)

    def render(config: RunConfig, results: Sequence[Result] = ()) -> str:
        monkeypatch.setattr("nmt.extras.cards.card.load_recorded_config", lambda _: config)
        write_average_card(folder, results)
        return hide_digests((folder / "README.md").read_text())

    cards = {name: render(config) for name, config in list_recipes().items()}
    base = list_recipes()["base"]
    result = result_of(folder)
    others = replace(RESULT, test_set=replace(RESULT.test_set, name="of other weights"))
    cards["base: with scores"] = render(base, [result, others])
    state = {"averaged": ["a", "b"], "step": 9, "elapsed_s": [600.0, 1200.0]}
    (folder / STATE_FILE).write_text(json.dumps(state))
    cards["base: of checkpoints with their ages"] = render(base)
    (folder.parent / "checkpoints").mkdir()
    (folder.parent / "config.yaml").touch()
    cards["base: in a run, of such checkpoints"] = render(base)

    def export(vocab: Vocabulary, origin: Origin) -> str:
        checkpoint = Checkpoint(folder, base, vocab, origin, {MODEL_FILE: weights})
        words = ("huggingface", "in fp32", "transformers", "20 lines are the same", "    use it\n")
        return hide_digests(render_export_card(checkpoint, *words))

    cards["export"] = export(vocab, read_origin(folder))
    pair = VocabPair(vocab, Vocab(vocab.model))
    cards["export: of a checkpoint with two vocabularies"] = export(pair, TrainState(step=7))
    check_golden("card.txt", cards)


def test_it_is_no_part_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    before = read_manifest(folder)
    for results in ([], [result_of(folder)]):
        write_average_card(folder, results)
        assert read_manifest(folder) == before and open_checkpoint(folder).step == 20
        assert is_unedited_card(folder / "README.md")
    one = make_checkpoint(tmp_path / "step", Vocab.load(folder / VOCAB_FILE))
    average_checkpoints([one], folder)
    assert open_checkpoint(folder).averaged == ["step"]


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
