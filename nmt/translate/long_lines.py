"""Splits a line that is too long for the model into parts: where a sentence ends, else a clause,
else a word.

Parts are of similar size, so that the last is not a fragment without context. Only a part in which
there is no better place ends within a word.
"""

import math
import re
from collections.abc import Sequence

from nmt.data.vocab import SPACE

CLOSING = "\"'”’»)]"  # may follow the mark that ends a sentence or a clause
SENTENCE_END = re.compile(rf"[.!?…؟۔।][{re.escape(CLOSING)}]*$")
CLAUSE_END = re.compile(rf"[,;:،؛–—][{re.escape(CLOSING)}]*$")
CJK_SENTENCE_END, CJK_CLAUSE_END = ("。", "！", "？"), ("，", "、", "；", "：")  # no space follows


def split_pieces(pieces: Sequence[str], longest: int) -> list[range]:
    """Split a line into parts of at most `longest` pieces."""
    parts = []
    start, n = 0, len(pieces)
    while n - start > longest:
        n_parts = math.ceil((n - start) / longest)  # the fewest that the rest can be split into
        aim = math.ceil((n - start) / n_parts)  # the size of each if all were equal
        end = _choose_end(pieces, start, aim, longest)
        parts.append(range(start, end))
        start = end
    return [*parts, range(start, n)]


def _choose_end(pieces: Sequence[str], start: int, aim: int, longest: int) -> int:
    """Choose the best end for a part of about `aim` pieces; of equally good ones the nearest to the
    aim.
    """
    best = start + max(1, aim // 2)  # a shorter part would be a fragment
    best_rating = (-1, 0)
    for end in range(best, start + longest + 1):
        rating = (_rate_end(pieces, end), -abs(end - start - aim))
        if rating > best_rating:
            best, best_rating = end, rating
    return best


def _rate_end(pieces: Sequence[str], end: int) -> int:
    """Rate an end of a part before piece `end`: 3 after a sentence, 2 a clause, 1 a word, else 0."""
    before = "".join(pieces[max(0, end - 3) : end])  # a mark and what closes after it fit in three
    if not pieces[end].startswith(SPACE):
        if before.endswith(CJK_SENTENCE_END):
            return 3
        return 2 if before.endswith(CJK_CLAUSE_END) else 0
    if SENTENCE_END.search(before):
        return 3
    return 2 if CLAUSE_END.search(before) else 1
