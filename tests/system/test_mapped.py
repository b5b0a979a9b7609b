"""Copies out of mapped files are those of indexing, and a page that is gone is an error."""

import os
from pathlib import Path

import numpy as np
import pytest

from nmt.system import mapped
from nmt.system.mapped import MappedPageLost, copy_runs, copy_slice


def make_map(path: Path, n: int = 20_000) -> np.memmap:
    np.arange(n, dtype=np.uint16).tofile(path)
    return np.memmap(path, np.uint16, "r")


@pytest.mark.parametrize("has_call", [True, False])
def test_copies_are_those_of_indexing(
    has_call: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_call:
        monkeypatch.setattr(mapped, "_read_process", None)
    array = make_map(tmp_path / "a")
    rng = np.random.default_rng(1)
    for n in (0, 1, 1_024, 3_000):
        lengths = rng.integers(0, 9, n)
        starts = rng.integers(0, len(array) - 9, n)
        expected = [
            array[start : start + length] for start, length in zip(starts, lengths, strict=True)
        ]
        found = copy_runs(array, starts, lengths)
        assert found.tolist() == np.concatenate([array[:0], *expected]).tolist()
    monkeypatch.setattr(mapped, "MAX_CALL_BYTES", 1_000)
    assert copy_slice(array, 3, 19_999).tolist() == list(range(3, 19_999))


@pytest.mark.parametrize(
    ("start", "length"),
    [(-1, 1), (0, -1), (19_999, 2), (2**62, 1), (-(2**62), 2**62), (2**63 - 1, 2)],
)
def test_runs_outside_the_array_are_refused(start: int, length: int, tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        copy_runs(make_map(tmp_path / "a"), np.array([start]), np.array([length]))


@pytest.mark.skipif(mapped._read_process is None, reason="this system has no process_vm_readv")
def test_a_page_that_is_gone_is_an_error(tmp_path: Path) -> None:
    array = make_map(tmp_path / "a")
    os.truncate(tmp_path / "a", 0)
    with pytest.raises(MappedPageLost):
        copy_slice(array, 0, len(array))
