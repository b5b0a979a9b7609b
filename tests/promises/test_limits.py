"""What the system refuses: memory, file handles, a standard input to read from. Each is one line, and
nothing is taken for damaged because of it.
"""

import errno
import gzip
import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest import MonkeyPatch, mark, raises
from support.capture import Capture, read_errors
from support.ground import Ground
from support.in_process import succeed
from support.untrained import make_checkpoint

from nmt.commands.cli import run_command
from nmt.commands.prepare import main as nmt_prepare
from nmt.commands.translate import main as nmt_translate
from nmt.data.store import open_store
from nmt.data.vocab import Vocab
from nmt.system.errors import Failure


@contextmanager
def limit(kind: int, amount: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_line_that_does_not_fit_into_memory(
    ground: Ground, tmp_path: Path, capsys: Capture
) -> None:
    with gzip.open(tmp_path / "long.en.gz", "wb", 1) as file:
        file.write(b"red dog\n")
        for _ in range(300):
            file.write(b"a" * (1 << 20))
    train = f"data.train=[{{src: {tmp_path}/long.en.gz, tgt: train.de}}]"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limit(resource.RLIMIT_AS, used + (150 << 20)):
        assert (
            nmt_prepare(["--config", str(ground.config), f"data.store={tmp_path}/store", train])
            == 2
        )
    line = read_errors(capsys)[-1]
    assert f"{tmp_path}/long.en.gz: line 2 does not fit into memory" in line
    assert {path.name for path in (tmp_path / "store").glob("*")} <= {".nmt-prepare"}


def test_a_store_is_not_damaged_where_files_cannot_be_opened(ground: Ground) -> None:
    succeed(nmt_prepare, "--config", ground.config)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest)]  # no gaps below
    try:
        with limit(resource.RLIMIT_NOFILE, max(spare) + 1), raises(Failure) as caught:
            open_store(ground.folder / "store", "train")
    finally:
        for handle in spare:
            os.close(handle)
    assert "cannot be opened, because too many files are open; raise the limit" in str(caught.value)


@mark.parametrize(
    "error, line",
    [
        (OSError(errno.EMFILE, "x"), "too many files are open; raise the limit, for example"),
        (OSError(errno.EIO, "Input/output error", "a/b"), "a/b: Input/output error"),
    ],
)
def test_what_the_system_refuses_is_one_line(error: Exception, line: str, capsys: Capture) -> None:
    def work() -> int:
        raise error

    assert run_command(work, "nmt-x") == 1
    (told,) = read_errors(capsys)
    assert line in told


def test_an_error_that_nobody_foresaw_keeps_its_traceback() -> None:
    with raises(FileNotFoundError):
        run_command(lambda: len(os.listdir("nowhere")), "nmt-x")


def test_a_prompt_needs_an_input_that_can_be_read(
    vocab: Vocab,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    model = make_checkpoint(tmp_path / "model", vocab)
    with open(os.open(os.devnull, os.O_WRONLY), "rb") as write_only:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(write_only))
        assert nmt_translate([str(model), "--interactive"]) == 2
    last = read_errors(capsys)[-1]
    assert "error: standard input cannot be read (Bad file descriptor); redirect it" in last
