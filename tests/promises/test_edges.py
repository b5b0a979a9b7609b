"""Standard streams that are closed, full, or whose other side has left, and each command as a shell
starts it.

Messages may be lost, work may not: whatever becomes of standard error, the exit code, standard
output and the results on disk are those of an undisturbed run, and no message is ever on standard
output. Only the reader of standard output may leave quietly. NMT_SOAK=1 tries every command with
every stream in every state.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import write_toy_config, write_toy_corpus
from safetensors.torch import load_file
from soaking import IS_SOAK
from untrained import make_checkpoint, make_vocab

from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.export import main as nmt_export
from nmt.commands.prepare import main as nmt_prepare
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from nmt.system.streams import ReaderLeft

MAINS: dict[str, Callable[[list[str]], int]] = {
    "prepare": nmt_prepare,
    "train": nmt_train,
    "average": nmt_average,
    "eval": nmt_eval,
    "translate": nmt_translate,
    "export": nmt_export,
}
# `stream` is nmt-translate from standard input to standard output, `converse` with --interactive.
CASES = [*MAINS, "stream", "converse"]
DIGESTED = (".npy", ".model", ".txt")
LINES = b"red dog\n\xff\xfe cat\n\nblue cat\n" * 3

soak_only = pytest.mark.skipif(
    not IS_SOAK, reason="NMT_SOAK=1; tests/commands/test_translate.py has a case of it"
)

# What a shell writes behind a command. "broken" and "leaves" are pipes.
STDERR_STATES = {"closed": "2>&-", "full": "2>/dev/full", "read-only": "2</dev/null"}
STDERR_STATES |= {"broken": "", "leaves": ""}
STDOUT_STATES = {"closed": ">&-", "full": ">/dev/full", "broken": ""}
STDIN_STATES = {"closed": "<&-", "ended": "</dev/null", "write-only": "0>/dev/null"}


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: bytes
    results: dict[str, str]  # files and what they hold


@dataclass(frozen=True)
class Bench:
    """A toy corpus, a run of six updates, a checkpoint whose translations differ, and texts."""

    folder: Path
    undisturbed: dict[str, Outcome] = field(default_factory=dict)

    def argv(self, case: str, work: Path) -> list[str]:
        """The arguments of a command whose results go into the folder `work`."""
        config = ["--config", str(self.folder / "toy.yaml")]
        sharp, text = str(self.folder / "sharp"), self.folder / "corpus"
        test = ["--src", str(text / "test.en"), "--ref", str(text / "test.de")]
        return {
            "prepare": [*config, f"data.store={work}/store"],
            "train": [*config, f"out={work}/run"],
            "average": [
                f"{self.folder}/undisturbed-train/run",
                "--last",
                "2",
                "-o",
                f"{work}/average",
            ],
            "eval": [sharp, *test, "--output", f"{work}/out.txt", "--json", f"{work}/json"],
            "translate": [sharp, "-i", str(self.folder / "in"), "-o", f"{work}/out.txt"],
            "export": [sharp, "--to", "safetensors", "-o", f"{work}/export"],
            "stream": [sharp],
            "converse": [sharp, "--interactive"],
        }[case]

    def expect(self, case: str) -> Outcome:
        """What a command does when nothing disturbs it. It runs in this process, once."""
        if case not in self.undisturbed:
            work = self.folder / f"undisturbed-{case}"
            work.mkdir()
            if case in ("stream", "converse"):
                self.expect("translate")
                text = self.folder / "undisturbed-translate" / "out.txt"
                self.undisturbed[case] = Outcome(0, text.read_bytes(), {})
            else:
                data = io.BytesIO()
                stdout = io.TextIOWrapper(data)
                with contextlib.redirect_stdout(stdout):
                    code = MAINS[case](self.argv(case, work))
                stdout.flush()
                self.undisturbed[case] = Outcome(code, untimed(data.getvalue()), results(work))
        return self.undisturbed[case]

    def run(self, case: str, work: Path, stream: str, state: str) -> Outcome:
        """Start a command as a shell does, with one of its streams in some state."""
        work.mkdir()
        name = "translate" if case in ("stream", "converse") else case
        states = {"stdin": STDIN_STATES, "stdout": STDOUT_STATES, "stderr": STDERR_STATES}
        command = [sys.executable, "-m", f"nmt.commands.{name}", *self.argv(case, work)]
        shell = ["bash", "-c", f'exec "$@" {states[stream][state]}', "bash"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop(
            "PYTHONUNBUFFERED", None
        )  # few users have it, and it hides failures at exit
        files = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        read_end, write_end = os.pipe()
        if state in ("broken", "leaves"):
            files[stream] = write_end
        if state == "broken":
            os.close(read_end)
        with open(self.folder / "in", "rb") as text:
            process = subprocess.Popen(
                shell + command,
                stdin=text,
                stdout=files["stdout"],
                stderr=files["stderr"],
                env=environment,
            )
        os.close(write_end)
        if state != "broken":  # a pipe whose reader takes the first message and leaves
            os.read(read_end, 1)
            os.close(read_end)
        stdout, _ = process.communicate(timeout=100)
        return Outcome(process.returncode, untimed(stdout or b""), results(work))


def untimed(report: bytes) -> bytes:
    """What nmt-eval prints, without the seconds that it took."""
    return re.sub(rb"in [\d.]+ s\n", b"\n", report)


def results(folder: Path) -> dict[str, str]:
    """All files below a folder, and digests of those that are the same in any two runs."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = ""
        if path.suffix in DIGESTED:
            found[name] = sha256(path.read_bytes()).hexdigest()
        elif path.suffix == ".safetensors":
            tensors = sorted(load_file(path).items())
            data = b"".join(name.encode() + value.numpy().tobytes() for name, value in tensors)
            found[name] = sha256(data).hexdigest()
    return found


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("edges")
    config = write_toy_config(write_toy_corpus(folder), folder)
    text = config.read_text().replace("  steps: 20", "  steps: 6\n  checkpoint_every: 3")
    config.write_text(text, encoding="utf-8")
    make_checkpoint(folder / "sharp", make_vocab(folder))
    (folder / "in").write_bytes(LINES)
    bench = Bench(folder)
    assert bench.expect("train").code == 0
    return bench


def choose(chosen: list[tuple[str, str]], states: dict[str, str]) -> list[tuple[str, str]]:
    return [(case, state) for case in CASES for state in states] if IS_SOAK else chosen


@pytest.mark.parametrize(
    ("case", "state"),
    choose(
        [
            ("prepare", "broken"),
            ("train", "leaves"),
            ("average", "closed"),
            ("translate", "full"),
        ],
        STDERR_STATES,
    ),
)
def test_no_work_is_lost_with_standard_error(
    case: str, state: str, bench: Bench, tmp_path: Path
) -> None:
    assert bench.run(case, tmp_path / "work", "stderr", state) == bench.expect(case)


@pytest.mark.parametrize("state", STDERR_STATES if IS_SOAK else ["full"])
def test_a_mistake_keeps_its_exit_code(state: str, bench: Bench, tmp_path: Path) -> None:
    for case in MAINS if IS_SOAK else ["prepare"]:
        wrong = Bench(tmp_path / "none")
        wrong.folder.mkdir(exist_ok=True)
        (wrong.folder / "in").write_bytes(LINES)
        outcome = wrong.run(case, tmp_path / case, "stderr", state)
        assert outcome == Outcome(2, b"", {}), case


WRITERS = ("eval", "stream", "converse")
CODES_OF_WRITERS = {"broken": 0, "full": 1}


@soak_only
@pytest.mark.parametrize(("case", "state"), choose([("eval", "broken")], STDOUT_STATES))
def test_only_the_reader_of_standard_output_may_leave(
    case: str, state: str, bench: Bench, tmp_path: Path
) -> None:
    outcome = bench.run(case, tmp_path / "work", "stdout", state)
    code = CODES_OF_WRITERS.get(state, 0) if case in WRITERS else 0
    if state == "closed" and case in ("stream", "converse"):
        code = 2
    assert outcome == Outcome(code, b"", bench.expect(case).results)


class LeftOutput(io.StringIO):
    def write(self, text: str) -> int:
        raise ReaderLeft


def test_an_evaluation_is_kept_where_nobody_reads_it(bench: Bench, tmp_path: Path) -> None:
    with contextlib.redirect_stdout(LeftOutput()):
        assert nmt_eval(bench.argv("eval", tmp_path)) == 0
    assert (tmp_path / "json").exists()
    assert (tmp_path / "out.txt").read_text().count("\n") == 20


READERS = {"stream": {"closed": 2, "write-only": 2}, "converse": {"closed": 2, "write-only": 1}}


@soak_only
@pytest.mark.parametrize(("case", "state"), choose([("stream", "closed")], STDIN_STATES))
def test_standard_input(case: str, state: str, bench: Bench, tmp_path: Path) -> None:
    outcome = bench.run(case, tmp_path / "work", "stdin", state)
    if case in READERS:
        assert outcome == Outcome(READERS[case].get(state, 0), b"", {})
    else:
        assert outcome == bench.expect(case)


def test_a_reader_of_another_output_is_missed(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What leaves here is not the reader of standard output, so the work is undone: a failure."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: os.close(os.open(fifo, os.O_RDONLY)))
    reader.start()
    assert nmt_translate([*bench.argv("translate", tmp_path), "-o", str(fifo)]) == 1
    assert f"failed: {fifo}: cannot be written (Broken pipe)" in capsys.readouterr().err
    reader.join()
