"""Standard streams that fail, in processes that import nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = "import os, sys, warnings; from nmt.system.streams import *; secure_standard_streams()\n"


def run_shell(code: str, redirections: str) -> "subprocess.CompletedProcess[str]":
    command = ["bash", "-c", f'exec "$@" {redirections}', "bash", sys.executable, "-c"]
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [*command, START + code], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("state", ["2>&-", "2>/dev/full", "2</dev/null", "2> >(exec true)"])
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
