"""nmt-init and nmt-train --src: the config prepares and loads as it is, no sentence of a drawn or given
set is trained on, and nothing is overwritten.
"""

import os
import random
import re
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stored_text import read_training_pairs

from nmt.commands.init import main as nmt_init
from nmt.commands.init import parse_arguments
from nmt.commands.train import main as nmt_train
from nmt.config_files import load_config
from nmt.corpus.prepare import prepare
from nmt.corpus.reader import Block, read_blocks
from nmt.extras.init import suggest, survey
from nmt.extras.init.first_config import choose_languages, find_config_for, guess_languages
from nmt.extras.init.hours import USED_SHARE
from nmt.extras.init.recipe import SIZES, choose_size
from nmt.system.errors import UserError

Capture = pytest.CaptureFixture[str]
TWO_FILES = ["--src", "train.en", "--tgt", "train.de"]


def make_sentences(n: int, letters: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(999)]
    return [" ".join(draw.choices(words, k=draw.randint(2, 10))) for _ in range(n)]


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


def read_training_text(config: Path) -> list[set[str]]:
    """Both sides of the training text in the store of a config, which is prepared here."""
    made = load_config(str(config))
    assert prepare(made.data, made.vocab, made.seed)
    pairs = read_training_pairs(Path(made.data.store))
    return [set(side) for side in zip(*pairs, strict=True)]


def test_no_drawn_sentence_is_trained_on(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    sizes = []

    def read_counted(*given: Any) -> Iterator[Block]:
        for block in read_blocks(*given):
            sizes.append(len(block.src))
            yield block

    for module in (survey, suggest):
        monkeypatch.setattr(module, "PAIRS_PER_SHARD", 7)
        monkeypatch.setattr(module, "read_blocks", read_counted)
    assert nmt_init(["--src", "train.de", "--tgt", "train.en", "-o", "my.yaml"]) == 0
    assert sizes == 3 * [*[7] * 185, 5]  # of the text, for the dev set and for the test set
    config = load_config("my.yaml")
    assert config.model.positions == "rotary"  # which is told before hours are trained
    told = (
        "give it to CTranslate2, LibreTranslate; Hugging Face and Marian have no rotary positions"
    )
    assert told in capsys.readouterr().err
    assert (config.data.src, config.data.tgt, config.name) == ("de", "en", "my")
    assert config.vocab.byte_fallback
    src, tgt = read_training_text(pair / "my.yaml")
    assert len(src) > 900
    for split in ("valid", "test"):
        held_src = read_lines_of(pair / f"my.{split}.de")
        held_tgt = read_lines_of(pair / f"my.{split}.en")
        assert len(held_src) == len(held_tgt) == 100
        assert src.isdisjoint(held_src) and tgt.isdisjoint(held_tgt)
        whole = zip(read_lines_of(pair / "train.de"), read_lines_of(pair / "train.en"), strict=True)
        assert set(zip(held_src, held_tgt, strict=True)) <= set(whole)


def test_sets_are_drawn_from_text_whose_pairs_all_occur_three_times(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for language in ("en", "de"):
        lines = read_lines_of(pair / f"train.{language}")
        write_lines(pair / f"thrice.{language}", lines * 3)
    names = ["--src", "thrice.en", "--tgt", "thrice.de", "-o", "my.yaml"]
    assert nmt_init(names) == 0
    src, _ = read_training_text(pair / "my.yaml")
    held_out = [
        line for split in ("valid", "test") for line in read_lines_of(pair / f"my.{split}.en")
    ]
    assert len(held_out) == len(set(held_out)) >= 200 and src.isdisjoint(held_out)
    n_dropped = sum(line in held_out for line in read_lines_of(pair / "thrice.en"))
    assert n_dropped >= 3 * len(held_out)
    assert f"drops {n_dropped:,} pairs here" in (pair / "my.yaml").read_text()


def test_no_given_sentence_is_trained_on(pair: Path, capsys: Capture) -> None:
    write_lines(pair / "train.en", [*read_lines_of(pair / "train.en"), "left"])
    write_lines(pair / "train.de", [*read_lines_of(pair / "train.de"), ""])
    write_lines(pair / "dev.en", [*read_lines_of(pair / "train.en")[:20], "new"])
    write_lines(pair / "dev.de", [*read_lines_of(pair / "train.de")[:20], "neu"])
    options = ["--valid-src", "dev.en", "--valid-tgt", "dev.de"]
    assert nmt_init([*TWO_FILES, *options, "-o", "my.yaml"]) == 0
    said = capsys.readouterr().err
    assert ", 1 an empty side\n" in said and "\n40 training pairs have a side in common" in said
    assert not list(pair.glob("my.valid.*")) and len(read_lines_of(pair / "my.test.en")) == 100
    src, tgt = read_training_text(pair / "my.yaml")
    for name in ("dev", "my.test"):
        assert src.isdisjoint(read_lines_of(pair / f"{name}.en"))
        assert tgt.isdisjoint(read_lines_of(pair / f"{name}.de"))


def test_a_given_set_of_two_texts_is_named(pair: Path, capsys: Capture) -> None:
    lines = make_sentences(200, "uvwxyz", 5)
    for others, is_warned in ((lines, False), (lines[1:] + lines[:1], True)):
        options = ["--valid-src", write_lines(pair / "dev.en", lines)]
        options += ["--valid-tgt", write_lines(pair / "dev.de", others)]
        assert nmt_init([*TWO_FILES, *options, "-o", "my.yaml", "--force"]) == 0
        said = "dev.de: do not look like translations of each other" in capsys.readouterr().err
        assert said == is_warned


def test_the_text_and_the_seed_decide_the_sets_however_the_text_is_packed(pair: Path) -> None:
    src, tgt = read_lines_of(pair / "train.en"), read_lines_of(pair / "train.de")
    write_lines(pair / "t.en-de.tsv", [f"{a}\t{b}" for a, b in zip(src, tgt, strict=True)])
    with zipfile.ZipFile(pair / "t.zip", "w") as archive:
        archive.write(pair / "t.en-de.tsv", "inside/t.en-de.tsv")
    commands = {
        "a": TWO_FILES,
        "b": ["--file", "t.en-de.tsv"],
        "z": ["--archive", "t.zip", "--file", "inside/t.en-de.tsv"],
        "d": [*TWO_FILES, "--seed", "2"],
    }
    for name, options in commands.items():
        assert nmt_init([*options, "-o", f"{name}/c.yaml"]) == 0
    a, b, z, d = (read_lines_of(pair / name / "c.test.en") for name in commands)
    assert a == b == z != d
    assert load_config("a/c.yaml").data.train[0].src == str(pair / "train.en")


def test_nothing_is_overwritten_unless_forced(pair: Path, capsys: Capture) -> None:
    command = [*TWO_FILES, "-o", "my.yaml"]
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


REFUSALS = r"""
--src few.en --tgt few.de -> has 50 different usable pairs
--src train.en --tgt short.de --languages en-de -> has 1,300 lines but
--src train.en --tgt train.fr -> 1,300 of 1,300 pairs have equal sides
--src train.en --tgt train.en -> src and tgt are both 'train.en'
--src twice.en --tgt train.de -> too few to draw 100 for each of dev and test
--src empty.en --tgt train.de -> is empty
--src train.en --tgt x.txt -> do not show the languages
TWO --languages en -> not a pair of languages
--src train.en -> as --src FILE --tgt FILE
--src train.en --tgt NONE -> give your text
TWO --file pairs.en-de.tsv -> needs exactly one
TWO --valid-src train.en --valid-tgt train.de -> 1,300 of 1,300 training pairs
--src ODD --tgt train.de -> 'by\udcff.en': has U+DCFF in its name
TWO -o pipe.txt --force -> pipe.txt: is not a regular file
TWO -o device.txt --force -> device.txt: is not a regular file
TWO --seed -1 -> --seed -1
"""


def test_refusals_are_one_line(pair: Path, capsys: Capture) -> None:
    write_lines(pair / "few.en", make_sentences(50, "ab", 1))
    write_lines(pair / "few.de", make_sentences(50, "cd", 2))
    write_lines(pair / "short.de", make_sentences(1_299, "xyz", 1))
    (pair / "train.fr").write_bytes((pair / "train.en").read_bytes())
    (pair / "by\udcff.en").write_bytes((pair / "train.en").read_bytes())
    os.mkfifo(pair / "pipe.txt")
    (pair / "device.txt").symlink_to("/dev/null")
    write_lines(pair / "empty.en", [])
    write_lines(pair / "twice.en", 2 * read_lines_of(pair / "train.en")[:650])
    for line in REFUSALS.strip().splitlines():
        words, message = line.replace("TWO", " ".join(TWO_FILES)).split(" -> ")
        assert nmt_init(words.replace("ODD", "by\udcff.en").replace("NONE", "").split(" ")) == 2, (
            message
        )
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("nmt-init: error: ") and message in error
        assert not list(pair.glob("*.yaml"))


@pytest.mark.parametrize(
    "side, letters, best_by",
    [("de", "天地人大小", "chrf"), ("de", "กขคงจ", "chrf"), ("en", "ひらがな", "bleu")],
)
def test_words_without_spaces_between_them_are_told_by_their_script(
    pair: Path, side: str, letters: str, best_by: str
) -> None:
    """However little stands between spaces, two characters are a word, and no rule counts words."""
    write_lines(pair / f"train.{side}", make_sentences(1_300, letters, 4))
    assert nmt_init([*TWO_FILES, "-o", "my.yaml"]) == 0
    config = load_config("my.yaml")
    assert (config.data.clean.max_ratio, config.evaluation.best_by) == (None, best_by)
    assert re.search(r": 1,\d+ pairs, 1\d,\d+ words", (pair / "my.yaml").read_text())


@pytest.mark.parametrize(
    "names, languages",
    [
        ("train.en train.de", ("en", "de")),
        ("a/de-en.txt.zip/x.de-en.de.gz x.de-en.en.gz", ("de", "en")),
        ("en.txt sv.txt", ("en", "sv")),
        ("pairs.en-sv.tsv", ("en", "sv")),
        ("my.test.en train.de", ("en", "de")),
        ("pairs.tsv", None),
        ("train.src train.tgt", None),
        ("a.txt b.txt", None),
    ],
)
def test_languages_are_in_the_names(names: str, languages: tuple[str, str] | None) -> None:
    assert guess_languages(names.split()) == languages


@pytest.mark.parametrize(
    "given, codes", [("english-DE_AT", "en-de"), ("de_AT-de_CH", "de_AT-de_CH")]
)
def test_languages_are_called_by_their_codes(given: str, codes: str, capsys: Capture) -> None:
    assert choose_languages(Namespace(languages=given)) == tuple(codes.split("-"))
    said = f"--languages {given}: called {codes} from now on\n"
    assert capsys.readouterr().err == ("" if given == codes else said)


# ---- the size --------------------------------------------------------------------------------------------------


def test_hours_choose_the_largest_size_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does 1e12 operations a second in training."""
    monkeypatch.setattr("nmt.extras.init.hours.measure_ceiling", lambda *_: 1e12 / USED_SHARE)
    limits = [size.max_words for size in SIZES]
    for n_words in (1e5, 5e5, 5e6, 3e7, 1e9):
        by_text = choose_size(n_words, None)
        assert by_text == next(size for size in SIZES if n_words <= size.max_words)
        before = 0
        for hours in (0.01, 1, 30, 1e4):
            size = choose_size(n_words, hours)
            place = limits.index(size.max_words)
            assert before <= place <= limits.index(by_text.max_words)
            before = place
            assert size.estimate_hours(n_words) <= hours
            # little time makes the model small, but leaves its pieces to the text
            assert size.vocab >= min(by_text.vocab, 10_000)
            assert (f"d_model {by_text.d_model}" in size.reason) == (size != by_text)
        assert size == by_text


def test_the_hours_are_those_of_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.extras.init.hours.measure_ceiling", lambda *_: 1e12 / USED_SHARE)
    size = choose_size(1e6, None)  # hour.yaml's: d_model 256, d_ff 512, 3 layers
    weights = 3 * (12 * 256**2 + 4 * 256 * 512) + 256 * 10_000
    n_operations = 6 * weights * 4_096 * 2_000
    assert size.estimate_hours(1e6) == pytest.approx(n_operations / 1e12 / 3600)


# ---- nmt-train --src --tgt --------------------------------------------------------------------------------------


def test_two_files_are_enough_to_train_and_to_continue(
    pair: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ["model.d_model=16", "model.n_layers=1", "training.micro_tokens=600", "data.workers=1"]
    quick += ["training.src_tokens=600", "training.tgt_tokens=600", "vocab.size=400"]
    command = [*TWO_FILES, *quick, "evaluation.bleu=false"]
    assert nmt_train([*command, "training.steps=2"]) == 0
    assert f"wrote {pair}/en-de.yaml" in capsys.readouterr().err
    written = (pair / "en-de.yaml").read_text()
    assert nmt_init([*TWO_FILES, "-o", "init/en-de.yaml"]) == 0
    for split in ("valid", "test"):
        drawn = (pair / "init" / f"en-de.{split}.de").read_bytes()
        assert (pair / f"en-de.{split}.de").read_bytes() == drawn
    recorded = load_config(str(pair / "runs" / "en-de" / "config.yaml"))
    assert (recorded.model.d_model, recorded.model.dropout) == (16, 0.3)
    capsys.readouterr()

    # a model of another pair is a beginning too, and is named
    start = ["--from", "runs/en-de"]
    (pair / "train.fr").write_bytes((pair / "train.de").read_bytes())
    assert nmt_init([*start, "--src", "train.en", "--tgt", "train.fr", "-o", "init/fr.yaml"]) == 0
    note = "note: runs/en-de was trained for en-de, and learns en-fr now\n"
    assert note in capsys.readouterr().err
    assert nmt_init([*start, *TWO_FILES, "-o", "init/de.yaml"]) == 0
    assert "was trained for" not in capsys.readouterr().err

    # the same command continues, with the choices that were made
    monkeypatch.setattr("nmt.extras.init.suggest.suggest_config", None)
    assert nmt_train([*command, "training.steps=3"]) == 0
    shown = capsys.readouterr().err
    assert "using en-de.yaml" in shown and "continuing after update 2" in shown
    assert (pair / "en-de.yaml").read_text() == written
    (pair / "train.de").rename(pair / "other.de")
    assert nmt_train(["--src", "train.en", "--tgt", "other.de", "--explain"]) == 2
    assert "en-de.yaml: is for text other than train.en and other.de" in capsys.readouterr().err


def test_all_ranks_need_the_same_config(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="en-de.yaml: does not exist yet; write it with nmt-init"):
        find_config_for(parse_arguments(["--src=train.en", "--tgt=train.de"]))


@pytest.mark.parametrize(
    "name", ["my.en", 'a "b", c: {d}.en', "~x #1, \u00e9.en", "back\\slash.en"]
)
def test_files_may_have_any_name(pair: Path, name: str, capsys: Capture) -> None:
    (pair / "train.en").rename(pair / name)
    for _ in range(2):
        assert nmt_train(["--src", name, "--tgt", "train.de", "--print-config"]) == 0
    assert f"{name} + train.de: en to de, 1,300 pairs" in capsys.readouterr().err
    given = ["--config", "en-de.yaml", "--src", name, "--tgt", "train.de"]
    assert nmt_train([*given, "--print-config"]) == 0


@pytest.mark.parametrize(
    "words, message",
    [
        ("training.steps=3", "give --config, or --src and --tgt"),
        ("--src my.en", "--src needs --tgt"),
        ("--tgt my.en --config demo.yaml", "--tgt needs --src"),
        ("--src a.en --tgt a.sv data.train=[]", "give only one of the two"),
    ],
)
def test_misuse(words: str, message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        nmt_train(words.split())
    assert left.value.code == 2 and message in capsys.readouterr().err
