"""Each command with each standard stream in each state: closed, full, a device of another kind, a
pipe whose other side has left.

Messages may be lost, work may not: whatever becomes of standard error, the exit code, standard
output and the results on disk are those of an undisturbed run, and no message is ever on standard
output. Only the reader of standard output may leave quietly. What the command is given and
the folder that it runs in stay as they are.

One stream is disturbed at a time, because each is treated by code of its own (system/streams.py);
all three together are tried for one state. test_streams.py has terminals, test_places.py disks and
homes, and test_commands_and_damage.py what else may have the name of a file. `make test` tries some cases,
`make soak` tries all.
"""

import contextlib
import io
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest import fixture, mark
from support.capture import Capture, read_stderr
from support.toy_commands import CASES, NOTHING, Bench, Outcome, make_bench

from nmt.commands.eval import main as nmt_eval
from nmt.commands.translate import main as nmt_translate
from nmt.system.streams import ReaderLeft

# How a shell makes the state; "broken" is a pipe whose reader has left.
STDERR_STATES = {
    "closed": "2>&-",
    "full": "2>/dev/full",
    "read-only": "2</dev/null",
    "broken": "",
    "leaves": "2> >(head -c 1 >/dev/null)",
}
STDOUT_STATES = {"closed": ">&-", "full": ">/dev/full", "broken": ""}
STDIN_STATES = {"closed": "<&-", "ended": "</dev/null", "write-only": "0>/dev/null"}


def list_cases(states: dict[str, str], *usual: tuple[str, str]) -> Iterator[Any]:
    """Every command with every state; all but the usual ones are for the soak."""
    for pair in itertools.product(CASES, states):
        yield pair if pair in usual else pytest.param(*pair, marks=mark.soak)


@fixture(scope="module")
def bench(module_path: Path) -> Bench:
    return make_bench(module_path)


@fixture
def broken_pipe() -> Iterator[int]:
    read_end, write_end = os.pipe()
    os.close(read_end)
    yield write_end
    os.close(write_end)


@mark.parametrize(
    "case, state",
    list_cases(STDERR_STATES, ("average", "closed"), ("translate", "broken")),
)
def test_no_work_is_lost_with_standard_error(
    case: str, state: str, bench: Bench, tmp_path: Path, broken_pipe: int
) -> None:
    streams = {"stderr": broken_pipe}
    outcome = bench.start(case, tmp_path / "work", STDERR_STATES[state], streams)
    assert outcome == bench.expect(case)


@mark.parametrize("case, state", list_cases(STDERR_STATES, ("prepare", "full")))
def test_a_mistake_keeps_its_exit_code(
    case: str, state: str, tmp_path: Path, broken_pipe: int
) -> None:
    wrong = Bench(tmp_path / "none", {case: NOTHING})
    wrong.folder.mkdir()
    (wrong.folder / "in").touch()
    streams = {"stderr": broken_pipe}
    assert wrong.start(case, tmp_path / "work", STDERR_STATES[state], streams) == NOTHING


WRITERS = ("eval", "stream", "converse", "inspect")


@mark.parametrize("case, state", list_cases(STDOUT_STATES))
def test_only_the_reader_of_standard_output_may_leave(
    case: str, state: str, bench: Bench, tmp_path: Path, broken_pipe: int
) -> None:
    code = 0
    if state == "full" and case in WRITERS:
        code = 1
    if state == "closed" and case in ("stream", "converse"):
        code = 2  # there is nowhere to write to
    streams = {"stdout": broken_pipe}
    outcome = bench.start(case, tmp_path / "work", STDOUT_STATES[state], streams)
    assert outcome == Outcome(code, b"", bench.expect(case).results)


class LeftOutput(io.StringIO):
    def write(self, text: str) -> int:
        raise ReaderLeft


def test_an_evaluation_is_kept_where_nobody_reads_it(bench: Bench, tmp_path: Path) -> None:
    with contextlib.redirect_stdout(LeftOutput()):
        assert nmt_eval(bench.argv("eval", tmp_path)) == 0
    assert (tmp_path / "json").exists()
    assert (tmp_path / "out.txt").read_text().count("\n") == 20


CODES_OF_READERS = {"closed": 2, "ended": 0, "write-only": 2}


@mark.parametrize("case, state", list_cases(STDIN_STATES))
def test_standard_input(case: str, state: str, bench: Bench, tmp_path: Path) -> None:
    outcome = bench.start(case, tmp_path / "work", STDIN_STATES[state])
    if case in ("stream", "converse"):
        assert outcome == Outcome(CODES_OF_READERS[state], b"", {})
    else:
        assert outcome == bench.expect(case)


@mark.soak
@mark.parametrize("case", CASES)
def test_all_streams_closed(case: str, bench: Bench, tmp_path: Path) -> None:
    outcome = bench.start(case, tmp_path / "work", "<&- >&- 2>&-")
    code = 2 if case in ("stream", "converse") else 0
    assert outcome == Outcome(code, b"", bench.expect(case).results)


def test_a_reader_of_another_output_is_missed(
    bench: Bench, tmp_path: Path, capsys: Capture
) -> None:
    """What leaves here is not the reader of standard output, so the work is undone: a failure."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: os.close(os.open(fifo, os.O_RDONLY)))
    reader.start()
    assert (
        nmt_translate(
            [str(bench.folder / "sharp"), "-i", str(bench.folder / "in"), "-o", str(fifo)]
        )
        == 1
    )
    assert f"failed: {fifo}: cannot be written (Broken pipe)" in read_stderr(capsys)
    reader.join()
