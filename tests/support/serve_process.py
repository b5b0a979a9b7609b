"""nmt-serve in a process of its own."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.waiting import until
from support.warm_process import start_command


@contextmanager
def start_server(folder: Path, *argv: str) -> Iterator[tuple[BaseProcess, int]]:
    """Start the command, wait for its address and return its port; `folder` gets its standard error."""
    errors = folder / "stderr"
    with open(errors, "wb") as stderr:
        process = start_command(["serve", *argv, "--port", "0"], (0, 1, stderr.fileno()))
    try:
        until(lambda: "http://" in errors.read_text() or not process.is_alive())
        found = re.search(r"http://127.0.0.1:(\d+)", errors.read_text())
        assert found, errors.read_text()
        yield process, int(found[1])
    finally:
        process.kill()
        process.join()
