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
import shutil
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from pytest import TempPathFactory, fixture, mark
from support.finished_run import train_toy
from support.once import make_once
from support.rings import amount
from support.toy_corpus import write_splits, write_toy
from support.waiting import HANG_S
from support.warm_process import start_command

IS_SOAK = amount(False, True)
COMMANDS = ("init prepare train sweep average eval report translate score serve export").split()
WIDTHS = (40, 80, 200)
# What a bar needs to be drawn anew; all else that a terminal would obey is a stray character.
MOVES = re.compile(r"\r|\n|\x1b\[A")
BAR = re.compile(r"%\||\d \w+, [\d,.]+/s")

# What is done before `main` of a command that is to be interrupted: its bars move slowly, and if it
# has none it waits to be interrupted.
SLOW = """
import time
from nmt.system.progress import Progress
def advance(self, n=1, *news, **more):
    Progress.usual(self, n, *news, **more)
    time.sleep(0.5)
Progress.usual, Progress.advance = Progress.advance, advance
"""
WAITING = """
import time
from nmt.commands import cli
def wait(work, program):
    return run_command(lambda: print("waiting") or time.sleep(60), program)
run_command, cli.run_command = cli.run_command, wait
"""


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


def run_at_terminal(
    argv: list[str], width: int, folder: Path, interrupt_at: str = "", before: str = ""
) -> tuple[int | None, str]:
    """Run a command under a terminal, after the program `before`, and type Ctrl-C once it has written
    `interrupt_at`. Returns its exit code and all that it wrote.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    os.environ.pop("COLUMNS", None)
    process = start_command(argv, [theirs] * 3, folder, {"TERM": "xterm"}, before)
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + HANG_S
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
                time.sleep(0.1)  # a person does not strike while a bar is being made
                os.write(ours, b"\x03")
                interrupt_at = ""
        process.join(HANG_S)
    finally:
        process.kill()
        process.join()
        os.close(ours)
    return process.exitcode, written.decode()


def check_screen(written: str, width: int) -> list[str]:
    """Return the lines of the screen, after a look that nothing strange is on it."""
    text = re.sub(r"\x1b\[\d*m", "", written).replace(
        "^C", ""
    )  # colour, and the terminal's own echo
    assert "<U+" not in text, text
    stray = [char for char in MOVES.sub("", text) if not char.isprintable()]
    assert stray == [], text
    screen = Screen(width)
    screen.show(text)
    lines = [line.rstrip() for line in screen.lines]  # where a bar was are spaces
    assert screen.column == 0 and lines[screen.row] == "", lines[-3:]
    assert not any(BAR.search(line) for line in lines), lines  # one that was left
    return lines


def list_mistakes() -> Iterator[tuple[str, int]]:
    """Each command, and one of them at every width: all have one parser of arguments."""
    for command in COMMANDS:
        is_wide = IS_SOAK or command == "train"
        yield from ((command, width) for width in (WIDTHS if is_wide else WIDTHS[:1]))


@mark.parametrize("command, width", list_mistakes())
def test_a_mistake_is_one_line(command: str, width: int, tmp_path: Path) -> None:
    code, written = run_at_terminal([command, "--no-such-option"], width, tmp_path)
    lines = check_screen(written, width)
    assert code == 2
    assert lines[0].startswith(f"nmt-{command}: error: ") and lines[1:] == [""]


@mark.parametrize("width", WIDTHS if IS_SOAK else WIDTHS[:1])
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
    if IS_SOAK:
        code, written = run_at_terminal(["eval", str(run)], width, tmp_path, "translating", SLOW)
        check_screen(written, width)
        assert code == 130
    commands = [["eval", str(run)], ["average", str(run), "--last", "1"], ["report", str(run)]]
    for command in amount([], commands):
        code, written = run_at_terminal(command, width, tmp_path)
        check_screen(written, width)
        assert code == 0, written


@fixture(scope="module")
def ground(tmp_path_factory: TempPathFactory) -> Path:
    """A toy, its run, and a grid of one run for a sweep. What `make test` runs needs no run."""

    def make(folder: Path) -> None:
        toy = write_toy(folder)
        write_splits(folder, more=1500)  # nmt-init asks for a thousand
        if IS_SOAK:
            train_toy(toy, "training.checkpoint_every=10", "training.validate_every=10")
        settings = "{training.steps: 4, training.checkpoint_every: 2}"
        grid = f"base: toy.yaml\nsettings: {settings}\naverage: 2\nscore: [dev]\nruns: {{base: {{}}}}\n"
        (folder / "grid.yaml").write_text(grid)

    return make_once(tmp_path_factory, "terminal", make)


def list_arguments(ground: Path, run: Path) -> dict[str, list[str]]:
    """The arguments with which each command comes to its end."""
    src, tgt = f"{ground}/more.en", f"{ground}/more.de"
    config = ["--config", f"{ground}/toy.yaml"]
    return {
        "init": ["--src", src, "--tgt", tgt, "-o", "own.yaml"],
        "prepare": [*config, "data.store=own-store"],
        "train": [*config, "out=own-run", "training.steps=5"],
        "sweep": [f"{ground}/grid.yaml", "--out", "own-sweep"],
        "average": [str(run), "--last", "2"],
        "eval": [str(run)],
        "report": [str(run)],
        "translate": [str(run), "-i", src, "-o", "own.txt"],
        "score": [str(run), "--src", src, "--tgt", tgt, "-o", "own.tsv"],
        "serve": [str(run), "--port", "0"],
        "export": [str(run), "--to", "safetensors", "-o", "own-export"],
    }


IN_MAKE_TEST = "prepare interrupted"
# What each command shows when it is interrupted.
SHOWN = {
    "prepare": "collect",
    "train": "training",
    "sweep": "sweep: ",
    "average": "averaging",
    "eval": "translating",
    "translate": "translating",
    "score": "scoring",
    "serve": "http://",
}


def list_ends() -> Iterator[tuple[str, str, int]]:
    """Each command, how it ends, and the width of the terminal. In `make test` only one, because most take
    seconds.
    """
    for command in COMMANDS:
        for end in ("done", "interrupted", "error"):
            case = f"{command} {end}"
            # a server has no other end than Ctrl-C
            if case == IN_MAKE_TEST or (IS_SOAK and case != "serve done"):
                yield from ((command, end, width) for width in WIDTHS)


@mark.parametrize("command, end, width", list_ends())
def test_every_command_leaves_a_clean_screen(
    command: str, end: str, width: int, ground: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    if IS_SOAK:
        shutil.copytree(ground / "run", run, symlinks=True)
    argv = list_arguments(ground, run)[command]
    interrupt_at, before = "", ""
    if end == "interrupted":
        interrupt_at = SHOWN.get(command, "waiting")
        before = SLOW if command in SHOWN else WAITING
    if end == "error":
        argv = [
            word.replace(str(ground), "/nowhere").replace(str(run), "/nowhere") for word in argv
        ]
    code, written = run_at_terminal([command, *argv], width, tmp_path, interrupt_at, before)
    check_screen(written, width)
    assert code == {"done": 0, "interrupted": 130, "error": 2}[end], written
