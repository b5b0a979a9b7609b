"""`metrics.jsonl`, one line for each event; a resumed run writes on from where its checkpoint stood.

A line that cannot be written, because the disk is full, waits in memory for the next one. So no line is lost, doubled
or cut in two as long as the process lives, and when it dies the checkpoint says how much of the file counts.
"""

import json
import os
from pathlib import Path
from typing import Any

from nmt.system.progress import say


class Journal:
    def __init__(self, path: Path, size: int) -> None:
        """Continue the file `path` after `size` bytes."""
        self.path, self.size, self.waiting = path, size, b""
        there = path.stat().st_size if path.exists() else 0
        if there < size:
            say(
                f"warning: {path}: {there} of {size} bytes are left; lines before this update are missing"
            )
            self.size = path.read_bytes().rfind(b"\n") + 1 if there else 0  # a line cut in two goes
        if there:
            os.truncate(path, self.size)

    def add(self, figures: dict[str, Any]) -> None:
        is_new_trouble = not self.waiting
        self.waiting += (json.dumps(figures) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if is_new_trouble:
                say(
                    f"warning: {self.path}: cannot be written ({error.strerror}); its lines are kept in memory"
                )

    def secured(self) -> int:
        """How many bytes are on the disk for good, all lines among them."""
        self._write(is_synced=True)
        return self.size

    def _write(self, is_synced: bool = False) -> None:
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.seek(self.size)  # over what a failed attempt may have left
            file.write(self.waiting)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        self.size, self.waiting = self.size + len(self.waiting), b""
