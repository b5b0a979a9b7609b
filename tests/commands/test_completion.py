"""Completion in real shells: lines are typed in a terminal, each with a TAB at its end, and the shell
hands what they have become to stand-ins for the commands.
"""

import os
import pty
import select
import shutil
import signal
import time
from pathlib import Path

import pytest
from support.needs import needs_package

from nmt.commands.completion import SHELLS, main

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
# Each command shows the words that it was given.
STAND_INS = {
    "bash": 'nmt-train() { printf \'<%s>\' "$@"; echo END; }; nmt-translate() { nmt-train "$@"; }',
    "zsh": "autoload -Uz compinit; compinit -u -D; "
    'nmt-train() { printf \'<%s>\' "$@"; echo END }; nmt-translate() { nmt-train "$@" }',
    "fish": "function nmt-train; printf '<%s>' $argv; echo END; end; "
    "function nmt-translate; nmt-train $argv; end",
}
# As documented, but that the text is in a file.
LOAD = {"bash": "source FILE", "zsh": 'eval "$(cat FILE)"', "fish": "cat FILE | source"}

LINES = [
    ("nmt-train --expl", "<--explain>"),
    ("nmt-train --config demo.y", "<--config><demo.yaml>"),
    ("nmt-train --config my-", "<--config><my-own.yaml>"),
    ("nmt-train --config demo.yaml training.validate_e", "<training.validate_every=>"),
    ("nmt-train --config demo.yaml seed=2 model.d_f", "<seed=2><model.d_ff=>"),
    ("nmt-translate folder-of-r", "<folder-of-runs>"),
    ("nmt-translate RUN decoding.long", "<decoding.long_lines=>"),
    ("nmt-translate RUN --long-lines ref", "<--long-lines><refuse>"),
    ("nmt-translate RUN -i my-", "<-i><my-own.yaml>"),
]


def read_until(terminal: int, mark: str) -> str:
    shown = ""
    while mark not in shown:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, f"no {mark!r} in {shown!r}"
        shown += os.read(terminal, 1 << 16).decode(errors="replace")
    return shown


def press_tab(terminal: int, line: str, pause: float) -> str:
    """Type a line, TAB and RETURN; return the words that the command was given.

    A shell takes a TAB for a pasted one if it is not yet reading, or if more is there already.
    """
    time.sleep(pause)
    os.write(terminal, f" {line}\t".encode())
    time.sleep(pause)
    os.write(terminal, b"\n")
    shown = read_until(terminal, "END\r").rpartition("END\r")[0]
    words = shown.rpartition("\n")[2]
    return words[words.find("<") :].replace("/>", ">")  # zsh takes the slash of a folder back


@needs_package("shtab", "completion")
@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main([shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    load = LOAD[shell].replace("FILE", "./script")
    (tmp_path / "rc").write_text(f"{STAND_INS[shell]}\n{load}\necho 'LOADE''D'\n")
    (tmp_path / "my-own.yaml").touch()
    (tmp_path / "folder-of-runs").mkdir()

    # a child with a terminal of its own, because fish wants to control it
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb"}
        os.execvpe(START[shell][0], START[shell], environment)
    try:
        os.write(terminal, b" source ./rc\n")
        read_until(terminal, "LOADED")
        for line, expected in LINES:
            for pause in (0.05, 0.5, 2):  # longer on a busy machine
                words = press_tab(terminal, line, pause)
                if words.endswith(expected):
                    break
            assert words.endswith(expected), line
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
