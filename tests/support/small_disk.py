"""A file system of 1 MB, mounted for real, that tests fill up."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    path: Path

    def fill(self, n_left: int) -> Path:
        """Take all but `n_left` bytes; removing the file that is returned gives them back."""
        status = os.statvfs(self.path)
        ballast = self.path / "ballast"
        ballast.write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - n_left)))
        return ballast


@contextmanager
def mount_small_disk(folder: Path, megabytes: int = 1) -> Iterator[SmallDisk]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (needs root)")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
