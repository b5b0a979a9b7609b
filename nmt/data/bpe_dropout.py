"""BPE-dropout (Provilkov et al. 2020, algorithm 1) on arrays.

At each step every possible merge of a word is left out with chance `rate`, the best of the others
is done, and a word is finished when none is left. All words of n symbols take a step together, so
a text costs as many steps as its longest word has letters. At rate 0 the pieces are
SentencePiece's. Its own sampling cannot be used here: it salts the seed in each process, so an
epoch could not be drawn again, and a merge that was once left out never comes back, which makes text
longer than the paper's rule at the same rate.
"""

from itertools import chain

import numpy as np
import sentencepiece

from nmt.data.store import TokenRow, find_bounds, gather_runs
from nmt.data.vocab import SPACE, is_user_symbol

NO_RANK = 2**16 - 1  # the rank of a merge that does not exist or is left out
EMPTY = 2**32 - 1  # the key of a slot that holds no pair
KNUTH = np.uint32(2_654_435_769)  # multiplicative hashing


# ---- the merges of a model ---------------------------------------------------------------------------------------


class MergeTable:
    """What can be merged, best first, and the letters of each piece. Bytes, tags, other symbols and
    the unknown id stay as they are.
    """

    def __init__(self, model: bytes) -> None:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = processor.get_piece_size()
        pieces = [processor.id_to_piece(i) for i in range(self.size)]
        id_of = {
            piece: i
            for i, piece in enumerate(pieces)
            if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
        }
        self.space = id_of.get(SPACE, -1)

        # The letters of each piece; a piece that cannot be spelt is its own only letter.
        letters = [[i] for i in range(self.size)]
        for piece, i in id_of.items():
            spelling = [id_of.get(letter, -1) for letter in piece]
            if is_user_symbol(processor, i):
                continue
            if -1 not in spelling:
                letters[i] = spelling
        self.n_letters = np.array([len(spelling) for spelling in letters])
        self.letters = np.array(list(chain.from_iterable(letters)), np.uint32)
        self.starts = np.cumsum(self.n_letters) - self.n_letters

        # Every pair of pieces that makes a piece. The score of a piece says when it was learned.
        merged = [i for i in range(self.size) if len(letters[i]) > 1]
        merged.sort(key=lambda i: -processor.get_score(i))
        self.merged = np.array(merged, np.uint32)  # rank -> piece
        entries = []
        for rank, i in enumerate(merged):
            for k in range(1, len(pieces[i])):
                left, right = id_of.get(pieces[i][:k]), id_of.get(pieces[i][k:])
                if left is not None and right is not None:
                    entries.append((left * self.size + right, rank))
        self._fill_slots(entries)

    def _fill_slots(self, entries: list[tuple[int, int]]) -> None:
        """Build a hash table with linear probing, at most a quarter full."""
        bits = (4 * len(entries)).bit_length()
        self.shift = np.uint32(32 - bits)
        self.keys = np.full(2**bits, EMPTY, np.uint32)
        self.ranks = np.full(2**bits, NO_RANK, np.uint32)
        slots = self._hash(np.array([key for key, _ in entries], np.uint32))
        for (key, rank), slot in zip(entries, slots.tolist(), strict=True):
            while self.keys[slot] != EMPTY:
                slot = (slot + 1) % 2**bits
            self.keys[slot], self.ranks[slot] = key, rank

    def _hash(self, keys: np.ndarray) -> np.ndarray:
        return (keys * KNUTH) >> self.shift

    def find_ranks(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the rank of the merge of each pair of pieces, or NO_RANK."""
        keys = (left * np.uint32(self.size) + right).ravel()
        slots = self._hash(keys)
        stored = self.keys[slots]
        astray = np.flatnonzero((stored != keys) & (stored != EMPTY))  # they met another pair's key
        while len(astray):
            slots[astray] = (slots[astray] + 1) % len(self.keys)
            stored = self.keys[slots[astray]]
            astray = astray[(stored != keys[astray]) & (stored != EMPTY)]
        return self.ranks[slots].reshape(left.shape)


# ---- drawing a segmentation --------------------------------------------------------------------------------------


def segment(
    merges: MergeTable,
    ids: np.ndarray,
    counts: np.ndarray,
    rate: float,
    random: np.random.Generator,
) -> TokenRow:
    """Draw the pieces of sentences anew: all pieces end to end (uint16), and how many each sentence
    has.

    `ids` are the pieces of the sentences end to end, `counts` how many each has.
    """
    n_letters = merges.n_letters[ids]
    letters = gather_runs(merges.letters, merges.starts[ids], n_letters)
    pieces_begin = find_bounds(n_letters)  # among the letters
    sentences = pieces_begin[find_bounds(counts)]  # where each begins there, and the end

    # A word begins at a space, and so does what a sentence begins with.
    is_begin = letters == merges.space
    is_begin[sentences[sentences < len(letters)]] = True
    words = np.flatnonzero(is_begin)
    pieces, n_pieces = _merge_words(merges, letters, words, rate, random)

    words_begin = find_bounds(n_pieces)  # among the pieces
    return pieces.astype(np.uint16), np.diff(words_begin[np.searchsorted(words, sentences)])


def _merge_words(
    merges: MergeTable,
    letters: np.ndarray,
    words: np.ndarray,
    rate: float,
    random: np.random.Generator,
) -> TokenRow:
    """Return the pieces of all words, and how many each word has. A word begins at `words` among
    the letters.
    """
    lengths = np.diff(words, append=len(letters))
    by_length = np.argsort(lengths, kind="stable")
    longest = int(lengths.max(initial=0))
    bounds = np.searchsorted(lengths[by_length], np.arange(longest + 2))

    # From the longest words down: those that lost a symbol continue together with those that have n
    # letters. The pieces of a finished word are put where its letters were.
    pieces = np.empty_like(letters)
    n_pieces = np.zeros_like(words)
    current = by_length[:0]  # words of n symbols
    symbols = np.empty((longest, 0), np.uint32)  # theirs (n, words)
    for n in range(longest, 0, -1):
        fresh = by_length[bounds[n] : bounds[n + 1]]
        current = np.concatenate((current, fresh))
        positions = np.arange(n)[:, None]
        symbols = np.concatenate((symbols, letters[words[fresh] + positions]), axis=1)
        best, rank = _choose_merges(merges, symbols, rate, random)

        is_done = rank == NO_RANK
        done = current[is_done]
        pieces[words[done] + positions] = symbols[:, is_done]
        n_pieces[done] = n

        current, symbols = current[~is_done], symbols[:, ~is_done]
        best, rank = best[~is_done], rank[~is_done]
        symbols = np.where(positions[:-1] < best, symbols[:-1], symbols[1:])  # (n - 1, words)
        symbols[best, np.arange(len(best))] = merges.merged[rank]
    return gather_runs(pieces, words, n_pieces), n_pieces


def _choose_merges(
    merges: MergeTable, symbols: np.ndarray, rate: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the best merge of each word is, the leftmost of equals, and its rank: NO_RANK if no
    merge is left. `symbols` are those of words that have n, (n, words).
    """
    n = len(symbols)
    ranks = merges.find_ranks(symbols[:-1], symbols[1:])  # (n - 1, words)
    ranks[random.random(ranks.shape, np.float32) < rate] = NO_RANK
    # rank and place in one number
    numbers = ranks * np.int64(n) + np.arange(n - 1)[:, None]
    rank, position = np.divmod(numbers.min(axis=0, initial=NO_RANK * n), n)
    return position, rank
