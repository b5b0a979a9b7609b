"""nmt-serve as a user meets it: its options, a process that answers, and signals."""

import http.client
import json
import os
import shutil
import signal
from pathlib import Path

from pytest import MonkeyPatch, fixture, importorskip, mark, raises
from support.capture import Capture, read_stderr
from support.in_process import refuse
from support.rings import amount
from support.serve_process import start_server
from support.untrained import make_checkpoint, make_vocab
from support.warm_process import finish

from nmt.commands.serve import main, parse_arguments
from nmt.extras.serve.start import read_keys
from nmt.system.errors import UserError

for package in ("fastapi", "uvicorn", "python_multipart"):
    importorskip(package, reason=f"{package} is not installed; pip install '.[serve]'")


OFF = "decoding.compile=off"  # compiling would take longer than all else


@fixture(scope="module", name="checkpoint")
def make_one(module_path: Path) -> Path:
    folder = module_path
    return make_checkpoint(folder / "average", make_vocab(folder))


# uvicorn heeds SIGTERM, nmt.extras.serve the two others, both alike
@mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, *amount([], [signal.SIGUSR1])])
def test_a_process_answers_until_a_signal_ends_it(
    number: signal.Signals, checkpoint: Path, tmp_path: Path
) -> None:
    with start_server(tmp_path, str(checkpoint), OFF) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = json.dumps({"q": "red dog", "source": "en", "target": "de"})
        connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
        assert list(json.loads(connection.getresponse().read())) == ["translatedText"]
        assert finish(process, number) == 0
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@mark.parametrize(
    "options, words",
    [
        (["decoding.beam=2"], "no checkpoint is given"),
        (["a", "model.d_model=2"], "model.d_model=2: was fixed by training"),
        (["a", "--port", "65536"], "'65536' is not a port"),
        (["a", "--timeout", "0"], "0: give a number of at least 1"),
    ],
)
def test_bad_options(options: list[str], words: str, capsys: Capture) -> None:
    with raises(SystemExit) as exit:
        parse_arguments(options)
    assert exit.value.code == 2
    assert words in read_stderr(capsys)


def test_two_models_of_one_direction(checkpoint: Path, capsys: Capture) -> None:
    other = checkpoint.with_name("other")
    shutil.copytree(checkpoint, other)
    line = refuse(capsys, main, checkpoint, other, OFF, "--port", "0")
    assert f"{checkpoint} and {other} both translate en to de; give one" in line


def test_a_model_has_no_name(checkpoint: Path, capsys: Capture) -> None:
    assert main([f"small={checkpoint}", OFF, "--port", "0"]) == 2
    told = read_stderr(capsys)
    assert f"small={checkpoint}: not found; give RUN, RUN/average or" in told
    assert "a setting is decoding.key=value" in told


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("NMT_API_KEYS", "a, b")
    file = tmp_path / "keys"
    file.write_text("c\n\n d \n")
    assert read_keys(str(file)) == {"a", "b", "c", "d"}
    assert read_keys(None) == {"a", "b"}
    for empty in ("", ",", " , "):
        monkeypatch.setenv("NMT_API_KEYS", empty)
        with raises(UserError, match="NMT_API_KEYS: is set, but has no key"):
            read_keys(None)
    monkeypatch.delenv("NMT_API_KEYS")
    file.write_text("\n")
    with raises(UserError, match="has no key"):
        read_keys(str(file))
    with raises(UserError, match="cannot be read"):
        read_keys(str(tmp_path / "missing"))
    assert read_keys(None) == frozenset()
    assert "NMT_API_KEYS" not in os.environ
