"""What a training reports while it runs: one type for each kind of line in metrics.jsonl.

The trainer makes an event, the log writes it as a line (run_log.py), and trackers, the report,
averaging and sweeps get the same types back when they read the file here. The names of the fields
are the keys of the line; docs/tracking.md says what each means.

A line may be damaged. If it is no event at all, it is counted and left out. A value that it lacks,
or that has another type, reads as NaN, 0, "" or None, so a reader needs no second check: `figures`
has only the numbers that are there and finite.
"""

import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nmt.system.errors import UserError
from nmt.system.files import check_size, has_plain_file, open_plain_file
from nmt.system.run_folder import METRICS_FILE
from nmt.system.strict_json import Fields, parse_json

if TYPE_CHECKING:
    from torch import Tensor

    from nmt.data.loader import Update

Phase = Literal["training", "validating", "saving", "end"]  # of a rank, after its start
MAX_METRICS_BYTES = 1 << 30  # some millions of lines
LONGEST_LINE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event after the update `step`. A field without a default is always in the line, as null if
    it is None; one with a default is in the line only if it is not None.
    """

    kind: ClassVar[str]
    step: int

    def to_line(self) -> Fields:
        """Return the values of the line."""
        line: Fields = {"kind": self.kind}
        for event_field in fields(self):
            value = getattr(self, event_field.name)
            if value is not None or event_field.default is not None:
                line[event_field.name] = replace_nonfinite(value)
        return line

    @cached_property
    def figures(self) -> dict[str, float]:
        return find_figures(self.to_line())


class Listener:
    """Hears every event of a run while it trains. This one does nothing; trackers override it.

    The main rank's hears events. That of each rank hears `enter` and `hear_update`.
    """

    def start(self, run: Path, earlier: Sequence[Event]) -> None:
        """Begin with the events that the run's folder has already."""

    def send(self, event: Event) -> None: ...

    def enter(self, phase: Phase) -> None:
        """Hear what the rank does next."""

    def hear_update(self, step: int, update: "Update", micro_sums: "Tensor") -> None:
        """Hear what the rank has computed of an update: its micro-batches and the sums of their losses."""

    def finish(self) -> None:
        """Take the time for what is not done yet, but not long."""


def find_figures(line: Fields) -> dict[str, float]:
    """Return the finite numbers of a line, by their keys there."""
    return {
        key: float(value)
        for key, value in line.items()
        if type(value) in (int, float) and key not in ("step", "line")
    }


@dataclass(frozen=True, kw_only=True)
class TrainEvent(Event):
    """The updates since the event before, and the rates and the memory at this one."""

    kind = "train"
    epoch: int | None
    loss: float  # label-smoothed, per target token
    nll: float
    ppl: float
    lr: float
    grad_norm: float  # of the last update
    src_tokens_per_s: float
    tgt_tokens_per_s: float
    updates_per_s: float
    waited_s: float  # for data
    memory_bytes: float  # the peak so far
    elapsed_s: float  # since the run began, without the time between its starts


@dataclass(frozen=True, kw_only=True)
class ValidEvent(Event):
    """A validation."""

    kind = "valid"
    nll: float
    ppl: float
    bleu: float | None
    signature: str | None
    chrf: float | None
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class SampleEvent(Event):
    """A dev line as the model translates it now."""

    kind = "sample"
    line: int  # counted from 1; 0 if it is not known
    source: str
    reference: str
    translation: str


@dataclass(frozen=True, kw_only=True)
class SkippedEvent(Event):
    """An update that was not applied, because its loss or gradient is NaN or infinite."""

    kind = "skipped"
    loss: str
    grad_norm: str


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """Something is wrong, but training continues."""

    kind = "warning"
    problem: str
    nll: float | None = None
    unigram_nll: float | None = None
    message: str


EVENT_TYPES: dict[str, type[Event]] = {
    kind.kind: kind for kind in (TrainEvent, ValidEvent, SampleEvent, SkippedEvent, WarningEvent)
}


# What a value that is missing or damaged reads as; None where the field may be None
ABSENT: dict[type, Any] = {float: math.nan, int: 0, str: ""}


def _list_types(event_type: type[Event]) -> dict[str, tuple[type, ...]]:
    """Return the types of each field's value, the one that is written first."""
    hints = typing.get_type_hints(event_type)
    return {
        field.name: typing.get_args(hints[field.name]) or (hints[field.name],)
        for field in fields(event_type)
    }


TYPES = {kind: _list_types(event_type) for kind, event_type in EVENT_TYPES.items()}


def parse_line(line: Fields) -> Event | None:
    """Return the event of a line; None if it has no known kind or no step."""
    event_type, step = EVENT_TYPES.get(str(line.get("kind"))), line.get("step")
    if event_type is None or type(step) is not int or step < 0:
        return None
    values: Fields = {}
    for name, types in TYPES[event_type.kind].items():
        value = line.get(name)
        is_usable = type(value) in types or (float in types and type(value) is int)
        absent = None if len(types) > 1 else ABSENT[types[0]]
        values[name] = value if is_usable else absent
    return event_type(**values)


def replace_nonfinite(value: Any) -> Any:
    """Return NaN and infinity as text, because JSON cannot represent them."""
    is_nonfinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_nonfinite else value


# ---- the file ------------------------------------------------------------------------------------


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
