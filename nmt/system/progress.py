"""The one clock, and progress that people can read: a bar on a terminal, a plain line now and then
in a log.

Everything goes to standard error, because standard output is for data. Only the main rank prints.
A message that cannot be written is dropped, because it must not stop the work that it is about.
"""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Never, TypeVar

from tqdm import tqdm

from nmt.system.escapes import escape_line

Element = TypeVar("Element")
BESIDE_FIGURES = 30  # columns: a name, and a bar that is wide enough to show something


def clock() -> float:
    """Seconds on a clock that never goes back."""
    return time.perf_counter()


def say(text: str) -> None:
    """Print one line for the person at the terminal or in the log; bars make room for it. Line ends
    in names of strangers, and anything that a terminal would obey, are written out.
    """
    if sys.stderr is None:  # tqdm would write to standard output instead
        return
    # A command's standard error never fails (streams.py); that of another program may, or is closed.
    with contextlib.suppress(OSError, ValueError):
        tqdm.write(escape_line(text), file=sys.stderr)
        sys.stderr.flush()


@functools.cache
def say_once(text: str) -> None:
    say(text)


def is_terminal() -> bool:
    """Whether a person sees standard error as it is written."""
    if sys.stderr is None or sys.stderr.closed:
        return False
    return sys.stderr.isatty()


def format_duration(seconds: float) -> str:
    """3725 -> 1:02:05."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Counts work done, and shows it: as a bar on a terminal, as lines in a log.

    `total` may change while the work goes on. At `ends_at` on the clock the work is over, even if
    not all is done. With `starts_slowly`, the first piece of work does not count for the speed. `postfix`
    is text after the figures, such as `loss 3.21, nll 2.84`, whose last parts a narrow terminal leaves out.
    A log gets a line every `line_s` seconds at most.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        start: int = 0,
        is_shown: bool = True,
        line_s: float = 10.0,
        ends_at: float = math.inf,
        starts_slowly: bool = False,
    ) -> None:
        self.what, self.total, self.unit = escape_line(what), total, unit
        self.start = self.done = start
        self.is_starting = starts_slowly
        self.started_at = self.last_line = clock()
        self.is_shown, self.line_s, self.ends_at = is_shown, line_s, ends_at
        self.postfix = ""
        self.other_s = 0.0  # that work of another kind will still take
        self.bar: tqdm[Never] | None = None
        if is_shown and is_terminal():
            self.bar = tqdm(
                desc=self.what,
                total=total,
                initial=start,
                bar_format=self.bar_format(),
                file=sys.stderr,
                leave=False,
                dynamic_ncols=True,
            )

    def advance(self, n: int = 1, postfix: str | None = None, may_print: bool = True) -> None:
        """Count `n` more as done. Without `may_print` a log gets no line now."""
        self.done += n
        if self.is_starting:
            self.start, self.started_at, self.is_starting = self.done, clock(), False
        if postfix is not None:
            self.postfix = postfix
        if self.bar is not None:
            room = (self.bar.ncols or math.inf) - BESIDE_FIGURES
            self.bar.total, self.bar.bar_format = self.total, self.bar_format(room)
            self.bar.update(n)
        elif self.is_shown and may_print and clock() - self.last_line >= self.line_s:
            self.last_line = clock()
            say(self.line())

    def line(self) -> str:
        return f"{self.what}: {self.figures()}"

    def bar_format(self, room: float = math.inf) -> str:
        """Return what tqdm shows: a bar, if the total is known, and as many figures as there is room for."""
        figures = self.figures()
        while len(figures) > room:
            figures = figures.rpartition(", ")[0]
        return ("{l_bar}{bar}| " if self.total else "{desc}: ") + figures

    def figures(self) -> str:
        rate = (self.done - self.start) / max(clock() - self.started_at, 1e-9)
        total = "" if self.total is None else f"/{self.total:,}"
        text = f"{self.done:,}{total} {self.unit}"
        if rate:
            text += f", {rate:,.0f}/s" if rate >= 10 else f", {rate:,.2f}/s"
        left = self.ends_at - clock()
        if self.total and rate:
            left = min((self.total - self.done) / rate + self.other_s, left)
        if self.total and left < math.inf:
            text += f", {format_duration(max(left, 0.0))} left"
        if self.postfix:
            text += f"  {self.postfix}"
        return text

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


def track(
    items: Iterable[Element], what: str, unit: str, total: int | None = None
) -> Iterator[Element]:
    """Yield `items`, with progress shown as they are taken."""
    with Progress(what, total, unit) as progress:
        for item in items:
            yield item
            progress.advance()
