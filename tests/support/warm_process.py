"""Processes that start at once: forks of a server that has imported what commands import (warm_imports.py)
and trained nothing.

A process from the shell spends seconds of processor time on importing torch. These are as real as
it is where the system is concerned: they have a pid, a group of signals and standard streams of
their own.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["support.warm_imports"])
TESTS = Path(__file__).parents[1]


def start_fork(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a function in a fork of the server, and the server before the first."""
    paths = f"{TESTS}:{os.environ.get('PYTHONPATH', TESTS)}"
    with mock.patch.dict(os.environ, PYTHONPATH=paths):
        ensure_running()
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def _translate(argv: list[str], stdin: Connection, errors: Path) -> None:
    import torch

    import nmt.commands.translate

    os.dup2(stdin.fileno(), 0)
    stdin.close()
    sys.stdin = open(0, closefd=False)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    sys.exit(nmt.commands.translate.main(argv))


class TranslateProcess:
    """nmt-translate, with a pipe for its standard input and a file for its standard error."""

    def __init__(self, argv: list[str], errors: Path) -> None:
        self.errors = errors
        reader, self.stdin = CONTEXT.Pipe(duplex=False)
        self.process = start_fork(_translate, argv, reader, errors)
        reader.close()

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def feed(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self.stdin.fileno(), data) :]

    def stop(self, number: signal.Signals) -> tuple[int | None, str]:
        """Send a signal. Return the exit code and what standard error holds."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(60)
        self.stdin.close()
        return self.process.exitcode, self.errors.read_text()
