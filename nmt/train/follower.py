"""Follows metrics.jsonl and hands each line to one sink: a process beside training, or nmt-track.

Training starts it (tracking.py) and goes on. So it gives way to training: once its sink is made, it
gets only what nobody else needs of the processor, and it is the first to go if memory runs out. It
reads what is written, finishes what is left when training ends, however it ends, and then ends
itself; a sink that hangs is ended. Why it ended early stands in one line on what was its standard
error; what sinks print there is dropped.
"""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

from nmt.config import SINK_GROUP
from nmt.system.errors import Failure, UserError, fit_into_line
from nmt.system.files import FolderInUse, has_plain_file, lock, open_plain_file
from nmt.system.run_folder import RunFolder
from nmt.train.events import Event
from nmt.train.metrics_log import LONGEST_LINE, parse_event
from nmt.train.sinks import Sink

INTERVAL_S = 1.0  # between looks at the file
HANG_S = 600  # without progress
# Those that are meant for training, and those of a terminal to what is not in front.
IGNORED_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP),
    *(signal.SIGTTIN, signal.SIGTTOU),
)
FINAL_S = 300  # from the end of the run until all is sent


def open_sink(name: str, path: Path) -> Sink:
    """Make the sink of that name for the run in a folder."""
    if name == "tensorboard":
        from nmt.train.tensorboard_sink import TensorBoardSink

        return TensorBoardSink(path)
    if name == "wandb":
        from nmt.train.wandb_sink import WandbSink

        return WandbSink(path)
    (point,) = entry_points(group=SINK_GROUP, name=name)
    make: Callable[[Path], Sink] = point.load()
    return make(path)


class MetricsTail:
    """The lines of metrics.jsonl that were not read yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0

    def read(self) -> Iterator[Event]:
        """Yield the lines that are complete by now, without those that somebody damaged."""
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
                line = parse_event(row)
                if line is not None:
                    yield line


def follow(
    path: Path,
    name: str,
    wait: Callable[[], bool],
    note_progress: Callable[[], None] = lambda: None,
    make_sink: Callable[[str, Path], Sink] = open_sink,
) -> int:
    """Hand the lines of a run to a sink until there are no more; return their number.

    `wait` waits a little and returns False if no more lines will come.
    """
    n_lines, may_grow = 0, True
    tail = MetricsTail(RunFolder(path).metrics)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(path / name, "nmt-track", f".{name}.lock"))
        sink: Sink | None = None
        while may_grow:
            may_grow = wait()
            note_progress()
            for line in tail.read():
                if sink is None:
                    sink = stack.enter_context(closing(make_sink(name, path)))
                sink.write(line.to_line())
                n_lines += 1
                note_progress()
    return n_lines


# ---- beside training ---------------------------------------------------------------------------------------------


def follow_training(path: str, name: str, parent: int) -> NoReturn:
    """Follow the run that the process `parent` trains, until something arrives on standard input or
    the parent is gone.
    """
    report = os.dup(2)
    os.dup2(1, 2)  # which leads nowhere
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)
    if sys.platform == "linux":  # the first to go if memory runs out
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")

    # Timers of C end this process, so a sink may hang anywhere.
    is_over = threading.Event()

    def watch_parent() -> None:
        while os.getppid() == parent and not select.select([0], [], [], INTERVAL_S)[0]:
            pass
        is_over.set()
        faulthandler.dump_traceback_later(FINAL_S, exit=True, file=report)

    def note_progress() -> None:
        if not is_over.is_set():
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=report)

    code = 0
    try:
        threading.Thread(target=watch_parent, daemon=True).start()
        wait = partial(_wait_for_lines, is_over)
        _follow_after_others(Path(path), name, wait, note_progress)
    except BaseException as error:
        code = 1
        os.write(report, fit_into_line(f"{type(error).__name__}: {error}").encode())
    os._exit(code)  # threads of a sink are not waited for


def _make_idle_sink(name: str, path: Path) -> Sink:
    """Make a sink, and from then on take only what nobody else needs of the processor: until then
    it could take minutes on a busy machine, and W&B would give up.
    """
    sink = open_sink(name, path)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return sink


def _wait_for_lines(is_over: threading.Event) -> bool:
    return not is_over.wait(INTERVAL_S)


def _follow_after_others(
    path: Path, name: str, wait: Callable[[], bool], note_progress: Callable[[], None]
) -> None:
    """Follow a run as soon as the follower of its earlier start has finished."""
    for _ in range(2 * FINAL_S):
        try:
            follow(path, name, wait, note_progress, _make_idle_sink)
            return
        except FolderInUse:
            time.sleep(INTERVAL_S)
    raise Failure("another process follows the run")
