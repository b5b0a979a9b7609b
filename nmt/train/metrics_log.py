"""What training measures in each update, and where it is logged: `metrics.jsonl`, one line for each
event.

A new value is a field of `UpdateStats`, which update.py fills, and of an event.

A resumed run continues the file after the last line that its checkpoint counts. A line that cannot
be written, because the disk is full, waits in memory for the next one. So no line is lost, doubled
or cut in two as long as the process lives, and when it dies the checkpoint says how much of the
file counts.

The report, averaging, sweeps and a continued run read the file here, as the same events
(events.py). A damaged line is counted and left out.
"""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

from nmt.system.errors import UserError
from nmt.system.files import check_size, has_plain_file, open_plain_file
from nmt.system.progress import say
from nmt.system.run_folder import METRICS_FILE
from nmt.system.strict_json import parse_json
from nmt.train.events import Event, parse_line

MAX_METRICS_BYTES = 1 << 30  # some millions of lines
LONGEST_LINE = 1 << 16


class UpdateStats(NamedTuple):
    """Loss, NLL and gradient norm of an update, over all ranks."""

    loss: float  # label-smoothed, summed over the target tokens
    nll: float  # without label smoothing, summed over the target tokens
    grad_norm: float

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self)


N_STATS = len(UpdateStats._fields)


class MetricsLog:
    """`metrics.jsonl`, which continues after its first `n_bytes`. Only the main rank has one."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self.path, self.n_bytes = path, n_bytes
        self.waiting = b""  # lines that could not be written yet
        n_found = path.stat().st_size if has_plain_file(path) else 0
        if n_found < n_bytes:
            say(
                f"warning: {path}: {n_found} of {n_bytes} bytes are left; "
                "lines before this update are missing"
            )
            self.n_bytes = _find_last_line_end(path, n_found)
        if n_found:
            with open_plain_file(path, "r+b") as file:
                file.truncate(self.n_bytes)

    def write(self, event: Event) -> None:
        was_fine = not self.waiting
        self.waiting += (json.dumps(event.to_line()) + "\n").encode()
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


def _find_last_line_end(path: Path, n_bytes: int) -> int:
    """Return the length of a file without a last line that was cut in two."""
    if not n_bytes:  # there may be no file at all
        return 0
    with open_plain_file(path) as file:
        start = max(0, n_bytes - LONGEST_LINE)
        file.seek(start)
        return start + file.read(LONGEST_LINE).rfind(b"\n") + 1


# ---- reading -----------------------------------------------------------------------------------------------------


def read_events(path: Path) -> tuple[list[Event], int]:
    """Return the events of a metrics.jsonl, and the number of lines that cannot be read."""
    events: list[Event] = []
    n_damaged = 0
    if not has_plain_file(path):
        return events, n_damaged
    with open_plain_file(path) as file:
        check_size(file, path, MAX_METRICS_BYTES)
        while row := file.readline(LONGEST_LINE):
            if not row.strip():
                continue
            event = parse_event(row)
            if event is None:
                n_damaged += 1
            else:
                events.append(event)
    return events, n_damaged


def parse_event(row: bytes) -> Event | None:
    """Return the event of a line; None if it is damaged."""
    try:
        values = parse_json(row, METRICS_FILE)
    except UserError:
        return None
    return parse_line(values) if isinstance(values, dict) else None
