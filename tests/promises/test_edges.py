"""Each command with each standard stream in each state: closed, full, a device of another kind, a
pipe whose other side has left, a terminal that is one column wide.

Messages may be lost, work may not: whatever becomes of standard error, the exit code, standard
output and the results on disk are those of an undisturbed run, and no message is ever on standard
output. Only the reader of standard output may leave quietly. What the command is given and
the folder that it runs in stay as they are.

One stream is disturbed at a time, because each is treated by code of its own (system/streams.py);
all three together are tried for one state. test_places.py has disks and homes, and
test_damaged.py what else may have the name of a file. `make test` starts some cases as a
shell does, NMT_SOAK=1 tries all in forks.
"""

import contextlib
import io
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.shell_process import STREAMS
from support.soaking import IS_SOAK
from support.toy_commands import CASES, NOTHING, Bench, Outcome, make_bench

from nmt.commands.eval import main as nmt_eval
from nmt.commands.translate import main as nmt_translate
from nmt.system.streams import ReaderLeft

STDERR_STATES = ("closed", "full", "read-only", "broken", "leaves", "terminal")
STDOUT_STATES = ("closed", "full", "broken", "terminal")
STDIN_STATES = ("closed", "ended", "write-only", "terminal")


def list_in_soak(states: Sequence[str]) -> list[Any]:
    """List every command with every state, in `make test` one test that is skipped."""
    if IS_SOAK:
        return list(itertools.product(CASES, states))
    skipped = pytest.mark.skip(reason="NMT_SOAK=1 tries all commands and states")
    return [pytest.param("", "", marks=skipped)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("edges"))


@pytest.mark.parametrize(
    ("case", "redirection"),
    [("train", ""), ("average", "2>&-"), ("translate", "2>/dev/full")],
)
def test_a_shell_loses_no_work_with_standard_error(
    case: str, redirection: str, bench: Bench, tmp_path: Path
) -> None:
    read_end, broken_pipe = os.pipe()
    os.close(read_end)
    outcome = bench.start(case, tmp_path / "work", redirection, stderr=broken_pipe)
    os.close(broken_pipe)
    assert outcome == bench.expect(case)


def test_a_mistake_keeps_its_exit_code_in_a_shell(tmp_path: Path) -> None:
    wrong = Bench(tmp_path / "none", {"prepare": NOTHING})
    wrong.folder.mkdir()
    (wrong.folder / "in").touch()
    assert wrong.start("prepare", tmp_path / "work", "2>/dev/full") == NOTHING


@pytest.mark.parametrize(("case", "state"), list_in_soak(STDERR_STATES))
def test_no_work_is_lost_with_standard_error(
    case: str, state: str, bench: Bench, tmp_path: Path
) -> None:
    assert bench.run(case, tmp_path / "work", {"stderr": state}) == bench.expect(case)


@pytest.mark.parametrize(("case", "state"), list_in_soak(STDERR_STATES))
def test_a_mistake_keeps_its_exit_code(case: str, state: str, tmp_path: Path) -> None:
    wrong = Bench(tmp_path / "none", {case: NOTHING})
    wrong.folder.mkdir()
    assert wrong.run(case, tmp_path / "work", {"stderr": state}) == NOTHING


WRITERS = ("eval", "stream", "converse", "inspect")


def expect_of_stdout(state: str, case: str, undisturbed: Outcome) -> Outcome:
    if state == "terminal":
        return undisturbed
    code = 0
    if state == "full" and case in WRITERS:
        code = 1
    if state == "closed" and case in ("stream", "converse"):
        code = 2  # there is nowhere to write to
    return Outcome(code, b"", undisturbed.results)


@pytest.mark.parametrize(("case", "state"), list_in_soak(STDOUT_STATES))
def test_only_the_reader_of_standard_output_may_leave(
    case: str, state: str, bench: Bench, tmp_path: Path
) -> None:
    outcome = bench.run(case, tmp_path / "work", {"stdout": state})
    expected = expect_of_stdout(state, case, bench.expect(case))
    if case == "inspect" and state == "terminal":  # as wide as the terminal
        assert outcome.code == 0 and outcome.stdout
    else:
        assert outcome == expected


class LeftOutput(io.StringIO):
    def write(self, text: str) -> int:
        raise ReaderLeft


def test_an_evaluation_is_kept_where_nobody_reads_it(bench: Bench, tmp_path: Path) -> None:
    with contextlib.redirect_stdout(LeftOutput()):
        assert nmt_eval(bench.argv("eval", tmp_path)) == 0
    assert (tmp_path / "json").exists()
    assert (tmp_path / "out.txt").read_text().count("\n") == 20


CODES_OF_READERS = {
    "stream": {"closed": 2, "ended": 0, "write-only": 2},
    "converse": {"closed": 2, "ended": 0, "write-only": 2},
}


@pytest.mark.parametrize(("case", "state"), list_in_soak(STDIN_STATES))
def test_standard_input(case: str, state: str, bench: Bench, tmp_path: Path) -> None:
    outcome = bench.run(case, tmp_path / "work", {"stdin": state})
    if case in CODES_OF_READERS and state != "terminal":
        assert outcome == Outcome(CODES_OF_READERS[case][state], b"", {})
    else:
        assert outcome == bench.expect(case)


@pytest.mark.parametrize(("case", "state"), list_in_soak(("closed",)))
def test_all_streams_at_once(case: str, state: str, bench: Bench, tmp_path: Path) -> None:
    outcome = bench.run(case, tmp_path / "work", dict.fromkeys(STREAMS, state))
    code = 2 if case in CODES_OF_READERS else 0
    assert outcome == Outcome(code, b"", bench.expect(case).results)


def test_a_reader_of_another_output_is_missed(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert f"failed: {fifo}: cannot be written (Broken pipe)" in capsys.readouterr().err
    reader.join()
