"""Which attention path is chosen, measured and remembered."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nmt.model import attention_choice
from nmt.model.attention import TRITON, VARLEN
from nmt.model.attention_choice import (
    choose_attention,
    measure_attention,
    save_choice,
    time_in_turns,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nmt" / "attention.json"


def test_the_faster_path_is_remembered(cache: Path) -> None:
    assert choose_attention("A100", 64, 64) == TRITON
    assert save_choice("A100", 64, 64, {TRITON: 2.0, VARLEN: 1.0}) == VARLEN
    assert save_choice("A100", 128, 128, {TRITON: 1.0, VARLEN: 2.0}) == TRITON
    assert (
        choose_attention("A100", 64, 64) == VARLEN and choose_attention("A100", 128, 128) == TRITON
    )
    assert choose_attention("H100", 64, 64) == choose_attention("A100", 64, 32) == TRITON
    (key, answer), _ = json.loads(cache.read_text()).items()
    assert key.startswith(f"A100, torch {torch.__version__}, triton ") and key.endswith("64/64")
    assert answer == {"path": VARLEN, "ms": {TRITON: 2.0, VARLEN: 1.0}}
    assert save_choice("A100", 64, 64, {TRITON: 1.0}) == TRITON == choose_attention("A100", 64, 64)
    assert save_choice("A100", 64, 64, {}) == TRITON


@pytest.mark.parametrize("content", ["", "[", "[]", "3", "\0", '{"A": 3}', "[" * 100_000, "{}"])
def test_a_damaged_answer_is_no_answer(cache: Path, content: str) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert choose_attention("A100", 64, 64) == TRITON
    assert (
        save_choice("A100", 64, 64, {TRITON: 2.0, VARLEN: 1.0})
        == VARLEN
        == choose_attention("A100", 64, 64)
    )
    answers = json.loads(cache.read_text())
    answers = dict.fromkeys(answers, 7)
    cache.write_text(json.dumps(answers))
    assert choose_attention("A100", 64, 64) == TRITON


def test_without_a_folder_nothing_is_remembered(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "nmt").write_text("a file")
    assert save_choice("A100", 64, 64, {TRITON: 2.0, VARLEN: 1.0}) == VARLEN
    assert choose_attention("A100", 64, 64) == TRITON


def test_turns_are_taken_and_the_median_counts() -> None:
    spans = iter([9.0, 1.0] + [2.0, 3.0] * 9)
    seen = []

    def timer(work: Callable[[], object]) -> float:
        seen.append(work())
        return next(spans)

    assert time_in_turns({"a": lambda: 1, "b": lambda: 2}, timer) == {"a": 2.0, "b": 3.0}
    assert seen == [1, 2] * 10


@pytest.mark.parametrize(
    ("triton_ms", "varlen_ms", "expected"),
    [(1.0, 2.0, TRITON), (2.0, 1.0, VARLEN), (2.0, None, TRITON)],
)
def test_measuring_remembers_the_faster(
    triton_ms: float,
    varlen_ms: float | None,
    expected: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: torch's kernel raises, as where it was not built for this GPU."""
    monkeypatch.setattr(attention_choice, "supports_triton", lambda q, v: True)
    monkeypatch.setattr(attention_choice, "supports_varlen", lambda q, v: True)
    ran = []

    def capture(work: functools.partial[None], device: torch.device) -> Callable[[], str]:
        path = work.args[1][0].path
        if path == VARLEN and varlen_ms is None:
            raise RuntimeError("no kernel image")
        work()  # on the CPU both paths come out at the plain one
        return lambda: path

    def timer(work: Callable[[], object]) -> float:
        ran.append(str(work()))
        times = {TRITON: triton_ms, VARLEN: varlen_ms}
        return times[ran[-1]] or 0.0

    monkeypatch.setattr(attention_choice, "capture", capture)
    device = torch.device("cpu")
    assert (
        measure_attention(device, 500, 2, 16, 16, timer)
        == expected
        == choose_attention("cpu", 16, 16)
    )
    assert ran.count(TRITON) == attention_choice.ROUNDS
    assert ran.count(VARLEN) == (0 if varlen_ms is None else attention_choice.ROUNDS)
