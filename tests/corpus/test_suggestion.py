"""own.yaml and --suggest: the choices are nmt-init's, made once for the text and the machine, and rank
below what is given.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

import nmt.config
from nmt.api import load_config
from nmt.commands.init import main as nmt_init
from nmt.commands.train import main as nmt_train
from nmt.config import list_differences
from nmt.corpus import suggestion
from nmt.corpus.first_config import SIZES, Machine, choose_size
from nmt.system.errors import UserError

LAPTOP = Machine(n_cores=2, n_bytes=8 << 30, has_bf16=False, has_gpu=False)
SERVER = Machine(n_cores=64, n_bytes=256 << 30, has_bf16=True, has_gpu=False)
GPU = replace(LAPTOP, has_gpu=True)
TRAIN = "data.train=[{src: my.en, tgt: my.sv}]"


def write_text(path: Path, letters: str, seed: int) -> None:
    draw = random.Random(seed)
    lines = []
    for _ in range(1_300):
        words = ["".join(draw.choices(letters, k=4)) for _ in range(draw.randint(2, 8))]
        lines.append(" ".join(words) + "\n")
    path.write_text("".join(lines))


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two files and nothing else, on a laptop."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suggestion, "look_at_machine", lambda device: LAPTOP)
    write_text(tmp_path / "my.en", "abcdefghij", 1)
    write_text(tmp_path / "my.sv", "klmnopqrst", 2)
    return tmp_path


def test_two_files_and_nothing_else_give_what_nmt_init_chooses(text: Path) -> None:
    config = load_config("own.yaml", [TRAIN])
    assert nmt_init(["--src", "my.en", "--tgt", "my.sv", "-o", "init/en-sv.yaml"]) == 0
    written = nmt.config.load_config("init/en-sv.yaml")

    places = ("name", "data.root", "data.store", "data.train", "data.valid", "data.test")
    assert list_differences(written, config, places) == []
    assert (config.name, config.data.store) == ("own", "data/own/store")
    assert config.data.tgt == "sv"  # as the file is named
    for split in ("valid", "test"):
        drawn = text / "data" / "own" / f"suggested.{split}.sv"
        assert drawn.read_bytes() == (text / "init" / f"en-sv.{split}.sv").read_bytes()
    assert config.data.valid is not None and config.data.valid.tgt == "data/own/suggested.valid.sv"


def test_what_is_given_ranks_above_the_suggestion(text: Path) -> None:
    (text / "mine.yaml").write_text("extends: own.yaml\nmodel: {d_ff: 300}\nname: mine\n")
    write_text(text / "dev.en", "abcdefghij", 3)
    write_text(text / "dev.nb", "klmnopqrst", 4)
    dev = "data.valid={src: dev.en, tgt: dev.nb}"
    config = load_config("mine.yaml", [TRAIN, "training.steps=7", "data.tgt=nb", "seed=5", dev])
    assert (config.name, config.model.d_ff, config.training.steps) == ("mine", 300, 7)
    assert (config.data.tgt, config.seed) == ("nb", 5)
    assert config.data.valid is not None and config.data.valid.tgt == "dev.nb"
    assert not (text / "data" / "own" / "suggested.valid.nb").exists()
    assert config.model.d_model == SIZES[0].d_model and config.vocab.size == SIZES[0].vocab


def test_the_choice_is_made_once(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_config("own.yaml", [TRAIN])
    monkeypatch.setattr(suggestion, "look_at_machine", lambda device: SERVER)
    monkeypatch.setattr(suggestion, "make_first_config", None)
    assert load_config("own.yaml", [TRAIN]) == first
    (text / "data" / "own" / "suggested.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match="was made for other text .*data.train"):
        load_config("own.yaml", [TRAIN])


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([], "data.train: has 0 corpora, but a suggestion is made for one"),
        (["data.train=[{src: my.en, tgt: my.sv}, {demo: train}]"], "has 2 corpora"),
        (["data.train=[{src: my.en, tgt: none.sv}]"], "none.sv"),
        ([TRAIN, "seed=-1"], "seed"),
    ],
)
def test_refusals_write_nothing(text: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config("own.yaml", overrides)
    assert sorted(path.name for path in text.iterdir()) == ["my.en", "my.sv"]


def test_who_does_not_look_at_the_text_refuses_the_config(text: Path) -> None:
    with pytest.raises(UserError, match="own.yaml.*extends: suggested: only nmt-train"):
        nmt.config.load_config("own.yaml", [TRAIN])


# ---- the machine ---------------------------------------------------------------------------------


def test_a_machine_gets_the_largest_size_that_it_can_train() -> None:
    for n_words in (1e5, 5e5, 5e6, 3e7, 1e9):
        by_text, _ = choose_size(n_words, None)
        assert choose_size(n_words, GPU) == choose_size(n_words, None)
        small, reason = choose_size(n_words, LAPTOP)
        large, _ = choose_size(n_words, SERVER)
        assert small.d_model <= large.d_model <= by_text.d_model
        if small is not by_text:
            assert f"d_model {by_text.d_model}" in reason and "these 2 cores" in reason
    assert choose_size(5e6, LAPTOP)[0].d_model == 128
    assert choose_size(5e6, SERVER)[0].d_model == 512


def test_the_reason_for_a_smaller_model_is_what_the_machine_lacks() -> None:
    _, reason = choose_size(5e6, replace(SERVER, n_bytes=1 << 30))
    assert "which needs 0.5 GiB for weights" in reason and "days" not in reason
    _, reason = choose_size(5e6, replace(LAPTOP, n_cores=1))
    assert reason.endswith("days on this core")


def test_the_rough_count_is_the_measured_hour_of_multi30k() -> None:
    size = SIZES[1]  # multi30k.yaml's, which takes about an hour for 4,000 updates on two cores
    n_words = 345_000
    per_update = size.estimate_hours(n_words, LAPTOP) / size.count_updates(n_words)
    assert 0.75 < 4_000 * per_update < 1.5


# ---- commands ------------------------------------------------------------------------------------


def test_what_suggest_prints_is_what_own_yaml_trains_with(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nmt_train(["--suggest", TRAIN]) == 0
    printed = capsys.readouterr().out
    assert "# about 3 minutes" in printed or "minutes on these 2 cores" in printed
    (text / "kept.yaml").write_text(printed)
    assert nmt.config.load_config("kept.yaml") == load_config("own.yaml", [TRAIN])

    # for another config, its text counts, and nothing of it but the sets is written
    (text / "other.yaml").write_text("data: {src: en, tgt: sv, train: [{src: my.en, tgt: my.sv}]}")
    assert nmt_train(["--suggest", "--config", "other.yaml", "data.store=there/store"]) == 0
    (text / "other.yaml").write_text(capsys.readouterr().out)
    assert nmt.config.load_config("other.yaml").data.store == "there/store"
    assert sorted(path.suffix for path in (text / "there").iterdir()) == [
        ".en",
        ".en",
        ".sv",
        ".sv",
    ]


def test_a_run_records_the_values_and_continues(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["model.d_model=16", "model.n_layers=1", "training.micro_tokens=600", "data.workers=1"]
    tokens = ["training.src_tokens=600", "training.tgt_tokens=600", "vocab.size=200"]
    files = ["--src", "my.en", "--tgt", "my.sv"]
    command = [*files, *quick, *tokens, "evaluation.bleu=false"]
    assert nmt_train([*command, "training.steps=2"]) == 0
    recorded = (text / "runs" / "own" / "config.yaml").read_text()
    assert "suggested" not in recorded.replace("data/own/suggested.", "")
    assert "dropout: 0.3" in recorded and "d_model: 16" in recorded
    capsys.readouterr()
    assert nmt_train([*command, "training.steps=3"]) == 0
    assert "continuing after update 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["my.en", 'a "b", c: {d}.en', "~x #1, é.en", "back\\slash.en"])
def test_files_may_have_any_name(text: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (text / "my.en").rename(text / name)
    assert nmt_train(["--src", name, "--tgt", "my.sv", "--suggest"]) == 0
    assert f"{name} + my.sv: en to sv, 1,300 pairs" in capsys.readouterr().err
    assert nmt_train(["--src", name, "--tgt", "my.sv", "--print-config"]) == 0


@pytest.mark.parametrize(
    "words, message",
    [
        ("--suggest --explain --config own.yaml", "--suggest prints a config and exits"),
        ("training.steps=3", "give --config, or --src and --tgt"),
        ("--src my.en", "--src and --tgt go together"),
        ("--tgt my.en --config own.yaml", "--src and --tgt go together"),
        ("--src a.en --tgt a.sv data.train=[]", "leave one of them out"),
    ],
)
def test_misuse(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        nmt_train(words.split())
    assert left.value.code == 2 and message in capsys.readouterr().err
