"""nmt-score as a user meets it: files of pairs, n-best lists, sums for the corpus, bad input."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest
from support.soaking import counted
from support.toy_corpus import sentences
from support.untrained import make_checkpoint, make_vocab

import nmt.api
from nmt.commands.score import main as nmt_score
from nmt.commands.translate import main as nmt_translate
from nmt.config import DataConfig
from nmt.data.vocab import Vocab
from nmt.score.score import score_bleu

PAIRS = sentences(40, seed=7)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = make_vocab(tmp_path_factory.mktemp("words"))
    return make_checkpoint(tmp_path_factory.mktemp("model") / "average", vocab)


@pytest.fixture(scope="module")
def back(place: Path) -> Path:
    """The same weights, as those of a model of the other direction."""
    vocab = nmt.api.load(place).vocab
    assert isinstance(vocab, Vocab)
    data = DataConfig(src="de", tgt="en")
    return make_checkpoint(place.parent / "back", vocab, data=data)


@pytest.fixture(autouse=True)
def write_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`src` and `tgt` in the current folder."""
    monkeypatch.chdir(tmp_path)
    for side, name in enumerate(("src", "tgt")):
        Path(name).write_text("".join(pair[side] + "\n" for pair in PAIRS))


def score(place: Path, *options: str, code: int = 0) -> list[str]:
    """The lines that the command writes."""
    assert nmt_score([str(place), *options, "-o", "out"]) == code
    return Path("out").read_text().splitlines()


def test_each_pair_has_a_line_and_the_corpus_a_summary(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = [float(line) for line in score(place, "--src", "src", "--tgt", "tgt")]
    summary = capsys.readouterr().err.splitlines()[-1]
    expected = nmt.api.score_pairs(PAIRS, place)
    assert sums == pytest.approx([one.log_prob for one in expected], abs=1e-5)
    n_tokens = sum(len(one.log_probs) for one in expected)
    found = re.fullmatch(r"40 pairs, (\S+) tokens: NLL per token (\S+), perplexity (\S+)", summary)
    assert found and int(found[1]) == n_tokens
    assert float(found[2]) == pytest.approx(-sum(sums) / n_tokens, abs=1e-4)
    assert float(found[3]) == pytest.approx(math.exp(-sum(sums) / n_tokens), abs=1e-2)

    means = score(place, "--src", "src", "--tgt", "tgt", "--score", "mean")
    for mean, one in zip(means, expected, strict=True):
        assert float(mean) == pytest.approx(one.log_prob / len(one.log_probs), abs=1e-5)


def test_pieces_and_their_log_probabilities(place: Path) -> None:
    rows = [json.loads(line) for line in score(place, "--src", "src", "--tgt", "tgt", "--json")]
    assert [row["line"] for row in rows] == list(range(1, 41))
    for row, (_, target) in zip(rows, PAIRS, strict=True):
        assert "".join(row["pieces"][:-1]).replace("\u2581", " ").strip() == target
        assert sum(row["log_probs"]) == pytest.approx(row["score"], abs=1e-4)


def test_n_best_lists_get_the_scores_of_nmt_translate(place: Path, back: Path) -> None:
    options = [str(place), "-i", "src", "--n-best", "2"]
    assert nmt_translate([*options, "-o", "objects", "--json", "--alignments"]) == 0
    assert nmt_translate([*options, "-o", "table"]) == 0
    rows = [json.loads(line) for line in Path("objects").read_text().splitlines()]
    pairs = [(row["source"], one) for row in rows for one in row["candidates"]]

    found = score(place, "--n-best", "objects", "--score", "search")
    vocab = nmt.api.load(place).vocab.tgt
    n_same = 0
    for value, (_, one) in zip(found, pairs, strict=True):
        # An untrained model writes most texts in pieces into which no vocabulary cuts them.
        if one["pieces"] == vocab.pieces(vocab.encode([one["text"]])[0]):
            n_same += 1
            assert float(value) == pytest.approx(one["score"], abs=1e-5)
    assert n_same > 0
    assert score(place, "--n-best", "table", "--src", "src", "--score", "search") == found

    # in reverse the candidate is the source
    reverse = [float(line) for line in score(back, "--n-best", "objects", "--reverse")]
    by_api = nmt.api.score_pairs([(one["text"], source) for source, one in pairs], place)
    assert reverse == pytest.approx([one.log_prob for one in by_api], abs=1e-5)


def test_reranking(place: Path, back: Path) -> None:
    assert nmt_translate([str(place), "-i", "src", "-o", "plain"]) == 0
    assert nmt_translate([str(place), "-i", "src", "-o", "list", "--n-best", "2", "--json"]) == 0
    lists = [json.loads(line)["candidates"] for line in Path("list").read_text().splitlines()]

    # without weights the list keeps its order; with a large one the reverse model decides
    plain = Path("plain").read_text().splitlines()
    assert score(back, "--n-best", "list", "--rerank", "0,0") == plain
    reverse = map(float, score(back, "--n-best", "list", "--reverse"))
    likeliest = []
    for candidates in lists:
        rated = [(next(reverse), one["text"]) for one in candidates]
        likeliest.append(max(rated, key=lambda one: one[0])[1])
    assert likeliest != plain
    assert score(back, "--n-best", "list", "--rerank", "1000,0") == likeliest

    # the table names the weights with which the references are chosen
    Path("ref").write_text("".join(line + "\n" for line in likeliest))
    last = score(back, "--n-best", "list", "--tune", "ref")[-1]
    found = re.fullmatch(r"BLEU (\S+) -> (\S+) with --rerank=(\S+)", last)
    assert found and float(found[2]) >= float(found[1])
    chosen = score(back, "--n-best", "list", f"--rerank={found[3]}")
    assert score_bleu(chosen, likeliest).value == pytest.approx(float(found[2]), abs=0.005)

    Path("ref").write_text("one\n")
    assert nmt_score([str(back), "--n-best", "list", "--tune", "ref"]) == 2


def test_packed_files_and_an_ensemble(place: Path) -> None:
    alone = score(place, "--src", "src", "--tgt", "tgt")
    for name in ("src", "tgt"):
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    assert score(place, "--src", "src.gz", "--tgt", "tgt.gz") == alone
    both = score(place, str(place), "--src", "src", "--tgt", "tgt")
    assert [float(x) for x in both] == pytest.approx([float(x) for x in alone], abs=1e-5)


def test_dual_scores_are_those_of_the_paper_and_drop_what_is_impossible(
    place: Path, back: Path
) -> None:
    Path("src").write_text("red dog\n\nbig cat\n\n")
    Path("tgt").write_text("roter Hund\n\n\ngro\u00dfe Katze\n")
    two = ["--src", "src", "--tgt", "tgt"]
    there = [-float(line) for line in score(place, *two, "--score", "mean")]
    turned = ["--src", "tgt", "--tgt", "src", "--score", "mean"]
    back_first = -float(score(back, *turned)[0])
    first, *rest = score(place, *two, "--dual", str(back))
    expected = math.exp(-abs(there[0] - back_first) - (there[0] + back_first) / 2)
    assert float(first) == pytest.approx(expected, rel=1e-4)
    assert rest == ["0", "0", "0"]


def test_workers_write_the_same_scores(
    place: Path, back: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nmt.translate.score_stream.PAIRS_AT_ONCE", 7)
    Path("src").write_text(Path("src").read_text().replace("\n", "\n\n", 5))
    Path("tgt").write_text(Path("tgt").read_text().replace("\n", "\nx\n", 5))
    dual = ["--dual", str(back)]  # by two models, each worker
    for options in counted([dual], [[], dual]):
        whole = score(place, "--src", "src", "--tgt", "tgt", *options)
        said = capsys.readouterr().err
        shared = score(place, "--src", "src", "--tgt", "tgt", *options, "--workers", "2")
        assert shared == whole and len(whole) == 45
        assert capsys.readouterr().err == said and said.count("is impossible") == 3


def test_resume_goes_on_after_the_last_whole_chunk(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.translate.score_stream.PAIRS_AT_ONCE", 7)
    whole = score(place, "--src", "src", "--tgt", "tgt")
    Path("out").write_text("\n".join([*whole[:17], whole[17][:3]]))
    resumed = score(place, "--src", "src", "--tgt", "tgt", "--resume")
    assert resumed == whole
    Path("out").write_text("-1\n" * 49)
    score(place, "--src", "src", "--tgt", "tgt", "--resume", code=2)


def test_a_plan_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(place), "--src", "src", "--tgt", "tgt", "-o", "scores"]
    assert nmt_score([*command, "--plan", "--workers", "8", "--on", "ray"]) == 0
    printed = capsys.readouterr().out
    assert "by 40 pairs, 100.00% of the input" in printed
    assert " x 8 workers = " in printed and not Path("scores").exists()


def test_impossible_pairs_keep_their_line_and_are_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("src").write_text("red dog\n\n\n" + "dog " * 60 + "\n")
    Path("tgt").write_text("\n\nroter Hund\nHund\n")
    options = ["--src", "src", "--tgt", "tgt", "decoding.max_source=50"]
    end_alone, both_empty, *rest = score(place, *options)
    assert -math.inf < float(end_alone) < 0 and float(both_empty) == 0
    assert rest == ["-inf", "-inf"]
    messages = capsys.readouterr().err.splitlines()
    assert messages[0] == "warning: pair 3 is impossible: its source is empty"
    assert re.match(
        r"warning: pair 4 is impossible: its source has \d+ pieces, more than 50", messages[1]
    )
    assert messages[2].endswith("2 impossible pairs are not counted")
    row = json.loads(score(place, *options, "--json")[2])
    assert row == {"line": 3, "score": None, "problem": "its source is empty"}


@pytest.mark.parametrize(
    "target, message",
    [
        ("short", "src has 40 lines but short has 39"),
        ("latin", "latin:1:2: byte 0xe4 is not valid UTF-8"),
        ("nowhere", "nowhere: cannot be read"),
        ("src", "is the same file"),
    ],
)
def test_bad_files_are_named(
    place: Path, target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("short").write_text("".join(pair[1] + "\n" for pair in PAIRS[:-1]))
    Path("latin").write_bytes(b"M\xe4rz\n" * 40)
    assert nmt_score([str(place), "--src", "src", "--tgt", target]) == 2
    assert message in capsys.readouterr().err


def test_the_output_is_not_an_input(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nmt_score([str(place), "--src", "src", "--tgt", "tgt", "-o", "tgt"]) == 2
    assert "tgt: is also input or output" in capsys.readouterr().err
    assert Path("tgt").read_text().count("\n") == 40


@pytest.mark.parametrize(
    "options, message",
    [
        ("decoding.precision=bf16", "no checkpoint is given"),
        ("m model.d_model=8 --src a --tgt b", "was fixed by training"),
        ("m --src a", "give --src FILE and --tgt FILE, or --n-best FILE"),
        ("m --n-best a --tgt b", "--n-best does not support --tgt"),
        ("m --src a --tgt b --reverse", "--reverse needs --n-best"),
        ("m --src a --tgt b --resume", "--resume needs -o"),
        ("m --n-best a --rerank 0.5", "is not REVERSE,LENGTH"),
        ("m --n-best a --rerank=-1,0", "must be between 0 and 1000"),
        ("m --n-best a --rerank=nan,0", "must be between 0 and 1000"),
        ("m --src a --tgt b --tune c", "--tune needs --n-best"),
        ("m --n-best a --rerank --json", "--rerank does not support --json"),
        ("m --n-best a --plan", "--n-best does not support --plan"),
        ("m --n-best a --dual b", "--n-best does not support --dual"),
        ("m --src a --tgt b --dual c --score mean", "support --score"),
    ],
)
def test_options_that_do_not_fit(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        nmt_score(options.split())
    assert message in capsys.readouterr().err
