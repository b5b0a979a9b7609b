"""What a corpus looks like before anything is decided about it: how much text, what cannot be read,
what repeats, and whether its lines look like translations of one another.

One pass and about 40 bytes a pair, so that 36 million pairs fit into memory. Equal texts are found
by 64-bit digests, as in cleaning.py.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from nmt.config import CleanConfig, CorpusConfig, DataConfig
from nmt.corpus.cleaning import find_broken_rule
from nmt.corpus.reader import Block, Pair, describe_corpus, read_blocks
from nmt.corpus.shards import PAIRS_PER_SHARD
from nmt.score.text_checks import look_unrelated
from nmt.system.errors import UserError

WINDOW = 1000  # pairs whose lengths are compared
# Of a script without spaces between words: Thai, Lao, Tibetan and Burmese; Khmer; Kana; Han.
UNSPACED_LETTER = re.compile(
    "[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]"
)
RULES = CleanConfig(identical=True)
ROW = np.dtype(  # as the last fields of Survey
    [
        ("digests", "u8", 2),
        ("characters", "u4", 2),
        ("words", "u4", 2),
        ("has_unspaced", "?", 2),
        ("is_identical", "?"),
        ("is_usable", "?"),
    ]
)
# A tenth of bad lines is another encoding or format, not some bad lines.
MAX_UNREADABLE = 0.1


@dataclass(frozen=True)
class Survey:
    """The pairs of a corpus that can be read: arrays with a row for each, and a column for each
    side.
    """

    n_unreadable: int
    complaint: str  # about the first of them
    alphabet: int  # different characters
    digests: np.ndarray  # (pairs, 2) uint64
    characters: np.ndarray  # (pairs, 2)
    words: np.ndarray  # (pairs, 2), between spaces
    has_unspaced: np.ndarray  # (pairs, 2): letters of a script without spaces between words
    is_identical: np.ndarray  # (pairs,)
    is_usable: np.ndarray  # (pairs,): breaks no rule that looks at the pair alone

    @property
    def n_pairs(self) -> int:
        return len(self.digests)

    @cached_property
    def is_repeated(self) -> np.ndarray:
        """True for each pair that equals an earlier one."""
        src, tgt = self.digests.T  # weighed differently, because (a, b) is not (b, a)
        _, first = np.unique(src * np.uint64(3) + tgt, return_index=True)
        is_repeated = np.ones(self.n_pairs, bool)
        is_repeated[first] = False
        return is_repeated

    @cached_property
    def is_unique(self) -> np.ndarray:
        """True for each pair of which neither side occurs in a different one, once for equal pairs."""
        is_unique = ~self.is_repeated
        first = self.digests[is_unique]
        for side in range(2):
            values, counts = np.unique(first[:, side], return_counts=True)
            is_unique &= np.isin(self.digests[:, side], values[counts == 1])
        return is_unique

    @property
    def is_unspaced(self) -> np.ndarray:
        """True for each side, (2,), whose words have no spaces between them."""
        return self.has_unspaced.mean(0) > 0.5

    def shares_a_side(self, other: "Survey") -> np.ndarray:
        """True for each pair that has its source or its target in common with a pair of `other`."""
        src, tgt = map(np.isin, self.digests.T, other.digests.T)
        return src | tgt

    def find_misaligned(self) -> list[tuple[int, int]]:
        """The first and the last pair, from 1, of each stretch whose sides have lengths like those
        of unrelated lines.
        """
        stretches: list[tuple[int, int]] = []
        for first in range(0, self.n_pairs - WINDOW + 1, WINDOW):
            if not look_unrelated(self.characters[first : first + WINDOW]):
                continue
            start = first + 1
            if stretches and stretches[-1][1] == first:
                start, _ = stretches.pop()
            stretches.append((start, first + WINDOW))
        return stretches


def survey_corpus(corpus: CorpusConfig, data: DataConfig) -> Survey:
    """Read a corpus once. Pairs that cannot be read are counted; too many of them are a `UserError`."""
    rows: list[np.ndarray] = []
    n_unreadable = 0
    complaint = ""
    alphabet: set[str] = set()
    for block in read_blocks(corpus, data, PAIRS_PER_SHARD):
        n_unreadable += len(block.bad)
        complaint = complaint or "".join(block.bad[:1])
        alphabet.update(*block.src, *block.tgt)
        rows.append(_survey_block(block))
    table = np.concatenate(rows)
    if n_unreadable > MAX_UNREADABLE * (n_unreadable + len(table)):
        raise UserError(
            f"{complaint} ({n_unreadable:,} lines of {describe_corpus(corpus)} are bad)"
        )
    return Survey(
        n_unreadable,
        complaint,
        len(alphabet),
        *(table[name] for name in ROW.names or ()),
    )


def _survey_block(block: Block) -> np.ndarray:
    rows = np.empty(len(block.src), ROW)
    for i, (src, tgt) in enumerate(zip(block.src, block.tgt, strict=True)):
        pair = Pair(src.strip(), tgt.strip())
        rows[i] = (
            [int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) for text in pair],
            [len(text) for text in pair],
            [len(text.split()) for text in pair],
            [UNSPACED_LETTER.search(text) is not None for text in pair],
            pair.src == pair.tgt,
            find_broken_rule(pair, RULES) is None,
        )
    return rows
