"""A command as a shell starts it, with its standard streams in some state, in a tenth of a second.

A start costs seconds because torch is imported. These are forks of a server that has imported it
and computed nothing, and their streams are made as the interpreter makes them: None where a
descriptor is closed. What a stream fails to write at the end gives exit code 120, as in Python.
"""

import fcntl
import importlib
import io
import multiprocessing
import os
import struct
import sys
import termios
import threading
import tty
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

CONTEXT = multiprocessing.get_context("forkserver")
COMMANDS = ("prepare", "train", "average", "eval", "translate", "export")
PRELOADED = ("nmt.api", "nmt.train.run_start", "nmt.export.safetensors", "nmt.evaluate.evaluation")
STREAMS = ("stdin", "stdout", "stderr")
WAIT_S = 100
CTRL_D = b"\x04"

# The states of a stream: closed; a device; or a pipe whose other side has left, or leaves once it
# has got something; or a terminal that is one column wide.
DEVICES = {"full": "/dev/full", "ended": "/dev/null", "read-only": "/dev/null"}
DEVICES["write-only"] = "/dev/null"
IS_WRITABLE = {"ended": False, "read-only": False, "write-only": True, "full": True}


@dataclass(frozen=True)
class ShellProcess:
    command: str
    argv: list[str]
    folder: Path  # of its own: `stdin` is read, `stdout` and `stderr` are written
    states: dict[str, str] = field(default_factory=dict)  # of the streams that are not files

    def run(self) -> int:
        """Return the exit code."""
        terminals = {
            name: Terminal(self.folder / name, is_input=name == "stdin")
            for name, state in self.states.items()
            if state == "terminal"
        }
        paths = {name: terminal.path for name, terminal in terminals.items()}
        process = CONTEXT.Process(target=_run_command, args=(self, paths))
        process.start()
        process.join(WAIT_S)
        for terminal in terminals.values():
            terminal.close()
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"nmt-{self.command} is not done after {WAIT_S} s")
        return process.exitcode


class Terminal:
    """One column wide. What is written to it goes to a file; an input is typed from the file."""

    def __init__(self, file: Path, is_input: bool) -> None:
        self.master, self.slave = os.openpty()
        self.path = os.ttyname(self.slave)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 1, 0, 0))
        if is_input:
            os.write(self.master, file.read_bytes() + CTRL_D)
        else:
            tty.setraw(self.slave)  # no carriage returns
        self.reader = threading.Thread(target=self._read, args=(None if is_input else file,))
        self.reader.start()

    def _read(self, file: Path | None) -> None:
        data = b""
        try:
            while block := os.read(self.master, 1 << 12):
                data += block
        except OSError:  # nobody has it open any more
            pass
        if file is not None:
            file.write_bytes(data)

    def close(self) -> None:
        os.close(self.slave)
        self.reader.join()
        os.close(self.master)


# In the fork.


def _run_command(process: ShellProcess, terminals: dict[str, str]) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(process.folder / "current")
    for number, name in enumerate(STREAMS):
        state = process.states.get(name, "file")
        _connect(number, state, terminals.get(name) or str(process.folder / name))
    _open_python_streams()
    command = importlib.import_module(f"nmt.commands.{process.command}")
    code = 1
    try:
        code = command.main(process.argv)
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code if _flush(sys.stdout) and _flush(sys.stderr) else 120)


def _flush(stream: TextIO | None) -> bool:
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        return False
    return True


def _connect(number: int, state: str, path: str) -> None:
    """Make a descriptor be in some state."""
    if state == "closed":
        os.close(number)
    elif state in ("broken", "leaves"):
        read_end, write_end = os.pipe()
        os.dup2(write_end, number)
        os.close(write_end)
        if state == "broken":
            os.close(read_end)
        else:
            threading.Thread(target=_read_and_leave, args=(read_end,), daemon=True).start()
    else:
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if state in IS_WRITABLE:
            flags = os.O_WRONLY if IS_WRITABLE[state] else os.O_RDONLY
        opened = os.open(DEVICES.get(state, path), flags | os.O_NOCTTY)
        os.dup2(opened, number)
        if opened != number:
            os.close(opened)


def _read_and_leave(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.close(descriptor)


def _open_python_streams() -> None:
    """Make sys.stdin and its like, as the interpreter does at its start."""
    sys.stdin = sys.__stdin__ = _open_stream(0)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _open_stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_stream(2)  # type: ignore[misc]


def _open_stream(number: int) -> io.TextIOWrapper | None:
    try:
        os.fstat(number)
    except OSError:
        return None
    stream: io.TextIOWrapper = open(
        number,
        "w" if number else "r",
        buffering=1 if number == 2 or os.isatty(number) else -1,
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "surrogateescape",
        closefd=False,
    )
    return stream


CONTEXT.set_forkserver_preload([*PRELOADED, *(f"nmt.commands.{name}" for name in COMMANDS)])
