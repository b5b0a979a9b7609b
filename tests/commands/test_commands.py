"""The commands as a user meets them: what they print where, and one clear line with exit code 2 for
each mistake.
"""

import io
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import sacrebleu
from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.in_process import Main, succeed
from support.text_lines import join_lines
from support.toy_corpus import write_toy

from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from nmt.config_files import load_config
from nmt.extras.profile.profile import profile_training
from nmt.system.files import read_json


@fixture(scope="module")
def trained(module_path: Path) -> Path:
    """A folder with a corpus, the config of a run, and its run folder with checkpoints at 10 and
    20.
    """
    folder = module_path
    config = write_toy(folder)
    succeed(nmt_train, "--config", config, "training.checkpoint_every=10")
    return folder


@fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run folder."""
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def read_refusal(capsys: Capture, code: int) -> str:
    """The one line of a refusal."""
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert code == 2 and len(lines) == 1 and captured.out == "", captured
    return lines[0]


def test_print_config_is_a_config(toy: Path, tmp_path: Path, capsys: Capture) -> None:
    succeed(nmt_train, "--config", toy, "--print-config", "model.n_layers=3")
    copy = tmp_path / "copy.yaml"
    copy.write_text(capsys.readouterr().out)
    assert load_config(str(copy)) == load_config(str(toy), ["model.n_layers=3"])
    assert not (tmp_path / "run").exists()


def spoil(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


# what is changed in the corpus, settings, what the message names
MISTAKES: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda c: spoil(c, "train.de", lambda b: b + b"eins\n"), "", "train.en 400 401"),
    (lambda c: (c / "train.de").unlink(), "", "train.de data.root"),
    (lambda c: spoil(c, "valid.en", lambda b: b""), "", "valid.en empty"),
    (
        lambda c: spoil(c, "train.en", lambda b: b.replace(b" ", b"\xc3(", 1)),
        "",
        "train.en:1 UTF-8",
    ),
    (Path.exists, "model.d_modle=8", "model.d_modle d_model"),
    (Path.exists, "modle.d_model=8", "modle model"),
    (Path.exists, "training.steps=many", "training.steps 'many' integer"),
    (Path.exists, "model.d_model=15", "d_model n_heads"),
    (Path.exists, "training.steps", "training.steps section.key=value"),
    (Path.exists, "training.micro_tokens=1.5", "training.micro_tokens 1.5"),
]


@mark.parametrize("change, setting, expected", MISTAKES)
def test_mistakes_are_reported_in_one_line(
    change: Callable[[Path], object],
    setting: str,
    expected: str,
    toy: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    change(corpus)
    message = read_refusal(capsys, nmt_train(["--config", str(toy), *setting.split()]))
    assert all(word in message for word in expected.split()), message
    left = {path.name for path in (tmp_path / "store").glob("*")}
    assert left <= {".nmt-prepare"}  # stages that are done, which the corrected command takes up
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_vocabulary_larger_than_the_text_allows(toy: Path, capsys: Capture) -> None:
    assert nmt_train(["--config", str(toy), "vocab.size=9000"]) == 2
    # After a line that says learning has begun
    message = read_stderr(capsys).strip().splitlines()[-1]
    assert "vocab.size" in message and "9000" in message and "at most" in message


def test_a_folder_that_cannot_be_written(toy: Path, capsys: Capture) -> None:
    message = read_refusal(capsys, nmt_train(["--config", str(toy), f"out={toy}/run"]))
    assert str(toy) in message and "cannot be written" in message


def test_a_bug_of_ours_ends_in_a_traceback(toy: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.api.load_config", lambda *_: 1 / 0)
    with raises(ZeroDivisionError):  # a traceback and exit code 1 from the interpreter
        nmt_train(["--config", str(toy)])


def test_translate_prompts_at_a_terminal(
    run: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(b"red dog\n")))
    succeed(nmt_translate, run)
    captured = capsys.readouterr()
    assert "en -> de" in captured.err and captured.out.count("\n") == 1


@mark.parametrize(
    "flags, words",
    [
        ("--profile --plan", "--profile does not support --plan"),
        ("--profile --price 3", "--price needs --plan"),
        ("--plan --price -1", "--price -1"),
        ("--plan --price nan", "--price nan"),
        ("--plan --price much", "'much'"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: str, words: str, toy: Path, tmp_path: Path, capsys: Capture
) -> None:
    with raises(SystemExit) as left:
        nmt_train(["--config", str(toy), *flags.split()])
    message = read_refusal(capsys, int(str(left.value)))
    assert message.startswith("nmt-train: error:") and words in message
    assert not (tmp_path / "store").exists()


@mark.parametrize("flag", ["--profile", "--plan"])
def test_a_rehearsal_leaves_no_run(
    flag: str,
    toy: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: MonkeyPatch,
) -> None:
    monkeypatch.setattr("nmt.extras.profile.estimate.TIMED_S", 0.2)
    monkeypatch.setattr(
        "nmt.extras.profile.profile.profile_training", partial(profile_training, seconds=0.2)
    )
    succeed(nmt_train, "--config", toy, flag, "training.micro_tokens=auto")
    assert "tokens" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} - {"corpus", "toy.yaml"} == {"store"}


def test_micro_tokens_auto_is_resolved_once(
    toy: Path, tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    options = ["--config", str(toy), "training.micro_tokens=auto"]
    succeed(nmt_train, *options, "training.steps=2")
    # An update has no more
    assert "training.micro_tokens: auto has chosen 300" in read_stderr(capsys)
    assert load_config(str(tmp_path / "run" / "config.yaml")).training.micro_tokens == 300
    # As another machine would have it
    monkeypatch.setattr("nmt.train.engine.CPU_MICRO_TOKENS", 50)
    succeed(nmt_train, *options, "training.steps=3")
    assert "auto has chosen" not in read_stderr(capsys)
    assert load_config(str(tmp_path / "run" / "config.yaml")).training.micro_tokens == 300
    assert (tmp_path / "run" / "checkpoints" / "last").resolve().name == "step-0000003"


@mark.parametrize(
    "command, words, option",
    [
        (nmt_eval, "--hypotheses a --src b --src c", "--src"),
        (nmt_average, "runs/a --last 5 --last 6", "--last"),
        (nmt_train, "-c demo.yaml --config base.yaml", "-c/--config"),
    ],
)
def test_an_option_given_twice_is_refused(
    command: Main,
    words: str,
    option: str,
    capsys: Capture,
) -> None:
    with raises(SystemExit) as stop:
        command(words.split())
    assert f"argument {option}: given twice" in read_refusal(capsys, int(str(stop.value)))


def test_of_two_values_of_a_setting_the_last_counts(capsys: Capture) -> None:
    steps = ["training.steps=5", "training.steps=7"]
    succeed(nmt_train, "-c", "demo.yaml", "--print-config", "seed=2", *steps)
    shown, said = capsys.readouterr()
    assert "steps: 7" in shown
    assert said == "note: training.steps is given 2 times; the last value counts\n"


@mark.parametrize("name", ["average", "checkpoints/step-0000010", "../store"])
def test_a_folder_that_is_something_else_is_no_run(
    name: str, run: Path, trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    if name == "average":
        succeed(nmt_average, run, "--last", "2")
    if name == "../store":
        shutil.copytree(trained / "store", tmp_path / "store")
    folder = run / name
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    code = nmt_train(["--config", str(trained / "toy.yaml"), f"out={folder}", "training.steps=21"])
    assert "not a run; choose another out=DIR" in read_refusal(capsys, code)
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept


@mark.parametrize("name", ["config.yaml", "report.html", "vocab.model", "metrics.jsonl"])
def test_files_of_the_user_in_the_run_folder(
    name: str, toy: Path, tmp_path: Path, capsys: Capture
) -> None:
    """For example a config, with comments, in the folder that its run will have."""
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / name
    succeed(nmt_train, "--config", toy, "--print-config")
    file.write_text("# why these settings\n" + capsys.readouterr().out)
    kept = file.read_bytes()
    code = nmt_train(["--config", str(toy), f"out={tmp_path}/mine"])
    assert f"{file}: exists, but its folder is not that of a run" in read_refusal(capsys, code)
    assert file.read_bytes() == kept and list(file.parent.iterdir()) == [file]
    assert not (tmp_path / "store").exists()


def test_settings_of_another_run_leave_no_store_behind(
    run: Path, trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = ["--config", str(trained / "toy.yaml"), f"out={run}"]
    code = nmt_train([*config, f"data.store={tmp_path}/other", "vocab.size=90"])
    assert "vocab.size: 80 -> 90" in read_refusal(capsys, code)
    assert not (tmp_path / "other").exists()


def test_several_references(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capture) -> None:
    texts = {
        "hyp": ["the red house is big", "a small dog runs away"],
        "one": ["the red house is large", "a small dog runs away"],
        "two": ["the red house is big", "a little dog is running"],
    }
    monkeypatch.chdir(tmp_path)
    for name, lines in texts.items():
        Path(name).write_text(join_lines(lines))
    words = ["--hypotheses", "hyp", "--ref", "one", "--ref", "two"]
    succeed(nmt_eval, *words, "--json", "scores")
    bleu, _ = read_json(Path("scores"))["scores"]
    expected = sacrebleu.corpus_bleu(texts["hyp"], [texts["one"], texts["two"]])
    assert bleu["value"] == expected.score and bleu["signature"].startswith("nrefs:2|")
    assert "test:one#" in bleu["signature"] and "+two#" in bleu["signature"]

    capsys.readouterr()
    Path("two").write_text("only one line\n")
    message = read_refusal(capsys, nmt_eval(words))
    assert "two: has 1 lines, but the first reference 2" in message
