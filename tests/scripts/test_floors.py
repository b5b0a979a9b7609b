"""`make bench-floors` finds a lost speed."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import floors  # noqa: E402

from nmt.system.files import read_json  # noqa: E402


def test_a_slow_encoder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with few lines, and then an encoder that seems three times as slow."""
    monkeypatch.setattr(floors, "N_PAIRS", 3_000)
    monkeypatch.setattr(floors, "N_WORDS", 3_000)
    monkeypatch.setattr(floors, "FLOORS", tmp_path / "floors.json")
    (tmp_path / "floors.json").write_text("{}")
    monkeypatch.setattr(floors, "ROUNDS", 3)
    assert floors.main(["encoding", "--record"]) == 0
    (recorded,) = read_json(tmp_path / "floors.json").values()
    assert recorded["encoding"] > 0
    slower = recorded["encoding"] / 3
    monkeypatch.setattr(floors.Bench, "measure_encoding", lambda _: slower)
    assert floors.main(["encoding", "--lenient"]) == 1
    captured = capsys.readouterr()
    assert "encoding: " in captured.err and "but its floor is" in captured.err
