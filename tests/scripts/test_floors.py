"""The floors of speed: a loss of 15 % is found, noise is not, and each recorded figure can be measured."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import floors  # noqa: E402

from nmt.system.files import read_json  # noqa: E402

RECORDED = {
    key: figures for key, figures in read_json(floors.FLOORS).items() if key != "yardsticks"
}


@pytest.mark.parametrize("processor", RECORDED)
def test_what_is_fifteen_per_cent_slower_is_below_each_floor(processor: str) -> None:
    recorded = RECORDED[processor]
    assert floors.find_lost({name: 0.85 * value for name, value in recorded.items()}, recorded)
    slower = {name: 0.85 * value for name, value in recorded.items()}
    assert len(floors.find_lost(slower, recorded)) == len(recorded) > 0
    noisy = {name: 0.93 * value for name, value in recorded.items()}
    assert floors.find_lost(noisy, recorded) == []
    assert floors.find_lost(noisy, recorded, floors.LENIENT_SHARE) == []


@pytest.mark.parametrize("processor", RECORDED)
def test_every_floor_is_of_a_group_that_is_measured(processor: str) -> None:
    for name in RECORDED[processor]:
        assert name.split(",")[0] in floors.YARDSTICKS


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
