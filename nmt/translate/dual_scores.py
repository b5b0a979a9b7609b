"""How well two models of opposite directions agree that a pair is a translation, and both find it
likely: dual conditional cross-entropy (Junczys-Dowmunt 2018), by which corpora are filtered.

With H(y|x) and H(x|y), the negative log-probabilities per piece, the score is exp(-(|H(y|x) -
H(x|y)| + (H(y|x) + H(x|y)) / 2)): between 0 and 1, higher is better, and 0 for a pair that is
impossible in either direction.
"""

import math

from nmt.translate.pair_scores import PairScore


def compute_dual_score(forward: PairScore, reverse: PairScore) -> float:
    if not forward.piece_ids or not reverse.piece_ids:  # impossible, or both sides are empty
        return 0.0
    there = -forward.log_prob / len(forward.piece_ids)
    back = -reverse.log_prob / len(reverse.piece_ids)
    return math.exp(-(abs(there - back) + (there + back) / 2))
