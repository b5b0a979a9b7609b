"""Batches are bounded by the memory that their hypotheses may take."""

from typing import Any

import pytest
import torch

from nmt.config import DecodingConfig
from nmt.translate.batching import split_by_budget


def test_a_batch_is_bounded_by_what_its_hypotheses_may_say() -> None:
    def sizes(n_pieces: int, n_lines: int, **settings: Any) -> set[int]:
        batches = list(
            split_by_budget([[5] * n_pieces] * n_lines, DecodingConfig(**settings), n_best=300)
        )
        assert sorted(i for batch in batches for i in batch) == list(range(n_lines))
        return {len(batch) for batch in batches[:-1]}

    assert sizes(32, 1_000) == {4_096 // 32}  # usual ones: the source alone decides
    assert sizes(2, 3_000) == {16 * 4_096 // (4 * 52)}
    assert sizes(1_000, 20, beam=16) == {3}
    assert sizes(1_000, 20, beam=1_000) == {1}
    assert sizes(32, 100, sample=True) == {2}


@pytest.mark.parametrize(
    ("n_lines", "sizes"),
    [(10, [10]), (40, [16, 16, 8]), (200, [25] * 8), (1_000, [64] * 15 + [40])],
)
def test_compiled_batches_are_shared_by_threads(n_lines: int, sizes: list[int]) -> None:
    pytest.importorskip("numba")
    from nmt.engines.cpu.compiled_search import CompiledEngine

    config = DecodingConfig(beam=4)
    n_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        most = CompiledEngine().count_most_hypotheses(n_lines * config.beam)
        batches = split_by_budget([[5, 3]] * n_lines, config, max_hypotheses=most)
        assert [len(batch) for batch in batches] == sizes
    finally:
        torch.set_num_threads(n_threads)
