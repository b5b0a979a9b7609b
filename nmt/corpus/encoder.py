"""Encodes a corpus by looking up its words: the ids of `Vocab.encode`, several times as fast.

No piece spans a space, so the ids of a line are those of its words, and most words have occurred
before. Lines are bytes, which are cheaper to split and to look up than text.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from nmt.data.vocab import SPACE, Vocab

SPACE_BYTES = SPACE.encode()
MAX_KNOWN_WORDS = 500_000  # some 120 MB


class CorpusEncoder:
    """The ids of many lines, equal to those of `Vocab.encode`."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._ids_of_words = _WordIds(vocab)

    def __call__(self, lines: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids end to end (uint16), and how many of them each line has (int64)."""
        look_up = self._ids_of_words.__getitem__
        is_wordwise = self._vocab.is_wordwise
        rows = []
        for line in lines:
            if is_wordwise and SPACE_BYTES not in line:
                rows.append(b"".join(map(look_up, line.split(b" "))))
            else:
                rows.append(_encode_to_bytes(self._vocab, line))
        counts = np.fromiter(map(len, rows), np.int64, len(rows)) // 2
        return np.frombuffer(b"".join(rows), np.uint16), counts


class _WordIds(dict[bytes, bytes]):
    """word -> its ids. Beyond MAX_KNOWN_WORDS new ones are encoded, but no longer kept."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab

    def __missing__(self, word: bytes) -> bytes:
        ids = _encode_to_bytes(self.vocab, word)
        if len(self) < MAX_KNOWN_WORDS:
            self[word] = ids
        return ids


def _encode_to_bytes(vocab: Vocab, line: bytes) -> bytes:
    (ids,) = vocab.encode([line])
    return array("H", ids).tobytes()
