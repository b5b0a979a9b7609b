"""BPE-dropout (Provilkov et al. 2020, algorithm 1) as arrays: at each step every possible merge of a word is left out
with chance `rate`, the best of the others is done, and a word ends where none is left.

All words of n symbols take a step together, so a text costs as many steps as its longest word has letters. At rate 0
the pieces are SentencePiece's. Its own sampling will not do: the seed is salted in each process, so no epoch could be
drawn twice, and a merge once left out never comes back, which makes text longer than the paper's rule at that rate.
"""

from itertools import chain

import numpy as np
import sentencepiece

from nmt.data.vocab import SPACE

Array = np.ndarray
NONE = 2**16 - 1  # the rank of no merge
EMPTY = 2**32 - 1  # the key of no pair


class Merges:
    """What can be merged, best first, and the letters of each piece. Bytes and lost characters stay as they are."""

    def __init__(self, model: bytes) -> None:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = processor.get_piece_size()
        is_plain = [
            not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
            for i in range(self.size)
        ]
        id_of = {processor.id_to_piece(i): i for i in range(self.size) if is_plain[i]}
        self.space = id_of.get(SPACE, -1)
        spelt = {i: [id_of.get(letter, -1) for letter in piece] for piece, i in id_of.items()}
        letters = [spelt[i] if -1 not in spelt.get(i, [-1]) else [i] for i in range(self.size)]
        self.n_letters = np.array(list(map(len, letters)))
        self.letters = np.array(list(chain.from_iterable(letters)), np.uint32)
        self.starts = np.cumsum(self.n_letters) - self.n_letters
        merged = sorted(
            (i for i in range(self.size) if len(letters[i]) > 1),
            key=lambda i: -processor.get_score(i),
        )
        self.made = np.array(merged, np.uint32)  # rank -> piece
        pieces = map(processor.id_to_piece, merged)
        halves = [
            (id_of.get(piece[:k]), id_of.get(piece[k:]), rank)
            for rank, piece in enumerate(pieces)
            for k in range(1, len(piece))
        ]
        self._fill_table(
            [
                (left * self.size + right, rank)
                for left, right, rank in halves
                if left is not None and right is not None
            ]
        )

    def _fill_table(self, entries: list[tuple[int, int]]) -> None:
        """An open hash table of at least four times the room."""
        bits = (4 * len(entries)).bit_length()
        self.shift, mask = np.uint32(32 - bits), 2**bits - 1
        self.keys, self.ranks = (
            np.full(2**bits, EMPTY, np.uint32),
            np.full(2**bits, NONE, np.uint32),
        )
        keys = np.array([key for key, _ in entries], np.uint32)
        for (key, rank), slot in zip(entries, self._slots(keys).tolist(), strict=True):
            while self.keys[slot] != EMPTY:
                slot = slot + 1 & mask
            self.keys[slot], self.ranks[slot] = key, rank

    def _slots(self, keys: Array) -> Array:
        return (keys * np.uint32(2_654_435_769)) >> self.shift

    def _find(self, left: Array, right: Array) -> Array:
        """The rank of the merge of each pair."""
        keys = (left * np.uint32(self.size) + right).ravel()
        slots = self._slots(keys)
        found, ranks = self.keys[slots], self.ranks[slots]
        astray = np.flatnonzero((found != keys) & (found != EMPTY))
        while len(astray):
            slots[astray] = (slots[astray] + 1) % len(self.keys)
            found, ranks[astray] = self.keys[slots[astray]], self.ranks[slots[astray]]
            astray = astray[(found != keys[astray]) & (found != EMPTY)]
        return ranks.reshape(left.shape)

    def segment(
        self, ids: Array, lengths: Array, rate: float, random: np.random.Generator
    ) -> tuple[Array, Array]:
        """The pieces of sentences end to end, drawn anew, and how many are of each sentence."""
        letters = gathered(self.letters, self.starts[ids], self.n_letters[ids])
        ends = np.concatenate(([0], np.cumsum(self.n_letters[ids])))
        sentences = ends[
            np.concatenate(([0], np.cumsum(lengths)))
        ]  # where they begin among the letters
        begins = letters == self.space
        begins[sentences[sentences < len(letters)]] = True
        words = np.flatnonzero(begins)
        pieces, counts = self._merge(letters, words, rate, random)
        ends = np.concatenate(([0], np.cumsum(counts)))
        return pieces.astype(np.uint16), np.diff(ends[np.searchsorted(words, sentences)])

    def _merge(
        self, letters: Array, words: Array, rate: float, random: np.random.Generator
    ) -> tuple[Array, Array]:
        lengths = np.diff(words, append=len(letters))
        order = np.argsort(lengths, kind="stable")
        bounds = np.searchsorted(lengths[order], np.arange(int(lengths.max(initial=0)) + 2))
        done: list[tuple[Array, Array]] = []
        names, rows = order[:0], np.empty((len(bounds) - 2, 0), np.uint32)  # (n symbols, words)
        for n in range(len(bounds) - 2, 0, -1):
            fresh = order[bounds[n] : bounds[n + 1]]
            names = np.concatenate((names, fresh))
            rows = np.concatenate((rows, letters[words[fresh] + np.arange(n)[:, None]]), axis=1)
            ranks = self._find(rows[:-1], rows[1:])
            ranks[random.random(ranks.shape, np.float32) < rate] = NONE
            best = np.min(ranks * np.int64(n) + np.arange(n - 1)[:, None], axis=0, initial=NONE * n)
            goes_on = best < NONE * n
            done.append((names[~goes_on], rows[:, ~goes_on]))
            names, rows = names[goes_on], rows[:, goes_on]
            ranks, places = np.divmod(best[goes_on], n)
            rows = np.where(np.arange(n - 1)[:, None] < places, rows[:-1], rows[1:])
            rows[places, np.arange(len(names))] = self.made[ranks]
        counts = np.empty_like(lengths)
        for names, rows in done:
            counts[names] = len(rows)
        firsts = np.cumsum(counts) - counts
        pieces = np.empty(int(counts.sum()), np.uint32)
        for names, rows in done:
            pieces[firsts[names] + np.arange(len(rows))[:, None]] = rows
        return pieces, counts


def gathered(values: Array, starts: Array, lengths: Array) -> Array:
    """The runs of `values` that begin at `starts`, end to end."""
    ends = np.cumsum(lengths)
    return values[
        np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)
    ]
