"""Samples: what becomes of the same dev lines, and how sharply the model attends."""

import json
from pathlib import Path

import pytest
from support.finished_run import read_lines, train_toy

import nmt.api
from nmt.data.store import open_store
from nmt.train.events import LONGEST_LINE
from nmt.train.samples import take_sample
from nmt.translate.translator import Translation, Translator


def test_the_same_lines_are_logged_at_each_validation(toy: Path, corpus: Path) -> None:
    settings = ["training.steps=40", "training.validate_every=20", "model.dropout=0"]
    settings += ["model.n_layers=2"]  # of each kind one is first and one is last
    settings += ["optimizer.warmup_steps=10", "decoding.min_length=3", "evaluation.sentences=10"]
    config = train_toy(toy, *settings)
    lines = read_lines(config.folder, "sample")
    assert [line["step"] for line in lines] == [20] * 5 + [40] * 5
    assert [line["line"] for line in lines] == [4, 8, 12, 16, 20] * 2
    sources = (corpus / "valid.en").read_text().splitlines()
    references = (corpus / "valid.de").read_text().splitlines()
    model = nmt.api.load(config.folder / "checkpoints" / "last")
    for line in lines[5:]:
        assert line["source"] == sources[line["line"] - 1]
        assert line["reference"] == references[line["line"] - 1]
        (translation,) = model.translate([line["source"]])
        assert line["translation"] == translation.text
    valid = read_lines(config.folder, "valid")[-1]
    layers = [f"{kind}.{number}" for kind in ("encoder", "decoder", "memory") for number in (0, 1)]
    assert [key for key in valid if key.startswith("entropy/")] == [f"entropy/{n}" for n in layers]
    assert all(0 < valid[f"entropy/{layer}"] < 4 for layer in layers)


def test_the_nll_of_each_length_adds_up(toy: Path) -> None:
    settings = ["training.steps=1", "evaluation.bleu=false", "vocab.size=70"]
    config = train_toy(toy, *settings)
    (valid,) = read_lines(config.folder, "valid")
    assert not read_lines(config.folder, "sample")
    store = open_store(Path(config.data.store), "valid", nmt.api.load(config.folder).vocab)
    total = 0.0
    groups = [key for key in valid if key.startswith("nll/")]
    for group in groups:
        first, last = map(int, group.removeprefix("nll/").split("-"))
        tokens = store.tgt.lengths  # pieces and the end mark
        total += valid[group] * tokens[(first < tokens) & (tokens <= last + 1)].sum()
    assert len(groups) > 2
    assert total / store.tgt.n_tokens == pytest.approx(valid["nll"], abs=2e-5)


def test_a_long_line_keeps_within_a_line_of_the_log(toy: Path) -> None:
    config = train_toy(toy, "training.steps=1", "evaluation.bleu=false")
    translator = nmt.api.load(config.folder)
    assert isinstance(translator, Translator)
    text = "\U0001f600 " * 2_000
    for n in (10, 159, 160, 5_000):
        sample = take_sample(translator, 1, 0, text, text, Translation(text, 0.0, (5,) * n))
        assert len(json.dumps(sample.event.to_line())) < LONGEST_LINE
        assert not sample.entropies
    source = "red dog"
    whole = take_sample(translator, 1, 0, source, source, Translation("x", 0.0, (5,) * 159))
    assert whole.entropies
    cut = take_sample(translator, 1, 0, source, source, Translation("x", 0.0, (5,) * 160))
    assert not cut.entropies
