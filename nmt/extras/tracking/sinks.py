"""Sends the events of a run to the sinks that `training.track` names: TensorBoard, W&B, or a user's own.

A sink is made from the run folder, gets each line of metrics.jsonl as a dictionary, and is closed at
the end. At each start of a run it gets all lines from the first one. A user's package offers one by an
entry point of the group `nmt.sinks`; a config can only name it (docs/tracking.md).

Each sink has a thread and a queue. Training only puts events into the queue and never waits: a sink that
raises three times in a row, or that is too far behind, gets no more, with one warning. Its figures are
not lost, because metrics.jsonl has them all.
"""

import hashlib
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from nmt.config_files import OUR_SINKS, SINK_GROUP, load_recorded_config, to_plain_values
from nmt.system.errors import UserError, fit_into_line
from nmt.system.extras import is_installed, name_remedy
from nmt.system.files import open_plain_file, read_bytes
from nmt.system.progress import clock, say
from nmt.system.run_folder import RunFolder
from nmt.system.strict_json import Fields
from nmt.train.events import LONGEST_LINE, Event, Listener, find_figures

MAX_ERRORS = 3  # in a row
MAX_WAITING = 10_000  # events that a sink may be behind; the samples among them are some KB each
FINISH_S = 10.0  # that the end of a run waits for all sinks together
INIT_S = 30  # that W&B waits for a network that is gone
SAMPLE_TEXTS = ("source", "reference", "translation")
MARKDOWN_SIGN = re.compile(r"[^\w\s]|_")


class Sink(Protocol):
    def write(self, line: Fields) -> None: ...

    def close(self) -> None: ...


def check_sinks_installed(names: Sequence[str]) -> None:
    """Raise UserError if a sink of ours needs a package that is not installed."""
    for name in names:
        if name in OUR_SINKS and not is_installed(name):
            raise UserError(
                f"training.track names {name}, which is not installed; {name_remedy(name)}, or leave it out"
            )


def open_sink(name: str, run: Path) -> Sink:
    """Make the sink of that name for the run in a folder."""
    if name == "tensorboard":
        return TensorBoardSink(run)
    if name == "wandb":
        return WandbSink(run)
    (point,) = entry_points(group=SINK_GROUP, name=name)
    make: Callable[[Path], Sink] = point.load()
    return make(run)


def name_figures(line: Fields) -> dict[str, float]:
    """Name the numbers of a line as charts are titled, such as train/nll."""
    return {f"{line['kind']}/{key}": value for key, value in find_figures(line).items()}


class TensorBoardSink:
    """Writes RUN/tensorboard anew, so that a run that went back to a checkpoint has no stale points."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run = RunFolder(path)
        for old in run.tensorboard.glob("*.nmt"):
            old.unlink()
        # A TensorBoard that has read an earlier file forgets it.
        self.writer: Any = SummaryWriter(run.tensorboard, purge_step=0, filename_suffix=".nmt")
        # Metrics have the seconds since the run began.
        self.started_at = self.time = run.config.stat().st_mtime
        settings = read_bytes(run.config).decode(errors="replace")
        code = "".join(f"    {line}\n" for line in settings.splitlines())
        self.writer.add_text("config", code, walltime=self.time)

    def write(self, line: Fields) -> None:
        if isinstance(line.get("elapsed_s"), int | float):
            self.time = self.started_at + line["elapsed_s"]
        step = line["step"]
        if line["kind"] == "sample":
            paragraphs = [f"**{key}** {_escape(line.get(key))}" for key in SAMPLE_TEXTS]
            text = "\n\n".join(paragraphs)
            self.writer.add_text(f"sample/line {line.get('line')}", text, step, self.time)
        else:
            for name, value in name_figures(line).items():
                self.writer.add_scalar(name, value, step, self.time)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _escape(text: Any) -> str:
    """Escape text so that Markdown shows it literally."""
    return MARKDOWN_SIGN.sub(lambda match: f"&#{ord(match[0])};", str(text))


class WandbSink:
    """Writes to Weights & Biases, online or, with WANDB_MODE=offline, to RUN/wandb.

    The id of the run in W&B is made from the first line of metrics.jsonl: no two runs share that
    line, and a run that is continued, or moved, keeps it. W&B leaves out updates that it has already.
    """

    def __init__(self, path: Path) -> None:
        import wandb

        run = RunFolder(path)
        config = load_recorded_config(run.config)
        with open_plain_file(run.metrics) as file:
            first_line = file.readline(LONGEST_LINE)
        self.make_table = wandb.Table
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nmt"),
            name=config.name,
            id=hashlib.sha256(first_line).hexdigest()[:16],
            resume="allow",
            dir=path,
            config=to_plain_values(config),
            settings=wandb.Settings(
                init_timeout=INIT_S,
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
            ),
        )
        self.rows: list[list[Any]] = []  # samples of the validation that is being read

    def write(self, line: Fields) -> None:
        if line["kind"] == "sample":
            texts = [str(line.get(key)) for key in SAMPLE_TEXTS]
            self.rows.append([line.get("line"), *texts])
            return
        values: Fields = {**name_figures(line)}
        if line["kind"] == "valid" and self.rows:
            values["samples"] = self.make_table(columns=["line", *SAMPLE_TEXTS], data=self.rows)
            self.rows = []
        self.run.log(values, step=line["step"])

    def close(self) -> None:
        self.run.finish()


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
        n_errors = 0
        try:
            first = next(events, None)  # W&B needs the first line of metrics.jsonl
            if first is None:
                return
            with closing(open_sink(self.name, run)) as sink:
                for event in chain([first], events):
                    try:
                        sink.write(event.to_line())
                        n_errors = 0
                    except Exception:
                        n_errors += 1
                        if n_errors >= MAX_ERRORS:
                            raise
        except BaseException as error:  # of code that is not ours
            self.fault = fit_into_line(f"{type(error).__name__}: {error}")

    def put(self, event: Event | None) -> None:
        try:
            self.waiting.put_nowait(event)
        except queue.Full:
            self.fault = self.fault or f"is {MAX_WAITING:,} lines behind"


class Trackers(Listener):
    """The sinks of a run. Only the main rank starts any."""

    def __init__(self, names: Sequence[str]) -> None:
        check_sinks_installed(names)
        self.names = names
        self.trackers: list[Tracker] = []

    def start(self, run: Path, earlier: Sequence[Event]) -> None:
        self.trackers = [Tracker(run, name, earlier) for name in self.names]

    def send(self, event: Event | None) -> None:
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
                f"warning: training.track: {tracker.name}: {tracker.fault}; the run is not affected, and "
                "its next start sends all its figures"
            )
