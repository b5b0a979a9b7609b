"""`--plan` of translating and scoring: a job is the beginning of its input, times what is left of it."""

from collections.abc import Iterator

import pytest

from nmt.profile.job import TIMED_CHUNKS_S, estimate_job
from nmt.system.errors import UserError
from nmt.translate.stream import DoneChunk


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the chunks put forward."""
    now = [100.0]
    monkeypatch.setattr("nmt.profile.job.clock", lambda: now[0])
    return now


def test_the_whole_is_the_beginning_times_what_is_left(seconds: list[float]) -> None:
    drawn = []

    def chunks() -> Iterator[DoneChunk]:
        for number in range(1_000):
            seconds[0] += 9.0 if number else 50.0 - TIMED_CHUNKS_S  # which loads a model
            drawn.append(number)
            yield DoneChunk(b"x" * 80_000, 1_000, (number + 1) / 10_000)

    rows = [
        line.split(None, 1) for line in estimate_job(chunks(), "lines", 100, 10**9).splitlines()
    ]
    table = dict(rows)
    assert len(drawn) == 3
    assert table["a"].startswith(
        "worker         111.1 lines/s if as fast as this process, by 3,000 lines, 0.03%"
    )
    assert table["input"] == "10,000,000 lines, 1.00 GB" and table["output"] == "800.0 MB"
    assert table["time"] == "15:00 x 100 workers = 25:00:00"  # 10,000 chunks of 9 s


def test_one_chunk_is_enough(seconds: list[float]) -> None:
    def chunks() -> Iterator[DoneChunk]:
        seconds[0] += 3.6
        yield DoneChunk(b"x" * 70, 7, 0.5)

    assert "0:02 x 4 workers = 0:07" in estimate_job(chunks(), "pairs", 4, 1_000)


@pytest.mark.parametrize(
    "chunks, n_bytes",
    [
        ([], 5),
        ([DoneChunk(b"x", 1, 0.0)], 5),
        ([DoneChunk(b"x", 1, 0.5)], 0),
    ],
)
def test_what_cannot_be_planned(chunks: list[DoneChunk], n_bytes: int) -> None:
    with pytest.raises(UserError, match="give a file of lines, not a pipe"):
        estimate_job(chunks, "lines", 2, n_bytes)


def test_of_a_pipe_nothing_is_read() -> None:
    with pytest.raises(UserError, match="not a pipe"):
        estimate_job(map(lambda _: pytest.fail("a chunk was drawn"), [1]), "lines", 2, 0)
