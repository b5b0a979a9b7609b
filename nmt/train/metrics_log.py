"""What training measures in each update, and where it is logged: `metrics.jsonl`, one line for each
event.

It is the only place that training writes figures to; what else shows them follows the file
(follower.py). A new value is a field of `UpdateStats`, which update.py fills.

A resumed run continues the file after the last line that its checkpoint counts. A line that cannot
be written, because the disk is full, waits in memory for the next one. So no line is lost, doubled
or cut in two as long as the process lives, and when it dies the checkpoint says how much of the
file counts.

Whoever reads the file, for the report, for averaging or for a continued run, reads it here. A line
that somebody damaged is counted and left out.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nmt.system.errors import UserError
from nmt.system.files import check_size, has_plain_file, open_plain_file
from nmt.system.progress import say
from nmt.system.run_folder import METRICS_FILE
from nmt.system.strict_json import parse_json

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

    def write(self, event: dict[str, Any]) -> None:
        """Write an event; its `kind` is "train", "layers", "valid", "sample", "skipped" or "warning"."""
        was_fine = not self.waiting
        values = {key: _replace_nonfinite(value) for key, value in event.items()}
        self.waiting += (json.dumps(values) + "\n").encode()
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


def round_digits(value: float) -> float:
    """Keep the digits of a norm that mean something."""
    return float(f"{value:.5g}")


def _replace_nonfinite(value: Any) -> Any:
    """Write NaN and infinity as text, because JSON cannot represent them."""
    is_nonfinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_nonfinite else value


# ---- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """A line of metrics.jsonl. Values of other types than these are left out."""

    kind: str
    step: int
    numbers: dict[str, float]  # finite ones, by key
    texts: dict[str, str]
    attention: dict[str, Any] | None = None  # of a sample; nobody has checked what is in it


def read_metrics(path: Path) -> tuple[list[MetricsLine], int]:
    """Return the lines of a metrics.jsonl that can be read, and the number of those that cannot."""
    lines: list[MetricsLine] = []
    n_damaged = 0
    if not has_plain_file(path):
        return lines, n_damaged
    with open_plain_file(path) as file:
        check_size(file, path, MAX_METRICS_BYTES)
        while row := file.readline(LONGEST_LINE):
            if not row.strip():
                continue
            line = _read_line(row)
            if line is None:
                n_damaged += 1
            else:
                lines.append(line)
    return lines, n_damaged


def parse_event(row: bytes) -> dict[str, Any] | None:
    """Return the values of a line with a kind and a step; None if it is no such line."""
    try:
        values = parse_json(row, METRICS_FILE)
    except UserError:
        return None
    if not isinstance(values, dict):
        return None
    kind, step = values.get("kind"), values.get("step")
    if not isinstance(kind, str) or type(step) is not int or step < 0:
        return None
    return values


def _read_line(row: bytes) -> MetricsLine | None:
    values = parse_event(row)
    if values is None:
        return None
    numbers, texts = {}, {}
    for key, value in values.items():
        if type(value) in (int, float):
            numbers[key] = float(value)
        elif isinstance(value, str):
            texts[key] = value
    attention = values.get("attention")
    if not isinstance(attention, dict):
        attention = None
    return MetricsLine(values["kind"], values["step"], numbers, texts, attention)
