"""metrics.jsonl on a disk that is full for a while, and after a crash."""

import json
from pathlib import Path

import pytest
from support.small_disk import SmallDisk

from nmt.train.metrics_log import MetricsLog


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_lines_that_cannot_be_written_wait(
    small_disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_disk.path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.write({"n": 0})
    ballast = small_disk.fill(0)
    for n in (1, 2):
        log.write({"n": n, "text": "x" * 5_000})
    assert capsys.readouterr().err.count("warning") == 1
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    ballast.unlink()
    log.write({"n": 3})
    assert numbers(path) == [0, 1, 2, 3]
    assert log.sync() == path.stat().st_size


def test_the_log_continues_where_its_checkpoint_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1}\n{"n"')
    MetricsLog(path, 9).write({"n": 5})
    assert path.read_bytes() == b'{"n": 0}\n{"n": 5}\n'
    assert not capsys.readouterr().err
    MetricsLog(path, 100).write({"n": 6})  # someone has shortened the file
    assert numbers(path) == [0, 5, 6]
    assert "18 of 100 bytes" in capsys.readouterr().err
