"""Encodes a corpus by looking up its words: the ids of `Vocab.encode`, several times as fast.

No piece spans a space, so the ids of a line are those of its words, and most words have occurred
before. They are looked up many at a time, in a hash table of arrays, which is faster than a dict
because no word has to become an object.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from nmt.data.store import TokenRow, gather_runs
from nmt.data.vocab import SPACE, Vocab

SPACE_BYTES = SPACE.encode()
MAX_KNOWN_WORDS = 1_000_000  # some 60 MB
WORDS_AT_A_TIME = 1 << 18
SLOT_BITS = 21  # so that a third of the slots is always free
KEY_BYTES = 32  # words that do not fit are rare, and are encoded each time they occur
# For each length of a word, the bytes of its key that hold the word; the last one holds its length.
KEY_MASKS = np.tri(KEY_BYTES, KEY_BYTES, -1, np.uint8) * np.uint8(255)


class CorpusEncoder:
    """The ids of many lines, equal to those of `Vocab.encode`."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._table = _WordTable()
        # The ids of the known words end to end, and where those of each number begin. No word has
        # the number 0.
        self._ids = np.empty(0, np.uint16)
        self._starts = np.zeros(2, np.int64)

    def __call__(self, lines: Sequence[bytes]) -> TokenRow:
        """Return all ids end to end (uint16), and how many of them each line has (int64)."""
        if not lines:
            return np.empty(0, np.uint16), np.empty(0, np.int64)
        text = b" ".join(lines) + bytes(KEY_BYTES)
        line_lengths = np.fromiter(map(len, lines), np.int64, len(lines))
        line_ends = np.cumsum(line_lengths + 1) - 1
        word_ends = self._find_word_ends(text, lines, line_ends)
        word_starts = np.concatenate(([0], word_ends[:-1] + 1))
        ids = []
        counts = []
        for first in range(0, len(word_ends), WORDS_AT_A_TIME):
            part = slice(first, first + WORDS_AT_A_TIME)
            part_ids, part_counts = self._encode_words(text, word_starts[part], word_ends[part])
            ids.append(part_ids)
            counts.append(part_counts)
        n_before = np.cumsum(np.concatenate(counts))[np.searchsorted(word_ends, line_ends)]
        return np.concatenate(ids), np.diff(n_before, prepend=0)

    def _find_word_ends(
        self, text: bytes, lines: Sequence[bytes], line_ends: np.ndarray
    ) -> np.ndarray:
        """Return where words end in `text`, which is all lines. A line that must be encoded as a
        whole counts as one word.
        """
        if not self._vocab.is_wordwise:
            return line_ends
        is_end = np.frombuffer(text, np.uint8) == ord(" ")
        for i, line in enumerate(lines):
            if SPACE_BYTES in line:
                is_end[line_ends[i] - len(line) : line_ends[i]] = False
        is_end[line_ends] = True
        return np.flatnonzero(is_end)

    def _encode_words(self, text: bytes, starts: np.ndarray, ends: np.ndarray) -> TokenRow:
        """Return the ids of words of `text`, end to end, and how many each word has."""
        lengths = ends - starts
        is_short = lengths < KEY_BYTES
        short = np.flatnonzero(is_short)
        long = np.flatnonzero(~is_short)
        keys = _make_keys(text, starts[short], lengths[short])
        numbers = np.empty(len(starts), np.int64)
        numbers[short], new = self._table.look_up(keys)
        # New words are numbered after those known before, and long words after them.
        numbers[long] = len(self._starts) - 1 + len(new) + np.arange(len(long))
        unknown = np.concatenate((short[new], long))
        words = [
            text[start:end]
            for start, end in zip(starts[unknown].tolist(), ends[unknown].tolist(), strict=True)
        ]
        rows = self._vocab.encode(words)
        new_ids = np.fromiter(chain.from_iterable(rows), np.uint16)
        new_ends = len(self._ids) + np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)))
        all_ids = np.concatenate((self._ids, new_ids))
        all_starts = np.concatenate((self._starts, new_ends))
        self._starts = all_starts[: self._table.size + 1]
        self._ids = all_ids[: self._starts[-1]]
        first = all_starts[numbers]
        counts = all_starts[numbers + 1] - first
        return gather_runs(all_ids, first, counts), counts


def _make_keys(text: bytes, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a key for each word: its bytes, zeros, and its length; (words, KEY_BYTES / 8) uint64."""
    windows = np.ndarray(len(text) - KEY_BYTES + 1, f"V{KEY_BYTES}", text, strides=(1,))
    keys = windows[starts].view(np.uint8).reshape(-1, KEY_BYTES)
    keys &= KEY_MASKS.take(lengths, axis=0)
    keys[:, -1] = lengths
    return keys.view(np.uint64)


class _WordTable:
    """Numbers words, beginning with 1: a hash table with open addressing."""

    def __init__(self) -> None:
        self.size = 1  # the next number
        self._keys = np.empty((1 + MAX_KNOWN_WORDS + WORDS_AT_A_TIME, KEY_BYTES // 8), np.uint64)
        self._slots = np.zeros(1 << SLOT_BITS, np.int32)  # each a number, or 0
        # Random, so that no text can be crafted whose words all share a slot.
        draw = np.random.default_rng()
        self._multipliers = draw.integers(1 << 64, size=KEY_BYTES // 8, dtype=np.uint64) | 1

    def look_up(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each word, and which of them are new, each of these once. If there
        would be too many, they are not kept.
        """
        first = self.size
        self._keys[first : first + len(keys)] = keys
        slots = (keys @ self._multipliers >> np.uint64(64 - SLOT_BITS)).astype(np.int64)
        numbers = np.empty(len(keys), np.int64)
        left = np.arange(len(keys))
        while len(left):
            tried = slots[left]
            is_free = self._slots[tried] == 0
            self._slots[tried[is_free]] = first + left[is_free]  # of several words, one gets it
            stored = self._slots[tried]
            numbers[left] = stored
            differs = self._keys.take(stored, axis=0) != keys.take(left, axis=0)
            others = np.flatnonzero(differs.view(np.uint32))  # all four parts of a key at once
            left = left[others]
            slots[left] = (tried[others] + 1) % len(self._slots)

        # consecutive numbers for the new ones
        new = np.flatnonzero(numbers == first + np.arange(len(keys)))
        end = first + len(new)
        renumbered = np.zeros(len(keys), np.int64)
        renumbered[new] = np.arange(first, end)
        is_new = numbers >= first
        numbers[is_new] = renumbered[numbers[is_new] - first]
        if end > MAX_KNOWN_WORDS:
            self._slots[slots[new]] = 0
        else:
            self._slots[slots[new]] = renumbered[new]
            self._keys[first:end] = keys[new]
            self.size = end
        return numbers, new
