"""What `evaluation.sentences` counts: a part of the dev set that stands for the whole."""

from itertools import pairwise
from pathlib import Path

import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx, mark, raises
from support.capture import Capture, read_stderr
from support.finished_run import read_lines, train_toy
from support.forks import run_on_ranks
from support.in_process import refuse, succeed
from support.prepared_toy import prepare_toy
from support.text_lines import read_text_lines

import nmt.api
from nmt.commands.average import main as nmt_average
from nmt.commands.translate import main as nmt_translate
from nmt.config_files import format_config
from nmt.data.vocab import Vocab
from nmt.system.errors import UserError
from nmt.system.files import read_json, seal, write_text
from nmt.train.validate import choose_dev_lines, open_dev


@given(st.integers(1, 3_000), st.integers(1, 3_000))
def test_dev_lines_are_spread_evenly(n_lines: int, n_wanted: int) -> None:
    chosen = list(choose_dev_lines(n_lines, n_wanted))
    assert len(chosen) == min(n_lines, n_wanted)
    assert 0 <= chosen[0] and chosen[-1] < n_lines
    # as many lines are left out between any two, give or take one, and half as many at both ends
    gaps = {b - a for a, b in pairwise(chosen)}
    assert not gaps or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)
    assert abs(chosen[0] - (n_lines - 1 - chosen[-1])) <= 1


def test_the_nll_is_that_of_each_piece_of_the_dev_set(toy: Path, corpus: Path) -> None:
    """Short and long sentences are in different batches, and count by their pieces."""
    settings = ["training.steps=1", "training.precision=fp32", "evaluation.bleu=false"]
    config = train_toy(toy, *settings)
    (valid,) = read_lines(config.folder, "valid")
    assert not read_lines(config.folder, "sample")
    sources = read_text_lines(corpus / "valid.en")
    targets = read_text_lines(corpus / "valid.de")
    pairs = nmt.api.score_pairs(zip(sources, targets, strict=True), config.folder)
    log_probs = [log_prob for pair in pairs for log_prob in pair.log_probs]
    assert valid["nll"] == approx(-sum(log_probs) / len(log_probs), abs=2e-5)


def test_a_part_of_the_dev_set_is_scored_and_named(
    toy: Path, corpus: Path, capsys: Capture
) -> None:
    settings = [
        "training.steps=150",
        "model.dropout=0",
        "model.d_model=32",
        "decoding.min_length=6",
    ]
    settings += ["optimizer.warmup_steps=10", "evaluation.sentences=10"]
    config = train_toy(toy, *settings)

    record = read_lines(config.folder)[-1]
    assert record["kind"] == "valid" and record["signature"].endswith("|lines:10/20")

    sources = read_text_lines(corpus / "valid.en")
    references = read_text_lines(corpus / "valid.de")
    translations = nmt.api.load(config.folder).translate(sources)
    texts = [translation.text for translation in translations]
    part = slice(1, 20, 2)
    expected = sacrebleu.corpus_bleu(texts[part], [references[part]]).score
    assert record["bleu"] == approx(expected) and expected > 0
    assert expected != sacrebleu.corpus_bleu(texts[:10], [references[:10]]).score

    capsys.readouterr()
    succeed(nmt_average, config.folder, "--curve")
    assert "10 of the 20 dev lines" in read_stderr(capsys)
    curve = read_json(config.folder / "averaging.json")
    assert curve["dev_set"]["lines"] == 10 and curve["signature"].endswith("|lines:10/20")


DEALT = """
    import sys
    from dataclasses import replace
    from pathlib import Path
    from nmt.config_files import load_recorded_config
    from nmt.system.ranks import World, join_world
    from nmt.train.setup import open_setup
    from nmt.train.validate import open_dev, validate
    from nmt.translate.translator import Translator

    counts = []
    whole = Translator.find_by_batch
    def find_by_batch(self, lines):
        counts.append(len(lines))
        return whole(self, lines)
    Translator.find_by_batch = find_by_batch

    with join_world("cpu") as world:
        config = load_recorded_config(Path(sys.argv[1]))
        config = replace(config, training=replace(config.training, precision="fp32"))
        setup = open_setup(config, world)
        dev = open_dev(Path(setup.config.data.store), setup.vocab)
        translator = Translator(setup.model, setup.vocab, config.dev_decoding, world.device)
        found = validate(translator, dev, 1, config.evaluation, 150, world)
        if world.is_main:
            alone = World(0, 1, world.device)
            expected = validate(translator, dev, 1, config.evaluation, 150, alone)
            assert found.samples == expected.samples and len(found.samples) == 5
            assert found.bleu == expected.bleu and found.selection_score == expected.selection_score
        print("lines", *counts)
"""


def test_ranks_share_the_decoding_of_the_dev_set(tmp_path: Path) -> None:
    config = prepare_toy(tmp_path)
    recorded = tmp_path / "config.yaml"
    write_text(recorded, format_config(config))
    done = run_on_ranks(2, DEALT, tmp_path / "dealt.py", str(recorded))
    assert done.codes == [0, 0], done.told()[-3000:]
    counts = sorted(line for line in done.told("stdout").splitlines() if line.startswith("lines"))
    assert counts == ["lines 10", "lines 10 20"]


@mark.parametrize(
    "text, fault", [(b"\xff\n" * 20, "not UTF-8"), (b"A line.\n" * 19, "19 lines for 20")]
)
def test_dev_text_that_a_stranger_sealed_is_named(text: bytes, fault: str, tmp_path: Path) -> None:
    store = Path(prepare_toy(tmp_path).data.store)
    (store / "valid.tgt.txt").write_bytes(text)
    seal(store)
    with raises(UserError, match=rf"valid\.tgt\.txt: is damaged \(.*{fault}"):
        open_dev(store, Vocab.load(store / "vocab.model"))


def test_a_dev_set_without_a_tag_is_named(toy: Path, capsys: Capture) -> None:
    corpora = "data.train=[{src: train.en, tgt: train.de, tag: <a>}]"
    train_toy(toy, corpora, "training.steps=1", "vocab.size=90", "model.tied=false")
    assert "data.valid.tag is not set; set it to one of <a>" in read_stderr(capsys)


def test_the_dev_and_the_test_set_are_translated_with_their_tags(
    toy: Path, corpus: Path, capsys: Capture
) -> None:
    files = {name: f"src: {name}.en, tgt: {name}.de, tag: " for name in ("train", "valid", "test")}
    settings = ["training.steps=3", "vocab.size=90", "model.tied=false", "decoding.min_length=6"]
    settings += [f"data.train=[{{{files['train']}<a>}}, {{{files['train']}<b>}}]"]
    settings += [f"data.valid={{{files['valid']}<a>}}", f"data.test={{{files['test']}<b>}}"]
    config = train_toy(toy, *settings)

    record = read_lines(config.folder)[-1]
    for name, tag in (("valid", "<a>"), ("test", "<b>")):
        sources, references = (
            read_text_lines(corpus / f"{name}.{language}") for language in ("en", "de")
        )
        translator = nmt.api.load(config.folder, settings=[f"decoding.tag={tag}"])
        texts = [one.text for one in translator.translate(sources)]
        expected = sacrebleu.corpus_bleu(texts, [references]).score
        if name == "valid":
            found = record["bleu"]
        else:
            evaluation = nmt.api.evaluate(config.folder)
            found = evaluation.scores[0][0].value
            assert evaluation.systems[0].texts == texts
            assert evaluation.systems[0].config.decoding.tag == tag
        assert found == approx(expected) and expected > 0
        untagged = nmt.api.load(config.folder).translate(sources)
        assert texts != [one.text for one in untagged]
    with raises(UserError, match="decoding.tag is '<a>', but data.test has the tag '<b>'"):
        nmt.api.evaluate(config.folder, settings=["decoding.tag=<a>"])

    (corpus / "one.en").write_text("red dog\n")
    command = [str(config.folder), "-i", str(corpus / "one.en"), "-o", str(corpus / "out")]
    capsys.readouterr()
    assert nmt_translate(command) == 0
    assert "decoding.tag is not set; set it to one of <a> <b>" in read_stderr(capsys)
    succeed(nmt_translate, *command, "--tag", "<b>")
    assert "decoding.tag" not in read_stderr(capsys)
    line = refuse(capsys, nmt_translate, *command, "--tag", "<c>")
    assert "decoding.tag: '<c>' is not a symbol" in line
