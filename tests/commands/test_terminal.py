"""What a person sees at a terminal: nothing but text, a bar that is gone at the end, and the prompt at
the start of a line.

Each command runs under a pseudo-terminal of some width. A terminal of a few lines reads what comes, so
that a stray character, a bar that was left or a line that was not ended would be on its screen.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from support.soaking import IS_SOAK, counted

COMMANDS = (
    "init prepare train sweep track average eval report translate score serve export completion"
).split()
WIDTHS = (40, 80, 200)
# What a bar needs to be drawn anew; all else that a terminal would obey is a stray character.
MOVES = re.compile(r"\r|\n|\x1b\[A")
WAIT_S = 60.0


class Screen:
    """The lines that a terminal of some width shows."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines = [""]
        self.row = self.column = 0

    def show(self, text: str) -> None:
        for part in re.split(f"({MOVES.pattern})", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\x1b[A":
                self.row = max(0, self.row - 1)
            else:
                self._write(part)

    def _write(self, text: str) -> None:
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)


def take_terminal() -> None:
    """Make standard input the terminal of a new session, so that Ctrl-C becomes a signal."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def run_at_terminal(
    argv: list[str], width: int, folder: Path, interrupt_at: str = ""
) -> tuple[int, str]:
    """Run a command under a terminal, and type Ctrl-C once it has written `interrupt_at`. Returns its
    exit code and all that it wrote.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    program = f"import sys; from nmt.commands.{argv[0]} import main; sys.exit(main())"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *argv[1:]],
        cwd=folder,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + WAIT_S
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    data = os.read(ours, 1 << 16)
                except OSError:  # the other side is closed
                    break
                if not data:
                    break
                written += data
            if interrupt_at and interrupt_at.encode() in written:
                os.write(ours, b"\x03")
                interrupt_at = ""
        code = process.wait(WAIT_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(ours)
    return code, written.decode()


def check_screen(written: str, width: int) -> list[str]:
    """Return the lines of the screen, after a look that nothing strange is on it."""
    text = written.replace("^C", "")  # the terminal's own echo
    assert "<U+" not in text, text
    stray = [char for char in MOVES.sub("", text) if not char.isprintable()]
    assert stray == [], text
    screen = Screen(width)
    screen.show(text)
    assert screen.column == 0 and screen.lines[screen.row] == "", screen.lines[-3:]
    assert not any("%|" in line for line in screen.lines), screen.lines  # a bar that was left
    return screen.lines


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_one_line(command: str, width: int, tmp_path: Path) -> None:
    code, written = run_at_terminal([command, "--no-such-option"], width, tmp_path)
    lines = check_screen(written, width)
    assert code == 2
    assert lines[0].startswith(f"nmt-{command}: error: ") and lines[1:] == [""]


@pytest.mark.parametrize("width", WIDTHS if IS_SOAK else WIDTHS[:1])
def test_a_run_is_trained_interrupted_continued_and_scored(
    width: int, toy: Path, tmp_path: Path
) -> None:
    train = ["train", "--config", str(toy), "training.steps=4000", "training.validate_every=5"]
    code, written = run_at_terminal(train, width, tmp_path, "dev NLL")
    check_screen(written, width)
    assert code == 130
    code, written = run_at_terminal([*train, "training.steps=40"], width, tmp_path)
    lines = check_screen(written, width)
    assert code == 0 and any("done: " in line for line in lines)
    run = next(path.parent for path in tmp_path.rglob("checkpoints"))
    commands = [["eval", str(run)], ["average", str(run), "--last", "1"], ["report", str(run)]]
    for command in counted(commands[:1], commands):
        code, written = run_at_terminal(command, width, tmp_path)
        check_screen(written, width)
        assert code == 0, written
