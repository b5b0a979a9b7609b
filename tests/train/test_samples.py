"""Samples: what becomes of the same dev lines."""

import json
from pathlib import Path

from support.finished_run import read_lines, train_toy
from support.text_lines import read_text_lines

import nmt.api
from nmt.train.events import LONGEST_LINE
from nmt.train.samples import take_sample


def test_the_same_lines_are_logged_at_each_validation(toy: Path, corpus: Path) -> None:
    settings = ["training.steps=40", "training.validate_every=20", "model.dropout=0"]
    settings += ["optimizer.warmup_steps=10", "decoding.min_length=3", "evaluation.sentences=10"]
    config = train_toy(toy, *settings)
    lines = read_lines(config.folder, "sample")
    assert [line["step"] for line in lines] == [20] * 5 + [40] * 5
    assert [line["line"] for line in lines] == [4, 8, 12, 16, 20] * 2
    sources = read_text_lines(corpus / "valid.en")
    references = read_text_lines(corpus / "valid.de")
    model = nmt.api.load(config.folder / "checkpoints" / "last")
    for line in lines[5:]:
        assert line["source"] == sources[line["line"] - 1]
        assert line["reference"] == references[line["line"] - 1]
        (translation,) = model.translate([line["source"]])
        assert line["translation"] == translation.text


def test_a_long_line_keeps_within_a_line_of_the_log() -> None:
    text = "\U0001f600 " * 2_000
    sample = take_sample(1, 0, text, text, text)
    assert len(json.dumps(sample.to_line())) < LONGEST_LINE
