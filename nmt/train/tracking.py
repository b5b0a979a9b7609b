"""Sends the events of a run to TensorBoard, W&B or a sink of the user's.

While a run trains, each sink of `training.track` has a thread of its own, with a queue. Training only
puts events into the queue and never waits: a sink that raises three times in a row, or that is too far
behind, gets no more, with one warning. Its figures are not lost, because metrics.jsonl has them all
and nmt-track sends them later. Every start of a run sends them from the first on.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path

from nmt.config import SINK_GROUP
from nmt.system.errors import UserError, fit_into_line
from nmt.system.files import has_plain_file, lock, open_plain_file
from nmt.system.progress import clock, say
from nmt.train.events import Event
from nmt.train.metrics_log import LONGEST_LINE, parse_event
from nmt.train.sinks import Sink

MAX_ERRORS = 3  # in a row
MAX_WAITING = 10_000  # events that a sink may be behind; the samples among them are some KB each
FINISH_S = 10.0  # that the end of a run waits for all sinks together


def open_sink(name: str, run: Path) -> Sink:
    """Make the sink of that name for the run in a folder."""
    if name == "tensorboard":
        from nmt.train.tensorboard_sink import TensorBoardSink

        return TensorBoardSink(run)
    if name == "wandb":
        from nmt.train.wandb_sink import WandbSink

        return WandbSink(run)
    (point,) = entry_points(group=SINK_GROUP, name=name)
    make: Callable[[Path], Sink] = point.load()
    return make(run)


def send_events(run: Path, name: str, events: Iterable[Event], max_errors: int = 1) -> int:
    """Hand the lines of events to a sink, which is made at the first one, and close it; return their
    number. As many errors in a row as `max_errors` are raised.
    """
    n_sent = n_errors = 0
    with ExitStack() as stack:
        stack.enter_context(lock(run / name, "nmt-track", f".{name}.lock"))
        sink: Sink | None = None
        for event in events:
            if sink is None:
                sink = stack.enter_context(closing(open_sink(name, run)))
            line = event.to_line()
            try:
                sink.write(line)
            except Exception:  # of code that is not ours
                n_errors += 1
                if n_errors >= max_errors:
                    raise
                continue
            n_errors = 0
            n_sent += 1
    return n_sent


# ---- while a run trains --------------------------------------------------------------------------


class Tracker:
    """A sink in a thread."""

    def __init__(self, run: Path, name: str, earlier: Sequence[Event]) -> None:
        self.name = name
        self.waiting: queue.Queue[Event | None] = queue.Queue(MAX_WAITING)  # None: no more come
        self.fault = ""  # why it gets no more events
        events = chain(earlier, iter(self.waiting.get, None))
        # A daemon, because a sink that hangs must not keep the process from ending.
        self.thread = threading.Thread(target=self._send, args=(run, events), daemon=True)
        self.thread.start()

    def _send(self, run: Path, events: Iterator[Event]) -> None:
        try:
            send_events(run, self.name, events, MAX_ERRORS)
        except BaseException as error:  # of code that is not ours
            self.fault = fit_into_line(f"{type(error).__name__}: {error}")

    def put(self, event: Event | None) -> None:
        try:
            self.waiting.put_nowait(event)
        except queue.Full:
            self.fault = self.fault or f"is {MAX_WAITING:,} lines behind"


class Trackers:
    """The sinks of a run; only the main rank has any."""

    def __init__(self, run: Path, names: Sequence[str], earlier: Sequence[Event]) -> None:
        self.run = run
        self.trackers = [Tracker(run, name, earlier) for name in names]

    def send(self, event: Event | None) -> None:
        """Hand an event to all sinks; None if no more come."""
        for tracker in self.trackers:
            tracker.put(event)
        self._drop_faulty()

    def finish(self) -> None:
        """Wait until the sinks have all events and are closed, but not for long."""
        deadline = clock() + FINISH_S
        self.send(None)
        for tracker in self.trackers:
            tracker.thread.join(max(0.0, deadline - clock()))
            if tracker.thread.is_alive():
                tracker.fault = f"was not done {FINISH_S:g} s after the end"
        self._drop_faulty()

    def _drop_faulty(self) -> None:
        faulty = [tracker for tracker in self.trackers if tracker.fault]
        for tracker in faulty:
            self.trackers.remove(tracker)
            say(
                f"warning: training.track: {tracker.name}: {tracker.fault}; the run is not affected, "
                f"and nmt-track {self.run} --to {tracker.name} sends all its figures"
            )


# ---- afterwards, or beside it --------------------------------------------------------------------


class MetricsTail:
    """The events of a metrics.jsonl that were not read yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0

    def read(self) -> Iterator[Event]:
        """Yield the events of lines that are complete by now; damaged lines are left out."""
        if not has_plain_file(self.path):
            return
        with open_plain_file(self.path) as file:
            if os.fstat(file.fileno()).st_size < self.position:
                raise UserError(
                    f"{self.path}: has become shorter, because the run went back to a checkpoint; "
                    "start again"
                )
            file.seek(self.position)
            while row := file.readline(LONGEST_LINE):
                if not row.endswith(b"\n") and len(row) < LONGEST_LINE:
                    return  # it is still being written
                self.position += len(row)
                event = parse_event(row)
                if event is not None:
                    yield event
