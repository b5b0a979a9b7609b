"""What training measures in each update, and where it is logged: `metrics.jsonl`, one line for each
event.

A new value is a field of `UpdateStats`, which update.py fills; a new destination is one more sink.

A resumed run continues the file after the last line that its checkpoint counts. A line that cannot
be written, because the disk is full, waits in memory for the next one. So no line is lost, doubled
or cut in two as long as the process lives, and when it dies the checkpoint says how much of the
file counts.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nmt.system.files import has_plain_file, open_plain_file, read_bytes
from nmt.system.progress import say


class UpdateStats(NamedTuple):
    """Loss, NLL and gradient norm of an update, over all ranks."""

    loss: float  # label-smoothed, summed over the target tokens
    nll: float  # without label smoothing, summed over the target tokens
    grad_norm: float

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self)


N_STATS = len(UpdateStats._fields)


class MetricSink(Protocol):
    """Takes the values of each event; their `kind` is "train", "valid", "skipped" or
    "warning"."""

    def write(self, event: dict[str, Any]) -> None: ...


class MetricsLog:
    """Hands each event to every sink. Only the main rank has one."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self.file = MetricsFile(path, n_bytes)
        self.sinks: list[MetricSink] = [self.file]

    def write(self, event: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(event)

    def sync(self) -> int:
        """Force the file to the disk and return how many bytes it has, for the checkpoint."""
        return self.file.sync()


class MetricsFile:
    """`metrics.jsonl`, which continues after its first `n_bytes`."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self.path, self.n_bytes = path, n_bytes
        self.waiting = b""  # lines that could not be written yet
        n_found = path.stat().st_size if has_plain_file(path) else 0
        if n_found < n_bytes:
            say(
                f"warning: {path}: {n_found} of {n_bytes} bytes are left; "
                "lines before this update are missing"
            )
            # drop a line that was cut in two
            self.n_bytes = read_bytes(path).rfind(b"\n") + 1 if n_found else 0
        if n_found:
            with open_plain_file(path, "r+b") as file:
                file.truncate(self.n_bytes)

    def write(self, event: dict[str, Any]) -> None:
        was_fine = not self.waiting
        self.waiting += (json.dumps(event) + "\n").encode()
        try:
            self._flush()
        except OSError as error:
            if was_fine:
                say(
                    f"warning: {self.path}: cannot be written ({error.strerror}); "
                    "its lines are kept in memory"
                )

    def sync(self) -> int:
        self._flush(is_synced=True)
        return self.n_bytes

    def _flush(self, is_synced: bool = False) -> None:
        with open_plain_file(self.path, "r+b" if has_plain_file(self.path) else "wb") as file:
            file.seek(self.n_bytes)  # over what a failed attempt may have left
            file.write(self.waiting)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        self.n_bytes += len(self.waiting)
        self.waiting = b""


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl that can be read, each of some `kind` at some `step`."""
    if not has_plain_file(path):
        return []
    events = []
    for line in read_bytes(path).split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("step"), int) and "kind" in event:
            events.append(event)
    return events
