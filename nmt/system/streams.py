"""Standard input, output and error of a process, made safe before its work begins.

Messages may be lost, work may not: a standard error that is closed, full, or whose reader has left
loses what is written to it and raises nothing, whoever writes: this library, tqdm, argparse,
warnings, logging. A standard output whose reader has left raises `ReaderLeft`, which no other
pipe or socket does. And descriptors 0, 1 and 2 are always open: otherwise the next file to be
opened, perhaps a checkpoint, would get one of them and the messages of C libraries inside it.
"""

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDIN, STDOUT, STDERR = 0, 1, 2


class ReaderLeft(BrokenPipeError):
    """The reader of standard output has left, as `| head` does."""


class _LossyOutput(io.FileIO):
    """Loses what cannot be written."""

    def write(self, data: "ReadableBuffer", /) -> int:
        size = memoryview(data).nbytes
        try:
            n_written: int | None = super().write(data)
        except OSError:
            return size
        # None: the other side is slow, and the descriptor was set not to wait for it.
        return size if n_written is None else n_written


class _DataOutput(io.FileIO):
    """Fails once, and tells a reader that has left from every other broken pipe."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # What buffers still hold must not fail again at exit, which would hide the exit code.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise ReaderLeft(error.errno, error.strerror) from None
            raise


def secure_standard_streams() -> None:
    """Make the standard streams of this process safe, before anything is opened or written.

    Streams that somebody has replaced stay as they are. A standard output that was closed from the
    start stays None, so that a command that needs it can say so.
    """
    _reserve_descriptors()
    if sys.stderr is None:  # closed from the start
        sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    elif sys.stderr is sys.__stderr__:
        sys.stderr = _rebuild_stream(sys.__stderr__, _LossyOutput(STDERR, "wb", closefd=False))
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout = _rebuild_stream(sys.__stdout__, _DataOutput(STDOUT, "wb", closefd=False))


def _reserve_descriptors() -> None:
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is given, which is this one; child processes need it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _rebuild_stream(stream: io.TextIOWrapper, raw: io.FileIO) -> io.TextIOWrapper:
    """Return a stream like `stream` that writes to `raw`."""
    raw.name = stream.name  # messages call it "<stdout>"
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        # PYTHONUNBUFFERED asks to write through, which a buffer cannot; lines come at once.
        line_buffering=stream.line_buffering or stream.write_through,
    )
