"""Commands that start at once: forks of a server that has imported what they import (warm_imports.py) and
computed nothing.

A process from the shell spends seconds of processor time on importing torch. These are as real as
it is where the system is concerned: they have a pid, a session, an environment and standard streams
of their own, at a terminal too. What depends on how the interpreter begins or ends needs a real one.
"""

import fcntl
import importlib
import multiprocessing
import os
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from support.checkout import TESTS

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["support.warm_imports"])


def start_fork(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a function in a fork of the server, and the server before the first."""
    paths = f"{TESTS}:{os.environ.get('PYTHONPATH', TESTS)}"
    with mock.patch.dict(os.environ, PYTHONPATH=paths):
        ensure_running()
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def start_command(
    argv: Sequence[str],
    streams: Sequence[int],
    folder: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    before: str = "",
) -> BaseProcess:
    """Start a command, of which `argv` has the name first, with these standard input, output and error,
    after the program `before`. Where standard input is a terminal, it is that of the process.
    """
    ends = [Connection(os.dup(stream)) for stream in streams]
    variables = {**os.environ, **environment}
    return start_fork(_run, argv, ends, folder, variables, before)


def finish(process: BaseProcess, number: int = 0) -> int | None:
    """Wait for the end of a process, after a signal if one is given; return its exit code."""
    if number and process.pid:
        os.kill(process.pid, number)
    process.join()
    return process.exitcode


def _run(
    argv: Sequence[str],
    ends: Sequence[Connection],
    folder: Path | None,
    variables: Mapping[str, str],
    before: str,
) -> None:
    os.setsid()
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = open(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(variables)
    if folder is not None:
        os.chdir(folder)
    sys.argv = [f"nmt-{argv[0]}", *argv[1:]]
    exec(before, {})
    sys.exit(importlib.import_module(f"nmt.commands.{argv[0]}").main())
