"""Progress in a log: what a line says, and that standard output stays free for data."""

import io
import os
import sys

import pytest

from nmt.system import progress
from nmt.system.progress import Progress, format_duration, say, track


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3725, "1:02:05")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the clock shows."""
    now = [0.0]
    monkeypatch.setattr(progress, "clock", lambda: now[0])
    return now


def test_a_line_tells_speed_and_rest(time: list[float]) -> None:
    shown = Progress("training", 1000, "updates", start=100)
    time[0] = 10.0
    shown.advance(200, "loss 3.21")
    assert shown.line() == "training: 300/1,000 updates, 20/s, 0:35 left  loss 3.21"
    shown.expect(300)
    assert shown.line() == "training: 300/300 updates, 20/s, 0:00 left  loss 3.21"


def test_a_log_gets_a_line_now_and_then(
    time: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in track(range(25), "reading", "lines"):
        time[0] += 1.0
    assert capsys.readouterr() == ("", "reading: 10 lines, 1.00/s\nreading: 20 lines, 1.00/s\n")


@pytest.mark.parametrize("state", ["absent", "closed", "broken"])
def test_a_message_that_cannot_be_written_is_lost(
    state: str,
    time: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
