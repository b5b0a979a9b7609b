"""Batches are bounded by the memory that their hypotheses may take."""

from nmt.translate.batching import split_by_budget


def test_a_batch_is_bounded_by_what_its_hypotheses_may_say() -> None:
    def sizes(n_pieces: int, n_lines: int, beam: int = 4) -> set[int]:
        batches = list(split_by_budget([[5] * n_pieces] * n_lines, beam, 4_096))
        assert sorted(i for batch in batches for i in batch) == list(range(n_lines))
        return {len(batch) for batch in batches[:-1]}

    assert sizes(32, 1_000) == {4_096 // 32}  # usual ones: the source alone decides
    assert sizes(2, 3_000) == {16 * 4_096 // (4 * 52)}
    assert sizes(1_000, 20, beam=16) == {3}
    assert sizes(1_000, 20, beam=1_000) == {1}
