"""The classifier of examples/sentiment: padded like packed, alone like in a batch, and all its ways in and out."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_errors
from support.checkout import ROOT

from nmt.config import ModelConfig
from nmt.data.batch import pack
from nmt.model.transformer import Transformer

FOLDER = ROOT / "examples" / "sentiment"
sys.path[:0] = [str(FOLDER), str(ROOT / "tests")]
from support.torch_twin import make_torch_twin  # noqa: E402

# mypy reads the examples by themselves
classifier: Any = importlib.import_module("classifier")
classify: Any = importlib.import_module("classify")
reviews: Any = importlib.import_module("reviews")

IDS = [[5, 6, 7, 3], [9, 3], [3], [*range(4, 30), 3]]
SMALL = ["--epochs", "1", "--d-model", "16", "--layers", "1", "--pieces", "60", "--batch", "4"]
TSV = "".join(
    f"{label}\tthis is {'not ' * denied}{word}, number {n}\n"
    for n in range(20)
    for word, denied, label in (("good", 0, "yes"), ("good", 1, "no"), ("bad", 1, "yes"))
)


def load_script(name: str) -> Any:
    """scripts/bench has a train.py too, so this one gets another name."""
    spec = importlib.util.spec_from_file_location(f"sentiment_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train = load_script("train")


def run_train(*argv: str) -> int:
    code: int = train.start_command("train.py", train.parse_arguments, train.run_training, argv)
    return code


def run_classify(*argv: str) -> int:
    code: int = classify.start_command(
        "classify.py", classify.parse_arguments, classify.classify_texts, argv
    )
    return code


def make_classifier(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    recipe = classifier.Recipe(
        ("a", "b", "c"), 64, ModelConfig(d_model=16, d_ff=24, n_heads=4, n_layers=2)
    )
    return classifier.Classifier(recipe, 40).to(dtype).eval()


@mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@torch.inference_mode()
def test_packed_equals_torchs_own_encoder_on_padded_texts(dtype: torch.dtype, bound: float) -> None:
    model = make_classifier(dtype)
    transformer = Transformer(ModelConfig(d_model=16, d_ff=24, n_heads=4, n_layers=2), 40)
    stack: Any = transformer.encoder
    stack.load_state_dict(model.layers.state_dict())
    encoder = make_torch_twin(transformer.double())[0].to(dtype)

    longest = max(map(len, IDS))
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in IDS])
    is_padding = padded == 0
    x = model.embedding(padded) * 4 + model.positions.table[:longest]
    encoded = encoder(x, src_key_padding_mask=is_padding)
    live = (~is_padding)[:, :, None].to(dtype)
    expected = model.output((encoded * live).sum(1) / live.sum(1))

    assert (model(pack(IDS)) - expected).abs().max() < bound


# ---- the two scripts ---------------------------------------------------------------------------------------------


@fixture
def few_reviews(monkeypatch: MonkeyPatch) -> None:
    make = reviews.make_reviews
    monkeypatch.setattr(reviews, "make_reviews", lambda n, seed: make(n // 30, seed))


def test_it_trains_saves_and_classifies(few_reviews: None, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "model")
    arguments = ["-o", out, "--epochs", "2", "--d-model", "16"]
    assert run_train(*arguments) == 0
    first = capsys.readouterr().out
    assert first.split()[:2] == ["neg", "pos"] and "accuracy" in first
    assert run_train(*arguments) == 0  # which replaces it
    assert capsys.readouterr().out == first

    text = "Not bad at all, this film."
    assert run_classify(out, text, "Hardly.", "--attention", str(tmp_path / "why.html")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[2] for line in lines] == [text, "Hardly."]
    page = (tmp_path / "why.html").read_text()
    assert text in page and '"encoder"' in page


def test_lines_of_standard_input(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "some.tsv").write_text(TSV)
    out = str(tmp_path / "model")
    assert run_train("--data", str(tmp_path / "some.tsv"), "-o", out, *SMALL) == 0
    assert capsys.readouterr().out.split()[:2] == ["no", "yes"]
    (tmp_path / "lines").write_text("this is good\n\nça va\n")
    stdin = os.dup(0)
    with open(tmp_path / "lines", "rb") as lines:
        os.dup2(lines.fileno(), 0)
    try:
        assert run_classify(out) == 0
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
    assert [line.split("\t")[2] for line in capsys.readouterr().out.splitlines()] == [
        "this is good",
        "",
        "ça va",
    ]


def write_imdb(folder: Path) -> None:
    for split in ("train", "test"):
        for label, text in (("pos", "A good film.<br /><br />Really."), ("neg", "No.\nDull.")):
            (folder / split / label).mkdir(parents=True)
            for n in range(3):
                (folder / split / label / f"{n}_7.txt").write_text(f"{text} {n}")
    (folder / "train" / "unsup").mkdir()  # IMDB has some without a label
    (folder / "train" / "unsup" / "0_0.txt").write_text("Unknown.")


def test_folders_as_imdb_has_them(tmp_path: Path) -> None:
    write_imdb(tmp_path)
    corpus = reviews.read_corpus(str(tmp_path), 1)
    assert len(corpus.train) == len(corpus.test) == 6
    assert ("pos", "A good film.  Really. 2") in corpus.train
    assert ("neg", "No. Dull. 0") in corpus.test


@mark.parametrize(
    "text, message",
    [
        ("pos\tgood\nneg bad\n", "some.tsv:2: each line must be a label, a tab, and a text"),
        ("pos\tgood\n" * 20, "all reviews to train on have the label 'pos'; give two labels"),
        ("", "some.tsv: is empty"),
        ("pos\tgood\n", "too few reviews to train and to test"),
        ("pos\tgood\nneg\tbad\n", "too few reviews to train and to test"),
        (TSV, "--pieces: 8000 is too large for so little text; use at most"),
    ],
)
def test_bad_reviews_are_one_line_and_exit_code_2(
    text: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "some.tsv").write_text(text)
    assert run_train("--data", str(tmp_path / "some.tsv"), "-o", str(tmp_path / "model")) == 2
    assert message in read_errors(capsys)[-1]
    assert not (tmp_path / "model").exists()


def test_other_mistakes_are_one_line_too(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for command, message in (
        (lambda: run_train("-o", str(tmp_path / "mine")), "is no classifier"),
        (lambda: run_train("--data", str(tmp_path / "mine")), "has no pos"),
        (lambda: run_train("--dropout", "1.5"), "--dropout is 1.5; it must be in [0, 1)"),
        (lambda: run_classify(str(tmp_path / "mine"), "text"), "manifest"),
    ):
        assert command() == 2
        assert message in read_errors(capsys)[-1]
    with raises(SystemExit, match="2"):
        run_train("--d-model", "12")


# ---- what it learns: minutes ------------------------------------------------------------------------------------


@mark.soak  # trains for a minute
def test_the_encoder_reaches_95_percent_and_a_bag_of_words_does_not(
    tmp_path: Path, capsys: Capture
) -> None:
    assert run_train("-o", str(tmp_path / "model")) == 0
    assert read_accuracy(capsys.readouterr().out) > 95
    assert run_train("-o", str(tmp_path / "bag"), "--bag-of-words") == 0
    assert read_accuracy(capsys.readouterr().out) < 60
    assert not (tmp_path / "bag").exists()


def read_accuracy(table: str) -> float:
    return float(table.partition("accuracy ")[2].partition("%")[0])
