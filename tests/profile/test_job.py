"""`--plan` of translating, scoring and preparing: a job is the beginning of its input, times what is left of it."""

import os
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from support.toy_corpus import write_toy_config, write_toy_corpus

from nmt.commands.prepare import main as nmt_prepare
from nmt.profile.dry_run import format_bytes
from nmt.profile.job import TIMED_CHUNKS_S, estimate_job
from nmt.system.errors import UserError
from nmt.system.progress import format_duration
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


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of 40,000 toy pairs, in shards of 200. Each look at the clock takes a second."""
    looks = count()
    monkeypatch.setattr("nmt.profile.job.clock", lambda: float(next(looks)))
    monkeypatch.setattr("nmt.profile.job.PAIRS_PER_SHARD", 200)
    corpus = write_toy_corpus(tmp_path)
    for language in ("en", "de"):
        text = (corpus / f"train.{language}").read_text()
        (corpus / f"train.{language}").write_text(text * 100)
    return write_toy_config(corpus, tmp_path)


def plan(config: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    before = sorted(config.parent.rglob("*"))
    assert nmt_prepare(["--config", str(config), "--plan", "data.workers=4"]) == 0
    assert sorted(config.parent.rglob("*")) == before
    lines = capsys.readouterr().out.splitlines()
    return {line[:16].strip(): line[16:].strip() for line in lines}


def test_a_store_is_planned_by_the_first_shards(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = plan(toy, capsys)
    assert "by 3,200 pairs" in table["a worker"]
    n_pairs = int(table["input"].partition(" ")[0].replace(",", ""))
    assert n_pairs == pytest.approx(40_000, rel=0.1)
    # reading took a second, learning another, and workers two of collecting and encoding
    times = n_pairs / 3_200
    alone, shared = format_duration(1 + times), format_duration(2 * times)
    whole = format_duration(1 + times + 2 * times / 4)
    assert table["time"] == f"{alone} to read and to learn the BPE + {shared} / 4 workers = {whole}"


def test_what_is_planned_is_what_is_prepared(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nmt.profile.job.TIMED_SHARDS", 1_000)
    table = plan(toy, capsys)
    assert table["input"].startswith("40,000 pairs") and "100.00%" in table["a worker"]
    assert nmt_prepare(["--config", str(toy)]) == 0
    n_bytes = sum(file.stat().st_size for file in (toy.parent / "store").glob("train.*.npy"))
    assert table["store"].startswith(f"{format_bytes(n_bytes)}; ")


def test_what_cannot_be_prepared_cannot_be_planned(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = toy.parent / "corpus/train.en"
    for prepare_source, reason in (
        (partial(source.write_text, ""), "is empty"),
        (source.unlink, "not found; give a file"),
        (partial(os.mkfifo, source), "is a pipe or a device; give a file"),
    ):
        prepare_source()
        assert nmt_prepare(["--config", str(toy), "--plan"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"nmt-prepare: error: {source}: {reason}") and said.count("\n") == 1
