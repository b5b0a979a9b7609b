"""What does not belong together is refused by every command that opens it: exit code 2, and one line that
names both sides and the remedy. What a model cannot read, or whose result is not what it seems, is one line too.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_errors, read_stderr
from support.in_process import Main, succeed
from support.toy_corpus import sentences, write_toy
from support.untrained import make_checkpoint, make_vocab

import nmt.api
from nmt.agreement import check_corpus, check_sides, find_direction
from nmt.commands.average import main as nmt_average
from nmt.commands.cli import run_command
from nmt.commands.eval import main as nmt_eval
from nmt.commands.init import main as nmt_init
from nmt.commands.prepare import main as nmt_prepare
from nmt.commands.score import main as nmt_score
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from nmt.config import CorpusConfig, DataConfig
from nmt.system.errors import UserError
from nmt.system.progress import say_once


def call_api(function: Callable[..., object], *arguments: str) -> int:
    """Call a function of nmt.api as a command would."""

    def work() -> int:
        paths = [word for word in arguments if "=" not in word]
        settings = [word for word in arguments if "=" in word]
        function(*paths, settings=settings)
        return 0

    return run_command(work, "nmt-api")


COMMANDS: dict[str, Main] = {
    "translate": nmt_translate,
    "score": nmt_score,
    "eval": nmt_eval,
    "average": nmt_average,
    "train": nmt_train,
    "init": nmt_init,
    "prepare": nmt_prepare,
    "api.load": lambda words: call_api(nmt.api.load, *words),
    "api.evaluate": lambda words: call_api(nmt.api.evaluate, *words),
    "api.score_pairs": lambda words: call_api(partial(nmt.api.score_pairs, [("a", "b")]), *words),
}

# Models: go translates en-de and back de-en; strange has another vocabulary. Runs of one recipe: run, and
# elsewhere on other data; run-back is of the other direction.
TEXTS = "--src corpus/test.en --tgt corpus/test.de"
TEST = "--src corpus/test.en --ref corpus/test.de"
TURNED = "{src: corpus/test.de, tgt: corpus/test.en}"
NEW_TEST = "out=new data.root=corpus data.store=new-store"
NEW_DATA = "out=new data.root=. data.store=new-store"
OTHER_DATA = "data.root=other data.store=other-store"
CELLS = {
    "direction": {
        "translate go back -i corpus/test.en": "go en-de back de-en",
        "api.load go back": "go en-de back de-en",
        f"score go back {TEXTS}": "go en-de back de-en",
        "api.score_pairs go back": "go en-de back de-en",
        f"eval go --ensemble back {TEST}": "go en-de back de-en",
        "eval go data.src=de data.tgt=en": "go en-de data.src de-en --force",
        "api.evaluate go data.src=de data.tgt=en": "go en-de data.src de-en",
        "eval go --src corpus/test.de --ref corpus/test.en": "go en-de test.de rename",
        f"eval back {TEST}": "back de-en test.en rename",
        f"score back {TEXTS}": "back de-en test.en rename",
        "translate go -i few.fr": "go en-de few.fr en rename",
        "translate go -i corpus/test.de": "go en-de test.de en rename",
        "translate go -i corpus/test.en --prefix few.fr": "go en-de few.fr de rename",
        "score go --src few.fr --tgt corpus/test.de": "go en-de few.fr en rename",
        "eval go --src few.fr --ref corpus/test.de": "go en-de few.fr en rename",
        "eval --hypotheses few.fr --ref chinese": "few.fr data.tgt en-de settings",
        "eval --hypotheses chinese --ref few.fr": "few.fr data.tgt en-de settings",
        "eval --hypotheses chinese --ref chinese --ref few.fr": "few.fr data.tgt en-de settings",
        "eval --hypotheses few.fr --src few.en --ref few.fr": "few.fr data.tgt en-de settings",
        "eval --compare few.fr chinese --ref chinese": "few.fr data.tgt en-de settings",
        "average run/checkpoints/last run-back/checkpoints/last -o mean": "run run-back data.src",
        f"eval go 'data.test={TURNED}'": "data.test.src: corpus/test.de en-de en swap",
        f"eval go --ensemble go 'data.test={TURNED}'": "data.test.src: corpus/test.de en-de",
        f"api.evaluate go 'data.test={TURNED}'": "data.test.src: corpus/test.de en-de",
        f"train 'data.train=[{TURNED}]' {NEW_DATA}": "data.train[0].src: corpus/test.de en-de swap",
        f"train 'data.valid={TURNED}' {NEW_DATA}": "data.valid.src: corpus/test.de en-de swap",
        f"train 'data.test={TURNED}' data.clean.held_out=drop-pairs {NEW_TEST}": "data.test.src",
        f"init {TEXTS} --languages de-en": "--src: corpus/test.en de-en --languages",
        f"init {TEXTS} --test-src few.fr --test-tgt few.en": "--test-src: few.fr en-de en",
        f"init {TEXTS} --valid-src few.en --valid-tgt few.fr": "--valid-tgt: few.fr en-de de",
    },
    "BPE model": {
        "translate go strange -i corpus/test.en": "go strange ensemble",
        "api.load go strange": "go strange ensemble",
        f"score go strange {TEXTS}": "go strange ensemble",
        "api.score_pairs go strange": "go strange ensemble",
        f"eval go --ensemble strange {TEST}": "go strange ensemble",
        "average go strange -o mean": "go strange average only",
        f"train out=learned vocab.model=null {OTHER_DATA}-2": "learned other-store-2 init_from",
        "train out=new training.init_from=learned": "learned store vocab.model=learned",
    },
    "training data": {
        f"train {OTHER_DATA} training.steps=3": "run/checkpoints other-store training.init_from",
        "average run/checkpoints/last elsewhere/checkpoints/last -o mean": "run elsewhere only",
        f"eval run elsewhere {TEST}": "run elsewhere --compare",
        f"eval run elsewhere --verdict {TEST}": "run elsewhere --compare",
    },
}

# Texts that are not what they seem, by name, and the exit code and the words with which commands meet them.
ODD_TEXTS = {
    "chinese": "\u6211\u559c\u6b22 \u732b\n\u4f60\u597d\n".encode() * 3,
    "utf-16le": "red dog\nblue cat\n".encode("utf-16le"),
    "utf-16": "\u6211\u559c\u6b22\n".encode("utf-16"),
    "utf-32be": "red dog\nblue cat\n".encode("utf-32be"),
    "mac": b"red dog\rblue cat\rred cat\r",
}
SHORT = "decoding.max_ratio=0 decoding.max_extra=1"
NAMED = {
    "translate go -i chinese -o o": (0, "lines 1 to 6 <unk> language"),
    "prepare 'data.train=[{src: chinese, tgt: copy}]'": (0, "train.src.ids.npy <unk> vocab.model"),
    "train 'data.train=[{src: chinese, tgt: copy}]' out=chinese-run": (
        0,
        "train.tgt.ids.npy <unk>",
    ),
    "translate go -i utf-16le -o o": (2, "utf-16le:1: UTF-16 iconv"),
    "translate go -i utf-16 -o o": (2, "utf-16:1: UTF-16 iconv"),
    "translate go -i utf-32be -o o": (2, "utf-32be:1: UTF-32 iconv"),
    "score go --src utf-16le --tgt corpus/test.de -o o": (2, "utf-16le:1: UTF-16 iconv"),
    "eval go --src utf-16le --ref corpus/test.de": (2, "utf-16le:1: UTF-16 iconv"),
    "translate go -i mac -o o": (0, "mac:1: 3 carriage returns tr"),
    f"eval go {TEST} {SHORT}": (0, "test.en:1: max_extra may be missing 20 of 20"),
    f"eval go {TEST} --ref corpus/test.de": (2, "test.de same text as another reference once"),
    "api.load tagged": (0, "tag <bt>"),
}


@fixture(scope="module")
def ground(module_path: Path) -> Iterator[Path]:
    """The current folder, with these models, runs and lists."""
    folder = module_path
    with MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        write_toy(folder)
        shutil.copytree("corpus", "other")
        for side, language in enumerate(("en", "de")):
            lines = [pair[side] + "\n" for pair in sentences(300, seed=9)]
            Path(f"other/train.{language}").write_text("".join(lines))

        vocab = make_vocab(folder)
        Path("bpe").write_bytes(vocab.model)
        make_checkpoint(Path("go"), vocab)
        make_checkpoint(Path("back"), vocab, data=DataConfig(src="de", tgt="en"))
        tagged = CorpusConfig(src="a", tgt="b", tag="<bt>")
        make_checkpoint(Path("tagged"), vocab, data=DataConfig(train=(tagged,)))
        for name, text in ODD_TEXTS.items():
            Path(name).write_bytes(text)
        shutil.copy("chinese", "copy")
        for name in ("few.fr", "few.en", "few.en.out"):
            shutil.copy("other/train.en", name)
        make_checkpoint(Path("strange"), make_vocab(folder, size=79))
        turned = "data.src=de data.tgt=en data.train=[{src: train.de, tgt: train.en}] data.store=b"
        for settings in (
            ["out=run"],
            ["out=elsewhere", *OTHER_DATA.split()],
            ["out=learned", "vocab.model=null", "data.store=learned-store"],
            ["out=run-back", *re.split(" (?=data)", turned)],
        ):
            succeed(nmt_train, *name_config(folder), *settings)
        yield folder


def name_config(folder: Path) -> list[str]:
    settings = ["training.steps=2", "evaluation.bleu=false", "data.valid=null", "out=run"]
    return ["--config", "toy.yaml", f"vocab.model={folder}/bpe", *settings]


@mark.parametrize("what, line", [(what, line) for what, lines in CELLS.items() for line in lines])
def test_a_mismatch_is_refused_in_one_line_that_names_both_sides(
    what: str, line: str, ground: Path, capsys: Capture
) -> None:
    command, *words = shlex.split(line)
    if command == "train":
        words = [*name_config(ground), *words]
    if command in ("score", "translate"):
        Path("result").write_text("of yesterday")
        words += ["-o", "result"]
    capsys.readouterr()
    assert COMMANDS[command](words) == 2
    message = read_errors(capsys)[-1]
    assert ": error: " in message
    assert [word for word in CELLS[what][line].split() if word not in message] == []
    if "result" in words:
        assert Path("result").read_text() == "of yesterday"


def test_an_output_in_the_wrong_language_is_not_written(ground: Path, capsys: Capture) -> None:
    assert COMMANDS["translate"](["go", "-i", "chinese", "-o", "new.fr"]) == 2
    assert "new.fr: its name says fr, but go translates en-de, and de is needed here" in (
        read_stderr(capsys)
    )
    assert not Path("new.fr").exists()


def test_names_that_fit_or_name_no_language_do_not_disturb() -> None:
    for source in (
        "few.txt",
        "test.tok",
        "few.en",
        "few.en.gz",
        "few.de.en",
        "few.en_GB",
        "few.de-en.tok",
    ):
        check_sides([source, None], [], [], "go translates", "en-de")
    for output in ("few.de", "few.en.out", "few", "few.json", "de.fr/few", ".fr"):
        check_sides([], [], [output, None], "go translates", "en-de")
    check_sides(["few.en"], ["few.de"], [], "go translates", "eng-deu")  # codes of another list
    check_sides(["few.fr"], ["few.fr"], ["few.fr"], "go translates", None)


@mark.parametrize(
    "corpus",
    [
        CorpusConfig(src="train.txt", tgt="train.tok"),
        CorpusConfig(src="training/europarl-v7.fr-en.en", tgt="training/europarl-v7.fr-en.fr"),
        CorpusConfig(src="fr/mono.fr.out", tgt="fr/mono.fr"),  # back-translated
        CorpusConfig(src="train.en", tgt="train.en.out.gz"),
        CorpusConfig(src="train.en", tgt="train.de", tag="<de>"),
        CorpusConfig(file="pairs.fr-en.de.parquet"),
        CorpusConfig(dataset="train.de", split="train.de"),
    ],
)
def test_a_corpus_that_fits_or_names_no_language_is_not_refused(corpus: CorpusConfig) -> None:
    check_corpus("data.train[0].", corpus, DataConfig(src="en", tgt="fr"))


@mark.parametrize("tgt", ["train.en", "train.fr-en.en", "train.en.gz", "d.fr/train.fr.en"])
def test_the_end_of_a_corpus_name_is_its_language(tgt: str) -> None:
    corpus = CorpusConfig(src="train", tgt=tgt, archive="a.tgz")
    with raises(UserError, match=r"^data\.valid\.tgt: .*says en, .* en-fr, and fr is needed"):
        check_corpus("data.valid.", corpus, DataConfig(src="en", tgt="fr"))


@mark.parametrize("line", NAMED)
def test_a_text_that_is_not_what_it_seems_is_named_once(
    line: str, ground: Path, capsys: Capture
) -> None:
    command, *words = shlex.split(line)
    if command in ("train", "prepare"):
        store = f"data.store={ground}/chinese-{command}"
        words = [*name_config(ground), "data.root=.", store, "training.steps=1", *words]
    say_once.cache_clear()
    capsys.readouterr()
    code, expected = NAMED[line]
    Path("o").write_text("of yesterday")
    assert COMMANDS[command](words) == code
    messages = read_errors(capsys)
    fitting = [one for one in messages if all(word in one for word in expected.split())]
    assert len(fitting) == 1
    assert code == 0 or Path("o").read_text() == "of yesterday"


def test_what_fits_or_is_asked_for_is_not_refused(ground: Path) -> None:
    shutil.copytree("run", "run-2")
    again = [*name_config(ground), "out=run-2", "training.steps=3"]

    # the same data elsewhere
    shutil.copytree("store", "moved")
    succeed(nmt_train, *again, "data.store=moved")
    # other data, from the weights alone
    other = ["out=new-2", "training.init_from=run-2", *OTHER_DATA.split()]
    succeed(nmt_train, *again, *other)
    # other names of the languages
    names = ["data.src=eng", "data.tgt=deu", "--force"]
    succeed(nmt_eval, "go", "--src", "corpus/test.en", "--ref", "corpus/test.de", *names)
    # a model whose tags choose the language
    assert find_direction(DataConfig(train=(CorpusConfig(src="a", tgt="b", tag="<de>"),))) is None
    assert find_direction(DataConfig(src="en_US", tgt="pt-BR")) == "en-pt"
    assert find_direction(DataConfig(src="English", tgt="french")) == "en-fr"
