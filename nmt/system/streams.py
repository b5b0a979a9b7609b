"""Standard input, output and error of a process, made safe before its work begins.

Messages may be lost, work may not: a standard error that is closed, full, or whose reader has left
loses what is written to it and raises nothing, whether the writer is this library, tqdm, argparse,
warnings or logging. A standard output whose reader has left raises `ReaderLeft`, which no other
pipe or socket does. Descriptors 0, 1 and 2 are always open: otherwise the next file to be opened,
perhaps a checkpoint, would get one of them and the messages of C libraries inside it.

What a terminal would obey, such as an escape sequence in the name of a stranger's corpus, is
written out: in messages always, so that a log is safe to read too, and in standard output only if
that is a terminal. A file or a pipe gets every byte as it is. Only a terminal gets colour.
"""

import codecs
import io
import os
import re
import select
import sys
from typing import TYPE_CHECKING

from nmt.system.escapes import escape_lines

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDIN, STDOUT, STDERR = 0, 1, 2
# How a progress bar begins its line anew, or moves to that of another bar.
BAR_MOVE = re.compile(r"\r|\n*(\x1b\[A)+")
WARNING = re.compile(r"^ *(nmt-\w+: )?(warning|error|failed)(?=: )", re.MULTILINE)
SCORE = re.compile(r"\bBLEU +\d+\.\d\d\b")


def colour(text: str) -> str:
    """Return what a terminal is shown: warnings in yellow and scores in bold, unless the user wants neither."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return SCORE.sub("\x1b[1m\\g<0>\x1b[0m", WARNING.sub("\x1b[33m\\g<0>\x1b[0m", text))


class ReaderLeft(BrokenPipeError):
    """The reader of standard output has left, as `| head` does."""


class _LossyOutput(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: "ReadableBuffer", /) -> int:
        size = memoryview(data).nbytes
        try:
            n_written: int | None = super().write(data)
        except OSError:
            return size
        # None: the other side is slow, and the descriptor was set not to wait for it.
        return size if n_written is None else n_written


class _MessageStream(io.TextIOWrapper):
    """Writes out what a terminal would obey, but for the moves of progress bars."""

    def write(self, text: str, /) -> int:
        move = BAR_MOVE.match(text)
        start = move.end() if move else 0
        shown = escape_lines(text[start:])
        super().write(text[:start] + (colour(shown) if self.isatty() else shown))
        return len(text)


class _DataOutput(io.FileIO):
    """Fails once, and distinguishes a reader that has left from every other broken pipe."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return self._write(data)
        except OSError as error:
            # What buffers still hold must not fail again at exit, which would hide the exit code.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise ReaderLeft(error.errno, error.strerror) from None
            raise

    def _write(self, data: "ReadableBuffer") -> int:
        while True:
            n_written: int | None = super().write(data)
            if n_written is not None:
                return n_written
            # set not to wait, by another program that shares the pipe or the terminal
            select.select([], [self], [])


class _TerminalOutput(_DataOutput):
    """Writes out what the terminal would obey.

    A translation may hold anything that a stranger's model has learned. So a terminal is shown it
    as `ls` shows names, not as `cat` shows a file: to get the bytes, redirect them.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        # A character may be cut by the end of the buffer.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _write(self, data: "ReadableBuffer") -> int:
        left = memoryview(colour(escape_lines(self._decoder.decode(bytes(data)))).encode())
        while left:
            left = left[super()._write(left) :]
        return memoryview(data).nbytes


def secure_standard_streams() -> None:
    """Make the standard streams of this process safe, before anything is opened or written.

    Streams that were replaced are left unchanged. A standard output that was closed from the start
    stays None, so that a command that needs it can say so.
    """
    _reserve_descriptors()
    if sys.stderr is None:  # closed from the start
        sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    elif sys.stderr is sys.__stderr__:
        messages = _LossyOutput(STDERR, "wb", closefd=False)
        sys.stderr = _rebuild_stream(_MessageStream, sys.__stderr__, messages)
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        if os.isatty(STDOUT):
            data: _DataOutput = _TerminalOutput(STDOUT)
        else:
            data = _DataOutput(STDOUT, "wb", closefd=False)
        sys.stdout = _rebuild_stream(io.TextIOWrapper, sys.__stdout__, data)
    os.environ["PYTHON_COLORS"] = "0"  # tracebacks and --help of newer Pythons
    # numba would reset the colours of the terminal at exit, which a message stream writes out
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"


def _reserve_descriptors() -> None:
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is given, which is this one; child processes need it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _rebuild_stream(
    kind: type[io.TextIOWrapper], stream: io.TextIOWrapper, raw: io.FileIO
) -> io.TextIOWrapper:
    """Return a stream like `stream` that writes to `raw`."""
    raw.name = stream.name  # messages call it "<stdout>"
    return kind(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        # PYTHONUNBUFFERED asks to write through, which a buffer cannot; lines come at once.
        line_buffering=stream.line_buffering or stream.write_through,
    )
