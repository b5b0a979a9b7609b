"""nmt-init: its config prepares and loads as it is, no sentence of a drawn or given set is trained on,
and nothing is overwritten.
"""

import gzip
import random
import zipfile
from pathlib import Path

import pytest

from nmt.commands.init import main as nmt_init
from nmt.config import load_config
from nmt.corpus.first_config import SIZES, guess_languages
from nmt.corpus.prepare import prepare
from nmt.data.store import open_store
from nmt.data.vocab import Vocab


def make_sentences(n: int, letters: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    sentences = []
    for _ in range(n):
        n_words = 2 + draw.randrange(9)
        words = ["".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(n_words)]
        sentences.append(" ".join(words))
    return sentences


def write_lines(path: Path, lines: list[str]) -> str:
    text = "".join(f"{line}\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 1,300 pairs, a hundred of which come twice, and others with one side in common."""
    monkeypatch.chdir(tmp_path)
    src = make_sentences(1_200, "abcdefghij", 1)
    tgt = make_sentences(1_200, "klmnopqrst", 2)
    src += src[:100]
    tgt += [*tgt[:50], *make_sentences(50, "klmnopqrst", 3)]
    write_lines(tmp_path / "train.en", src)
    write_lines(tmp_path / "train.de", tgt)
    return tmp_path


def read_lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def read_training_text(config: Path) -> tuple[set[str], set[str]]:
    """Both sides of the training text in the store of a config, which is prepared here."""
    made = load_config(str(config))
    assert prepare(made.data, made.vocab, made.seed)
    store = open_store(Path(made.data.store), "train")
    vocab = Vocab.load(Path(made.data.store) / "vocab.model")
    texts = []
    for side in (store.src, store.tgt):
        ids = [side.ids[a:b].tolist() for a, b in zip(side.offsets, side.offsets[1:], strict=False)]
        texts.append(set(vocab.decode(ids)))
    return texts[0], texts[1]


def test_no_drawn_sentence_is_trained_on(pair: Path) -> None:
    assert nmt_init(["--src", "train.de", "--tgt", "train.en", "-o", "my.yaml"]) == 0
    config = load_config("my.yaml")
    assert (config.data.src, config.data.tgt, config.name) == ("de", "en", "my")
    src, tgt = read_training_text(pair / "my.yaml")
    assert len(src) > 900
    for split in ("valid", "test"):
        held_src = read_lines_of(pair / f"my.{split}.de")
        held_tgt = read_lines_of(pair / f"my.{split}.en")
        assert len(held_src) == len(held_tgt) == 100
        assert src.isdisjoint(held_src) and tgt.isdisjoint(held_tgt)
        whole = zip(read_lines_of(pair / "train.de"), read_lines_of(pair / "train.en"), strict=True)
        assert set(zip(held_src, held_tgt, strict=True)) <= set(whole)


def test_no_given_sentence_is_trained_on(pair: Path) -> None:
    write_lines(pair / "dev.en", [*read_lines_of(pair / "train.en")[:20], "new"])
    write_lines(pair / "dev.de", [*read_lines_of(pair / "train.de")[:20], "neu"])
    options = ["--valid-src", "dev.en", "--valid-tgt", "dev.de"]
    assert nmt_init(["--src", "train.en", "--tgt", "train.de", *options, "-o", "my.yaml"]) == 0
    assert not list(pair.glob("my.valid.*")) and len(read_lines_of(pair / "my.test.en")) == 100
    src, tgt = read_training_text(pair / "my.yaml")
    for name in ("dev", "my.test"):
        assert src.isdisjoint(read_lines_of(pair / f"{name}.en"))
        assert tgt.isdisjoint(read_lines_of(pair / f"{name}.de"))


def test_tables_and_packed_text_give_the_same_sets(pair: Path) -> None:
    src, tgt = read_lines_of(pair / "train.en"), read_lines_of(pair / "train.de")
    write_lines(pair / "t.en-de.tsv", [f"{a}\t{b}" for a, b in zip(src, tgt, strict=True)])
    for name in ("train.en", "train.de"):
        (pair / f"{name}.gz").write_bytes(gzip.compress((pair / name).read_bytes()))
    assert nmt_init(["--src", "train.en", "--tgt", "train.de", "-o", "a.yaml"]) == 0
    assert nmt_init(["--file", "t.en-de.tsv", "-o", "b.yaml"]) == 0
    assert nmt_init(["--src", "train.en.gz", "--tgt", "train.de.gz", "-o", "c/c.yaml"]) == 0
    with zipfile.ZipFile(pair / "t.zip", "w") as archive:
        archive.write(pair / "t.en-de.tsv", "inside/t.en-de.tsv")
    member = ["--archive", "t.zip", "--file", "inside/t.en-de.tsv"]
    assert nmt_init([*member, "-o", "z.yaml"]) == 0
    assert nmt_init(["--src", "train.en", "--tgt", "train.de", "-o", "d.yaml", "--seed", "2"]) == 0
    drawn = read_lines_of(pair / "a.test.en")
    assert drawn == read_lines_of(pair / "b.test.en") == read_lines_of(pair / "c" / "c.test.en")
    assert drawn == read_lines_of(pair / "z.test.en")
    assert drawn != read_lines_of(pair / "d.test.en")
    assert load_config("c/c.yaml").data.train[0].src == str(pair / "train.en.gz")


def test_nothing_is_overwritten_unless_forced(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--src", "train.en", "--tgt", "train.de", "-o", "my.yaml"]
    (pair / "my.yaml").write_text("name: mine\n")
    assert nmt_init(command) == 2
    remedy = "give another -o FILE, or replace it with --force"
    assert f"my.yaml: exists; {remedy}\n" in capsys.readouterr().err
    assert (pair / "my.yaml").read_text() == "name: mine\n" and not list(pair.glob("my.test.*"))
    assert nmt_init([*command, "--force"]) == 0
    assert nmt_init(command) == 0  # it would write what is there
    # never one's own text
    (pair / "my.test.en").write_bytes((pair / "train.en").read_bytes())
    assert nmt_init(["--src", "my.test.en", *command[2:], "--force"]) == 2
    assert "my.test.en: is your own text; give another -o FILE\n" in capsys.readouterr().err
    assert (pair / "my.test.en").read_bytes() == (pair / "train.en").read_bytes()


def test_refusals_are_one_line(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(pair / "few.en", make_sentences(50, "ab", 1))
    write_lines(pair / "few.de", make_sentences(50, "cd", 2))
    write_lines(pair / "short.de", make_sentences(1_299, "xyz", 1))
    (pair / "train.fr").write_bytes((pair / "train.en").read_bytes())
    write_lines(pair / "empty.en", [])
    write_lines(pair / "twice.en", 2 * read_lines_of(pair / "train.en")[:650])
    texts = ["--src", "train.en", "--tgt", "train.de"]
    refusals = {
        "has 50 different usable pairs": ["--src", "few.en", "--tgt", "few.de"],
        "has 1,300 lines but": ["--src", "train.en", "--tgt", "short.de", "--languages", "en-de"],
        "1,300 of 1,300 pairs have equal sides": ["--src", "train.en", "--tgt", "train.fr"],
        "both train.en": ["--src", "train.en", "--tgt", "train.en"],
        "too few to draw 100 for each of dev and test": ["--src", "twice.en", "--tgt", "train.de"],
        "is empty": ["--src", "empty.en", "--tgt", "train.de"],
        "do not tell the languages": ["--src", "train.en", "--tgt", "x.txt"],
        "not a pair of languages": [*texts, "--languages", "en"],
        "as --src FILE --tgt FILE": ["--src", "train.en"],
        "needs exactly one": [*texts, "--file", "pairs.en-de.tsv"],
        "1,300 of 1,300 training pairs": [*texts, "--valid-src", "train.en", "--valid-tgt", "train.de"],
        "--seed -1": [*texts, "--seed", "-1"],
    }  # fmt: skip
    for message, options in refusals.items():
        assert nmt_init(options) == 2, message
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("nmt-init: error: ") and message in error
        assert not list(pair.glob("*.yaml"))


def test_languages_are_in_the_names() -> None:
    assert guess_languages(["train.en", "train.de"]) == ("en", "de")
    assert guess_languages(["a/de-en.txt.zip/x.de-en.de.gz", "x.de-en.en.gz"]) == ("de", "en")
    assert guess_languages(["en.txt", "sv.txt"]) == ("en", "sv")
    assert guess_languages(["pairs.en-sv.tsv"]) == ("en", "sv")
    assert guess_languages(["my.test.en", "train.de"]) == ("en", "de")
    assert guess_languages(["pairs.tsv"]) is None
    assert guess_languages(["train.src", "train.tgt"]) is None
    assert guess_languages(["a.txt", "b.txt"]) is None


def test_more_text_never_gets_a_smaller_model() -> None:
    for small, large in zip(SIZES, SIZES[1:], strict=False):
        assert small.max_words < large.max_words
        assert (small.vocab, small.d_model, small.d_ff) <= (large.vocab, large.d_model, large.d_ff)
        assert small.dropout >= large.dropout
