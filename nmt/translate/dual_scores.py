"""How well two models of opposite directions agree that a pair is a translation, and both find it
likely: dual conditional cross-entropy (Junczys-Dowmunt 2018), by which corpora are filtered.

With H(y|x) and H(x|y), the negative log-probabilities per piece, the score is exp(-(|H(y|x) -
H(x|y)| + (H(y|x) + H(x|y)) / 2)): between 0 and 1, higher is better, and 0 for a pair that is
impossible in either direction.
"""

import math
from collections.abc import Generator, Iterator
from typing import IO

from nmt.translate.pair_scores import PairScore, PairScorer
from nmt.translate.score_stream import PairChunk, ScoreTotals
from nmt.translate.stream import write_uninterrupted


def dual_score_stream(
    forward: PairScorer,
    reverse: PairScorer,
    chunks: Iterator[PairChunk],
    out: IO[bytes],
    totals: ScoreTotals,
) -> Generator[PairChunk]:
    """Write a line for each pair; yields each chunk once it is written. The totals are the forward
    model's.
    """
    for chunk in chunks:
        there = forward.score_pairs(chunk.sources, chunk.targets)
        back = reverse.score_pairs(chunk.targets, chunk.sources)
        rows = []
        for number, scores in enumerate(zip(there, back, strict=True), chunk.first):
            totals.add(scores[0], number)
            rows.append(f"{compute_dual_score(*scores):.6g}\n")
        write_uninterrupted(out, "".join(rows).encode())
        yield chunk


def compute_dual_score(forward: PairScore, reverse: PairScore) -> float:
    if not forward.piece_ids or not reverse.piece_ids:  # impossible, or both sides are empty
        return 0.0
    there = -forward.log_prob / len(forward.piece_ids)
    back = -reverse.log_prob / len(reverse.piece_ids)
    return math.exp(-(abs(there - back) + (there + back) / 2))
