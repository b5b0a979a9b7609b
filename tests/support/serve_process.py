"""nmt-serve in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import until


@contextmanager
def start_server(folder: Path, *argv: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Start the command, wait for its address and return its port; `folder` gets its standard error."""
    errors = folder / "stderr"
    with open(errors, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "nmt.commands.serve", *argv, "--port", "0"], stderr=stderr
        )
    try:
        until(lambda: "http://" in errors.read_text() or process.poll() is not None)
        found = re.search(r"http://127.0.0.1:(\d+)", errors.read_text())
        assert found, errors.read_text()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()
