"""The Python door: a run from config to score without a command, equal to what the commands give."""

import pydoc
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytest import approx, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.in_process import succeed
from support.text_lines import read_text_lines
from support.untrained import make_checkpoint

import nmt.api
from nmt.commands.eval import main as nmt_eval
from nmt.commands.translate import main as nmt_translate
from nmt.data.vocab import Vocab
from nmt.system.errors import UserError
from nmt.system.files import seal
from nmt.translate.translator import TextToText

TORCH = "decoding.compile=off"


@fixture
def run(toy: Path) -> Path:
    config = nmt.api.load_config(
        str(toy), ["training.steps=4", "training.checkpoint_every=4", "evaluation.bleu=false"]
    )
    assert nmt.api.prepare(config)  # it is new
    assert not nmt.api.prepare(config)  # and is not made again
    assert nmt.api.train(config) == 0
    assert (config.folder / "report.html").exists()
    return config.folder


def test_a_run_from_python_gives_what_the_commands_give(
    run: Path, corpus: Path, tmp_path: Path
) -> None:
    source = corpus / "test.en"
    lines = read_text_lines(source)

    translations = nmt.api.load(run, settings=["decoding.beam=2"]).translate(lines)

    out = tmp_path / "out"
    succeed(nmt_translate, run, "-i", source, "-o", out, "decoding.beam=2")
    assert [translation.text for translation in translations] == read_text_lines(out)

    evaluation = nmt.api.evaluate(run, settings=["decoding.beam=2"])
    assert evaluation.systems[0].texts == [translation.text for translation in translations]
    assert not (run / "results.json").exists()  # only the command records
    succeed(nmt_eval, run, "decoding.beam=2")
    assert (run / "results.json").exists()


def test_pairs_are_scored_with_signature_and_interval() -> None:
    reference = "Das ist ein kleines Haus mit einem roten Dach."
    bleu, chrf = nmt.api.score([(reference, reference)] * 3)
    assert bleu.value == approx(100.0) and chrf.value == approx(100.0)
    assert "tok:13a" in bleu.signature and bleu.low is not None


def test_what_cannot_be_scored_is_refused_like_on_the_command_line() -> None:
    with raises(UserError, match="BPE"):
        nmt.api.score([("Das ist ein klei@@ nes Haus .", "Das ist ein kleines Haus.")] * 40)


def test_a_missing_checkpoint_is_the_users_mistake(tmp_path: Path) -> None:
    with raises(UserError, match="not found; give RUN"):
        nmt.api.load(tmp_path / "nowhere")


@fixture(scope="module")
def model(vocab: Vocab, module_path: Path) -> Path:
    return make_checkpoint(module_path / "average", vocab)


@fixture(scope="module")
def translator(model: Path) -> TextToText:
    return nmt.api.load(model, settings=TORCH)


def test_lines_are_any_iterable_of_text(translator: TextToText, tmp_path: Path) -> None:
    lines = ["red dog", "the house"]
    expected = translator.translate(lines)
    assert translator.translate(line for line in lines) == expected
    file = tmp_path / "text"
    file.write_text("red dog\nthe house\n")
    with open(file) as opened:
        assert translator.translate(opened) == expected


@mark.parametrize("lines", ["red dog", b"red dog", None, 7])
def test_what_is_not_lines_is_refused(translator: TextToText, lines: Any) -> None:
    with raises(UserError, match=r"give a list of lines, .*translate_text"):
        translator.translate(lines)


@mark.parametrize("line", [b"red dog", None, 7])
def test_a_line_that_is_not_text_is_refused_by_number(translator: TextToText, line: Any) -> None:
    with raises(UserError, match=f"line 2 is {line!r}, .*; give a str"):
        translator.translate(["red dog", line])


def test_a_line_break_inside_a_line_is_refused_by_number(translator: TextToText) -> None:
    with raises(UserError, match="line 2 is .*line break inside.*translate_text"):
        translator.translate(["red dog\n", "red dog\nthe house"])


@mark.parametrize(
    "pairs, fault",
    [
        (
            [["un homme", "un chien"], ["un homme", "un chien"]],
            "pair 1 is .*, not a tuple of two",
        ),
        (["ab", "cd"], "pair 1 is 'ab', not a tuple of two"),
        ("abc", "pairs: got 'abc'"),
        (None, "pairs: got None"),
        ([("a", "b"), ("a", "b", "c")], "pair 2 is .*, not a tuple of two"),
        ([("a", None)], "a side of pair 1 is None, which is not text"),
        ([("a", "b"), (b"x", "x")], "a side of pair 2 is b'x', which is not text"),
        ([("a", "b\nc")], "a side of pair 1 is .*line break inside"),
    ],
)
def test_what_is_not_pairs_is_refused(model: Path, pairs: Any, fault: str) -> None:
    for call in (nmt.api.score, lambda pairs: nmt.api.score_pairs(pairs, model)):
        with raises(UserError, match=f"^{fault}.*; give ") as error:
            call(pairs)
        assert "\n" not in str(error.value)


def test_lines_of_two_files_are_pairs() -> None:
    line = "Das ist ein kleines Haus mit einem roten Dach."
    whole = nmt.api.score([(line, line)] * 3)
    assert nmt.api.score(zip([f"{line}\n"] * 3, [line] * 3, strict=True)) == whole


def test_odd_texts_are_scored_with_a_warning(capsys: Capture) -> None:
    lines = [f"Das Haus Nummer {i} hat {'sehr ' * (i % 9)}viel Platz." for i in range(120)]
    nmt.api.score(zip(map(str.lower, lines), lines, strict=True))
    assert "warning: translations:1: hardly any upper-case letters" in read_stderr(capsys)
    nmt.api.score(zip([*lines[4:], *lines[:4]], lines, strict=True))
    assert "translations and references do not look like" in read_stderr(capsys)
    nmt.api.score(zip(lines, lines, strict=True))
    assert read_stderr(capsys) == ""


def test_arguments_in_the_wrong_place_are_refused(model: Path) -> None:
    misplaced: Any = ["red dog"]
    for call in (nmt.api.score, nmt.api.score_pairs):
        with raises(UserError, match=r"^pair 1 is .*; give pairs: list\(zip\("):
            call(misplaced, misplaced)
    with raises(UserError, match=r"^pairs: got .*; give pairs: list\(zip\("):
        nmt.api.score_pairs(model, [("a", "b")])  # type: ignore[arg-type]
    for paths in ([[model]], [model, ["decoding.beam=1"]], [[model, model]], [7]):
        for use in (nmt.api.load, nmt.api.evaluate):
            with raises(UserError, match=r"^a path is .*, not a str or Path; .*settings="):
                use(*paths)
    for start in (nmt.api.train, nmt.api.prepare):
        with raises(UserError, match=r"^config is 'demo.yaml', .*; give load_config"):
            start("demo.yaml")  # type: ignore[arg-type]
    with raises(UserError, match=r"^name is \['demo.yaml'\], .*; give load_config"):
        nmt.api.load_config(["demo.yaml"])  # type: ignore[arg-type]


@mark.parametrize("text", [["red dog"], b"red dog", None])
def test_running_text_is_one_text(translator: TextToText, text: Any) -> None:
    with raises(UserError, match="translate_text: .* is .*; give a str"):
        translator.translate_text(text)


def test_beam_and_n_best_are_those_of_a_call(model: Path, translator: TextToText) -> None:
    lines = ["red dog likes the house", "", "blue"]
    for odd in ({"beam": 2.5}, {"beam": "4"}, {"beam": True}, {"n_best": 0}):
        with raises(UserError, match="^(beam|n_best) is .*; give an integer, at least 1"):
            translator.translate(lines, **odd)
    narrow = nmt.api.load(model, settings={"decoding.beam": 1, "decoding.compile": "off"})
    wide = translator.translate(lines)
    assert translator.translate(lines, beam=1) == narrow.translate(lines) != wide
    assert translator.translate(lines) == wide  # the next call is as before

    several = translator.translate(lines, beam=5, n_best=3)
    found = nmt.api.load(model, settings=["decoding.beam=5", TORCH]).find_candidates(lines, 3)
    assert [[replace(one, alternatives=()), *one.alternatives] for one in several] == found
    assert len(several[0].alternatives) == 2 and not several[1].alternatives
    pieces = translator.vocab.tgt.pieces(several[0].piece_ids)
    assert "".join(pieces).replace("\u2581", " ").strip() == several[0].text


@mark.parametrize(
    "words, fault",
    [
        ({"beam": 0}, "beam is 0; give an integer"),
        ({"n_best": 9}, "a beam of 2 is too small"),
    ],
)
def test_a_beam_that_cannot_be_is_refused(
    translator: TextToText, words: dict[str, int], fault: str
) -> None:
    with raises(UserError, match=fault):
        translator.translate(["red dog"], **words)


def test_settings_are_texts_or_a_dictionary(toy: Path, corpus: Path) -> None:
    written = [
        "training.steps=5",
        'out="a # b"',
        "optimizer.eps=1e-07",
        "training.patience=null",
        "evaluation.bleu=false",
        f"data.test={{src: {corpus}/test.en, tgt: {corpus}/test.de}}",
    ]
    values = {
        "training.steps": 5,
        "out": Path("a # b"),
        "optimizer.eps": 1e-07,
        "training.patience": None,
        "evaluation.bleu": False,
        "data.test": {"src": f"{corpus}/test.en", "tgt": f"{corpus}/test.de"},
    }
    config = nmt.api.load_config(str(toy), values)
    assert config == nmt.api.load_config(str(toy), written)
    assert (config.training.steps, config.out) == (5, "a # b")
    assert nmt.api.load_config(str(toy), "training.steps=7").training.steps == 7


def test_own_files_are_scored_and_runs_are_judged_by_their_mean(
    model: Path, translator: TextToText, vocab: Vocab, tmp_path: Path
) -> None:
    src, ref = tmp_path / "src", tmp_path / "ref"
    src.write_text("red dog\nthe house\n")
    ref.write_text("roter Hund\ndas Haus\n")
    evaluate = partial(nmt.api.evaluate, src=str(src), ref=str(ref), settings=TORCH)
    (alone,) = evaluate(model).systems
    assert alone.texts == [one.text for one in translator.translate(["red dog", "the house"])]

    other = make_checkpoint(tmp_path / "other", vocab, seed=3)
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("\nseed: 1", "\nseed: 2"))
    seal(other)
    verdict = evaluate(model, other, verdict=True).findings.verdict
    assert verdict and [run.seed for run in verdict.runs] == [1, 2]
    assert verdict.score.value == approx(sum(run.value for run in verdict.runs) / 2)
    with raises(UserError, match="all_metrics and verdict together accept only one run"):
        evaluate(model, other, verdict=True, all_metrics=True)


@mark.parametrize(
    "words",
    [
        {"src": "text.en"},
        {"ref": "text.de"},
        {"src": "text.en", "test_set": "wmt14"},
        {"src": "text.en", "ref": "text.de", "test_set": "wmt14"},
    ],
)
def test_half_a_test_set_is_refused(model: Path, words: dict[str, str]) -> None:
    with raises(UserError, match="give both src and ref, or test_set, or neither"):
        nmt.api.evaluate(model, **words)  # type: ignore[arg-type]


def test_a_path_must_be_given() -> None:
    for call in (nmt.api.load, nmt.api.evaluate, lambda: nmt.api.score_pairs([("a", "b")])):
        with raises(UserError, match="give a run, an average or a checkpoint"):
            call()


def test_help_shows_how_to_search() -> None:
    shown = pydoc.render_doc(nmt.api.load)
    for part in ("translate(lines, beam=5, n_best=3)", ".pieces(", '{"decoding.beam": 1}'):
        assert part in shown


def test_attention_returns_its_weights_on_request() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2)
    output, weights = nmt.api.attention(q, k, v, return_weights=True)
    assert torch.allclose(weights, (q @ k.T / 2).softmax(-1), atol=1e-6)
    assert torch.allclose(output, weights @ v, atol=1e-6)
    assert torch.equal(nmt.api.attention(q, k, v), output)


def test_importing_it_imports_nothing_heavy() -> None:
    program = "import sys, nmt.api; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
