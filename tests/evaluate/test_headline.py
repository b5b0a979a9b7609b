"""What a run is known by: the newest weights on the config's test set, and no average of a run that
went on since without a word.
"""

import json
from dataclasses import replace
from pathlib import Path

from pytest import fixture
from support.capture import Capture
from support.in_process import succeed
from support.text_lines import join_lines
from support.untrained import DECODING, SHAPE, make_checkpoint, make_vocab

from nmt.commands.eval import main as nmt_eval
from nmt.config import CorpusConfig, DataConfig
from nmt.config_files import format_config, load_config
from nmt.evaluate.results import read_results
from nmt.evaluate.scored_texts import read_scored_texts
from nmt.extras.report.facts import read_run
from nmt.extras.report.sections import render_headline, render_results
from nmt.system.files import read_json, seal


@fixture
def run(tmp_path: Path, corpus: Path) -> Path:
    """Its average was made at update 20, and it went on to update 30."""
    vocab = make_vocab(tmp_path)
    test = CorpusConfig(src="test.en", tgt="test.de")
    data = DataConfig(root=str(corpus), test=test)
    run = tmp_path / "run"
    for step in (10, 30):
        (run / "checkpoints" / f"step-{step:07}").mkdir(parents=True)
    average = make_checkpoint(run / "average", vocab, SHAPE, replace(DECODING, beam=1), data=data)
    config = load_config(str(average / "config.yaml"))
    config = replace(config, training=replace(config.training, steps=20))
    for folder in (run, average):
        (folder / "config.yaml").write_text(format_config(config))
    seal(average)
    lines = [{"kind": "warning", "step": step, "message": "none"} for step in (20, 30)]
    (run / "metrics.jsonl").write_text(join_lines(map(json.dumps, lines)))
    return run


def look_at_few(run: Path, corpus: Path, *options: str) -> None:
    files = []
    for language in ("en", "de"):
        few = run.parent / f"few.{language}"
        lines = (corpus / f"test.{language}").read_text().splitlines(keepends=True)
        few.write_text("".join(lines[:5]))
        files.append(str(few))
    succeed(nmt_eval, run / "average", "--src", files[0], "--ref", files[1], *options)


def test_the_headline_is_the_configs_test_set_whatever_was_scored_last(
    run: Path, corpus: Path
) -> None:
    look_at_few(run, corpus)
    assert "few.en+few.de" in render_headline([read_run(run)])  # nothing else yet
    succeed(nmt_eval, run / "average")
    look_at_few(run, corpus, "decoding.beam=2")

    facts = read_run(run)
    assert facts.headline is not None
    assert facts.headline.test_set.name.startswith("test.en+test.de#")
    page = render_headline([facts])
    assert "few.en" not in page and "by average, made at update 20 of 30" in page
    assert "few.en+few.de" in render_results(facts)
    texts = read_scored_texts(run)
    assert texts is not None and len(texts.translations) == 20


def test_an_experiment_with_another_search_is_no_headline_and_is_named(
    run: Path, capsys: Capture
) -> None:
    average, experiment = str(run / "average"), ["decoding.sample=true", "decoding.seed=7"]
    succeed(nmt_eval, average, *experiment, "--json", run.parent / "sample.json")
    assert "with sample=true, seed=7" in render_headline([read_run(run)])  # nothing else yet
    capsys.readouterr()
    succeed(nmt_eval, average, "decoding.batch_tokens=50")  # which changes no translation
    assert ", with" not in capsys.readouterr().out
    succeed(nmt_eval, average, *experiment)
    assert ", with sample=true, seed=7" in capsys.readouterr().out

    facts = read_run(run)
    assert facts.headline is not None and facts.headline.decoding["sample"] is False
    shown = read_json(run.parent / "sample.json")
    assert shown["other_search"] == {"sample": True, "seed": 7}
    card = " ".join((run / "average" / "README.md").read_text().split())  # YAML folds long lines
    assert card.count(", with sample=true, seed=7") == 4  # two scores, for people and for the hub


def test_the_headline_is_of_the_newest_weights(run: Path) -> None:
    succeed(nmt_eval, run / "average")
    facts = read_run(run)
    (old,) = read_results(run)
    new = replace(old, step=30, checkpoint="step-0000030")
    for results in ((old, new), (new, old)):
        assert replace(facts, results=results).headline == new
    member = replace(old, averaged=[], checkpoint="step-0000020")
    assert replace(facts, results=(old, member)).headline == old  # of one update, the average
    assert replace(facts, results=()).headline is None


def test_a_stale_average_is_named_wherever_it_is_judged(run: Path, capsys: Capture) -> None:
    succeed(nmt_eval, run / "average")
    assert "warning: made at update 20 of 30" in capsys.readouterr().out
    assert "the last at update 20 of 30" in (run / "average" / "README.md").read_text()
    succeed(nmt_eval, run, "--verdict")
    out = capsys.readouterr().out
    assert "the end of training: 20 of 30 updates" in out


def test_an_average_of_the_newest_checkpoint_is_not_doubted(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "step-0000030").rename(run / "checkpoints" / "step-0000020")
    succeed(nmt_eval, run / "average")
    assert "warning: made at" not in capsys.readouterr().out
