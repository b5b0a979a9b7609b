"""Standard streams that fail, in processes that import nothing else."""

import contextlib
import os
import pty
import subprocess
import sys
import termios
import tty
from pathlib import Path

from pytest import MonkeyPatch, mark
from support.checkout import ROOT
from support.hostile_text import OBEYED, PAYLOADS

START = "import os, sys, warnings; from nmt.system.streams import *; secure_standard_streams()\n"


def run_shell(code: str, redirections: str) -> "subprocess.CompletedProcess[str]":
    command = ["bash", "-c", f'exec "$@" {redirections}', "bash", sys.executable, "-c"]
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run([*command, START + code], env=environment, capture_output=True, text=True)


@mark.parametrize("state", ["2>&-", "2>/dev/full", "2</dev/null", "2> >(exec true)"])
def test_whoever_writes_messages_only_loses_them(state: str) -> None:
    done = run_shell(
        """
import argparse, logging, time
from tqdm import tqdm
from nmt.system.progress import is_terminal, say, track
time.sleep(0.05)
say("a message")
for _ in track(range(3), "reading", "lines"):
    print("a", "b", file=sys.stderr, flush=True)
    warnings.warn("a warning")
    logging.warning("a record")
    list(tqdm([1]))
print("data", is_terminal())
sys.stderr.write("x" * 100_000)
argparse.ArgumentParser().parse_args(["--unknown"])
""",
        state,
    )
    assert (done.returncode, done.stdout) == (2, "data False\n")


def test_the_next_file_gets_no_standard_descriptor(tmp_path: Path) -> None:
    done = run_shell(
        f"""
file = open({str(tmp_path / "file")!r}, "wb")
os.write(2, b"a message of a C library")
child = "import os; [os.fstat(n) for n in range(3)]"
import subprocess
assert subprocess.run([sys.executable, "-c", child]).returncode == 0
sys.exit(file.fileno())
""",
        "<&- >&- 2>&-",
    )
    assert done.returncode > 2 and (tmp_path / "file").read_bytes() == b""


def test_a_reader_that_leaves_is_told_from_another_pipe() -> None:
    code = """
import time
time.sleep(0.05)
try:
    print("data", flush=True)
except ReaderLeft:
    os._exit(3)
"""
    assert run_shell(code, "> >(exec true)").returncode == 3
    other = "r, w = os.pipe(); os.close(r)\ntry: os.write(w, b'x')\n"
    other += "except BrokenPipeError as error: sys.exit(isinstance(error, ReaderLeft))"
    assert run_shell(other, "").returncode == 0


def test_a_failure_of_standard_output_does_not_fail_again_at_exit() -> None:
    code = "try: print('data', flush=True)\nexcept OSError as error: sys.exit(error.errno)"
    done = run_shell(code, ">/dev/full")
    assert (done.returncode, done.stderr) == (28, "")


def test_streams_keep_their_ways() -> None:
    code = "print(sys.stdout.name, sys.stdout.encoding, sys.stderr.errors, sys.stdout.fileno())"
    done = run_shell(code, "")
    assert done.stdout == "<stdout> utf-8 backslashreplace 1\n"


def run_at_terminal(code: str) -> str:
    """Return what a terminal gets that is both outputs of a process."""
    terminal, end = pty.openpty()
    tty.setraw(end)  # it adds nothing of its own
    termios.tcsetwinsize(end, (24, 100))
    try:
        command = [sys.executable, "-c", START + code]
        with subprocess.Popen(command, stdout=end, stderr=end, cwd=ROOT) as process:
            os.close(end)
            shown = b""
            with contextlib.suppress(OSError):  # EIO: the process has closed its end
                while data := os.read(terminal, 1 << 16):
                    shown += data
        assert process.returncode == 0, shown
        return shown.decode()
    finally:
        os.close(terminal)


def test_a_terminal_is_shown_what_it_would_obey() -> None:
    """Whoever writes to either output, in whatever pieces."""
    shown = run_at_terminal(f"""
import logging, traceback
from nmt.system.progress import say, track
for text in {PAYLOADS}:
    print(text)
    for i in range(len(text.encode())):
        sys.stdout.buffer.write(text.encode()[i : i + 1])
        sys.stdout.buffer.flush()
    print("and", text, file=sys.stderr)
    say(text)
    warnings.warn(text)
    logging.warning(text)
    try:
        raise ValueError(text)
    except ValueError:
        traceback.print_exc()
""")
    assert OBEYED.isdisjoint(shown)
    assert shown.count("<U+001B>[31mred") == 7


def test_only_a_terminal_gets_colour_unless_the_user_wants_none(
    monkeypatch: MonkeyPatch,
) -> None:
    code = "print('an error: no', ' warning: BLEU 0.123', sep='\\n', file=sys.stderr); print('BLEU   2.34')"
    plain = "an error: no\n warning: BLEU 0.123\nBLEU   2.34\n"
    monkeypatch.setenv("TERM", "xterm")
    coloured = plain.replace(" warning", "\x1b[33m warning\x1b[0m")
    assert run_at_terminal(code) == coloured.replace("BLEU   2.34", "\x1b[1mBLEU   2.34\x1b[0m")
    assert run_shell(code, "2>&1").stdout == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert run_at_terminal(code) == plain


def test_progress_bars_still_move() -> None:
    shown = run_at_terminal("""
from nmt.system.progress import track
for _ in track(range(3), "read\\x1b[31ming\\rX", "lines"):
    pass
""")
    assert "\rread<U+001B>[31ming<U+000D>X: 0 lines" in shown and shown.endswith("\r")


def test_files_and_pipes_get_every_byte(tmp_path: Path) -> None:
    file = tmp_path / "file"
    done = run_shell(f"for text in {PAYLOADS}: sys.stdout.buffer.write(text.encode())", f"> {file}")
    assert (done.returncode, file.read_bytes()) == (0, "".join(PAYLOADS).encode())
