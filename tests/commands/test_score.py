"""nmt-score as a user meets it: files of pairs, sums for the corpus, bad input."""

import gzip
import json
import math
import re
from pathlib import Path

import torch
from pytest import MonkeyPatch, TempPathFactory, approx, fixture, mark, raises
from support.capture import Capture, read_errors, read_stderr
from support.in_process import refuse
from support.text_lines import join_lines, read_text_lines
from support.toy_corpus import sentences
from support.untrained import make_checkpoint, make_vocab
from support.warm_process import CONTEXT

import nmt.api
from nmt.commands.score import main as nmt_score

PAIRS = sentences(40, seed=7)


@fixture(scope="module")
def place(tmp_path_factory: TempPathFactory) -> Path:
    vocab = make_vocab(tmp_path_factory.mktemp("words"))
    return make_checkpoint(tmp_path_factory.mktemp("model") / "average", vocab)


@fixture(autouse=True)
def write_texts(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """`src` and `tgt` in the current folder."""
    monkeypatch.chdir(tmp_path)
    for side, name in enumerate(("src", "tgt")):
        Path(name).write_text("".join(pair[side] + "\n" for pair in PAIRS))


def score(place: Path, *options: str, code: int = 0) -> list[str]:
    """The lines that the command writes."""
    assert nmt_score([str(place), *options, "-o", "out"]) == code
    return read_text_lines(Path("out"))


def test_each_pair_has_a_line_and_the_corpus_a_summary(place: Path, capsys: Capture) -> None:
    sums = [float(line) for line in score(place, "--src", "src", "--tgt", "tgt")]
    summary = read_errors(capsys)[-1]
    expected = nmt.api.score_pairs(PAIRS, place)
    assert sums == approx([one.log_prob for one in expected], abs=1e-5)
    n_tokens = sum(len(one.log_probs) for one in expected)
    found = re.fullmatch(r"40 pairs, (\S+) tokens: NLL per token (\S+), perplexity (\S+)", summary)
    assert found and int(found[1]) == n_tokens
    assert float(found[2]) == approx(-sum(sums) / n_tokens, abs=1e-4)
    assert float(found[3]) == approx(math.exp(-sum(sums) / n_tokens), abs=1e-2)

    means = score(place, "--src", "src", "--tgt", "tgt", "--score", "mean")
    for mean, one in zip(means, expected, strict=True):
        assert float(mean) == approx(one.log_prob / len(one.log_probs), abs=1e-5)


def test_sides_of_different_texts_are_named(place: Path, capsys: Capture) -> None:
    lines = [" ".join(["wort"] * (1 + i * 7 % 9)) for i in range(108)]
    Path("src").write_text(join_lines(lines))
    for others, is_warned in ((lines, False), (lines[1:] + lines[:1], True)):
        Path("tgt").write_text(join_lines(others))
        score(place, "--src", "src", "--tgt", "tgt")
        said = "src and tgt do not look like translations of each other" in read_stderr(capsys)
        assert said == is_warned


def test_pieces_and_their_log_probabilities(place: Path) -> None:
    rows = [json.loads(line) for line in score(place, "--src", "src", "--tgt", "tgt", "--json")]
    assert [row["line"] for row in rows] == list(range(1, 41))
    for row, (_, target) in zip(rows, PAIRS, strict=True):
        assert "".join(row["pieces"][:-1]).replace("\u2581", " ").strip() == target
        assert sum(row["log_probs"]) == approx(row["score"], abs=1e-4)


def test_packed_files_and_an_ensemble(place: Path) -> None:
    alone = score(place, "--src", "src", "--tgt", "tgt")
    for name in ("src", "tgt"):
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    assert score(place, "--src", "src.gz", "--tgt", "tgt.gz") == alone
    both = score(place, str(place), "--src", "src", "--tgt", "tgt")
    assert [float(x) for x in both] == approx([float(x) for x in alone], abs=1e-5)


def test_workers_write_the_same_scores(
    place: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("nmt.extras.pair_scores.score_stream.PAIRS_AT_ONCE", 7)
    monkeypatch.setattr("nmt.system.pool.get_context", lambda _: CONTEXT)
    Path("src").write_text(Path("src").read_text().replace("\n", "\n\n", 5))
    Path("tgt").write_text(Path("tgt").read_text().replace("\n", "\nx\n", 5))
    whole = score(place, "--src", "src", "--tgt", "tgt")
    said = read_stderr(capsys)
    torch.set_num_threads(8)
    shared = score(place, "--src", "src", "--tgt", "tgt", "--workers", "2")
    assert shared == whole and len(whole) == 45
    assert torch.get_num_threads() == 4
    assert read_stderr(capsys) == said and said.count("is impossible") == 3


def test_resume_goes_on_after_the_last_whole_chunk(place: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.extras.pair_scores.score_stream.PAIRS_AT_ONCE", 7)
    whole = score(place, "--src", "src", "--tgt", "tgt")
    Path("out").write_text("\n".join([*whole[:17], whole[17][:3]]))
    resumed = score(place, "--src", "src", "--tgt", "tgt", "--resume")
    assert resumed == whole
    Path("out").write_text("-1\n" * 49)
    score(place, "--src", "src", "--tgt", "tgt", "--resume", code=2)


def test_impossible_pairs_keep_their_line_and_are_named(place: Path, capsys: Capture) -> None:
    Path("src").write_text("red dog\n\n\n" + "dog " * 60 + "\n")
    Path("tgt").write_text("\n\nroter Hund\nHund\n")
    options = ["--src", "src", "--tgt", "tgt", "decoding.max_source=50"]
    end_alone, both_empty, *rest = score(place, *options)
    assert -math.inf < float(end_alone) < 0 and float(both_empty) == 0
    assert rest == ["-inf", "-inf"]
    messages = read_errors(capsys)
    assert messages[0] == "warning: pair 3 is impossible: its source is empty"
    assert re.match(
        r"warning: pair 4 is impossible: its source has \d+ pieces, more than 50", messages[1]
    )
    assert messages[2].endswith("2 impossible pairs are not counted")
    row = json.loads(score(place, *options, "--json")[2])
    assert row == {"line": 3, "score": None, "problem": "its source is empty"}


@mark.parametrize(
    "target, message",
    [
        ("short", "src has 40 lines but short has 39"),
        ("latin", "latin:1:2: byte 0xe4 is not valid UTF-8"),
        ("nowhere", "nowhere: cannot be read"),
        ("src", "is the same file"),
    ],
)
def test_bad_files_are_named(place: Path, target: str, message: str, capsys: Capture) -> None:
    Path("short").write_text("".join(pair[1] + "\n" for pair in PAIRS[:-1]))
    Path("latin").write_bytes(b"M\xe4rz\n" * 40)
    assert message in refuse(capsys, nmt_score, place, "--src", "src", "--tgt", target)


def test_the_output_is_not_an_input(place: Path, capsys: Capture) -> None:
    line = refuse(capsys, nmt_score, place, "--src", "src", "--tgt", "tgt", "-o", "tgt")
    assert "tgt: is also input or output" in line
    assert Path("tgt").read_text().count("\n") == 40


@mark.parametrize(
    "options, message",
    [
        ("decoding.precision=bf16 --src a --tgt b", "no checkpoint is given"),
        ("m model.d_model=8 --src a --tgt b", "was fixed by training"),
        ("m --src a", "the following arguments are required: --tgt"),
        ("m --src a --tgt b --resume", "--resume needs -o"),
    ],
)
def test_options_that_do_not_fit(options: str, message: str, capsys: Capture) -> None:
    with raises(SystemExit, match="2"):
        nmt_score(options.split())
    assert message in read_stderr(capsys)
