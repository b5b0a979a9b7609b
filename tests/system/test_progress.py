"""Progress in a log: what a line says, and that standard output stays free for data."""

import io
import os
import sys

from pytest import MonkeyPatch, fixture, mark
from support.capture import Capture, read_errors

from nmt.system import progress
from nmt.system.progress import Progress, format_duration, say, track


@mark.parametrize("seconds, text", [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@fixture
def time(monkeypatch: MonkeyPatch) -> list[float]:
    """The seconds that the clock shows."""
    now = [0.0]
    monkeypatch.setattr(progress, "clock", lambda: now[0])
    return now


def test_a_line_tells_speed_and_rest(time: list[float]) -> None:
    shown = Progress("training", 1000, "updates", start=100)
    time[0] = 10.0
    shown.advance(200, "loss 3.21")
    assert shown.line() == "training: 300/1,000 updates, 20/s, 0:35 left  loss 3.21"
    shown.total = 300
    assert shown.line() == "training: 300/300 updates, 20/s, 0:00 left  loss 3.21"


def test_a_log_gets_a_line_now_and_then(time: list[float], capsys: Capture) -> None:
    for _ in track(range(25), "reading", "lines"):
        time[0] += 1.0
    assert capsys.readouterr() == ("", "reading: 10 lines, 1.00/s\nreading: 20 lines, 1.00/s\n")


def test_time_left_ends_with_the_time_allowed(time: list[float]) -> None:
    shown = Progress("training", 1000, "updates", ends_at=60.0)
    time[0] = 10.0
    shown.advance(100)
    assert shown.line() == "training: 100/1,000 updates, 10/s, 0:50 left"
    shown.total = 200
    assert shown.line().endswith(", 0:10 left")
    shown.total, time[0] = 1000, 70.0
    assert shown.line().endswith(", 0:00 left")


def test_a_slow_start_does_not_count_for_the_speed(time: list[float]) -> None:
    """Or the first line of a training would promise hours that it does not take."""
    shown = Progress("training", 1000, "updates", start=99, starts_slowly=True)
    time[0] = 60.0  # data, compilation, memory
    shown.advance()
    assert shown.line() == "training: 100/1,000 updates"
    time[0] = 70.0
    shown.advance(100)
    assert shown.line() == "training: 200/1,000 updates, 10/s, 1:20 left"


def test_a_line_waits_for_news_and_for_its_time(time: list[float], capsys: Capture) -> None:
    shown = Progress("training", None, "updates", line_s=1.0)
    for step in range(1, 41):
        time[0] += 0.1
        shown.advance(1, f"loss {40 - step}", may_print=step % 4 == 0)
    lines = read_errors(capsys)
    assert [line.split("  ")[1] for line in lines] == ["loss 28", "loss 16", "loss 4"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_what_a_line_does(time: list[float], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress("training {1}", 1000, "updates", ends_at=60.0) as shown:
        for step in range(1, 4):
            time[0] = 10.0 * step
            shown.advance(100, f"loss {step}")
            assert shown.bar is not None
            shown.bar.refresh()
            drawn = terminal.getvalue().rpartition("\r")[2].rstrip()
            assert drawn.startswith(f"training {{1}}:  {step}0%|")
            assert drawn.endswith(
                f"| {step}00/1,000 updates, 10/s, 0:{60 - 10 * step} left  loss {step}"
            )

    with Progress("reading", None, "lines"):
        assert terminal.getvalue().endswith("\rreading: 0 lines")


def test_a_narrow_terminal_has_room_for_a_bar(time: list[float], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    for columns, last in ((80, "loss 4.411"), (110, "nll 3.651"), (160, "lr 1.96e-03")):
        with Progress("training", 400, "updates") as shown:
            assert shown.bar is not None
            shown.bar.dynamic_ncols, shown.bar.ncols = False, columns
            time[0] += 400
            shown.advance(160, "loss 4.411, nll 3.651, 1,374 target tokens/s, lr 1.96e-03")
            shown.bar.refresh()
            drawn = terminal.getvalue().rpartition("\r")[2]
        assert len(drawn) == columns and drawn.endswith(last)
        assert len(drawn.split("|")[1]) >= 10


@mark.parametrize("state", ["absent", "closed", "broken"])
def test_a_message_that_cannot_be_written_is_lost(
    state: str,
    time: list[float],
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    """As for a program that calls nmt.api, whose streams are not ours."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stderr = io.TextIOWrapper(open(write_end, "wb", buffering=0), write_through=True)
    if state == "closed":
        stderr.close()
    monkeypatch.setattr(sys, "stderr", None if state == "absent" else stderr)
    for _ in track(range(25), "reading", "lines"):
        time[0] += 1.0
    say("a message")
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")
