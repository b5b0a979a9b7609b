"""A share of an epoch's pairs in capitals, or with a capital at the start of each word, on both sides.

The BPE cuts a word in capitals into pieces that a corpus hardly has, so a model that has never seen a
headline cannot translate it. A pair is not changed if its text cannot be recovered from its pieces, if
it would have unknown characters or too many pieces, or if its source has no letters to change.
"""

import re
from collections.abc import Callable

import numpy as np

from nmt.config import AugmentConfig
from nmt.data.vocab import UNK, Vocab, Vocabulary


def capitalise_words(text: str) -> str:
    """Make the first letter of each word a capital; str.title() would also touch those after an
    apostrophe.
    """
    return re.sub(r"(?<!\S)[^\w\s]*\w", lambda start: start[0].title(), text)


class CaseChanger:
    """Changes the letters of pairs that are given as pieces."""

    def __init__(self, vocab: Vocabulary, augment: AugmentConfig) -> None:
        self.sides, self.augment = (vocab.src, vocab.tgt), augment
        symbols = {symbol for side in self.sides for symbol in side.list_user_symbols()}
        longest_first = map(re.escape, sorted(symbols, key=len, reverse=True))
        self.symbols = re.compile(f"({'|'.join(longest_first) or '(?!)'})")

    def change_share(
        self, rows: list[list[np.ndarray]], limit: float, random: np.random.Generator
    ) -> None:
        """Change some pairs, in place. `rows` are the sentences of the source and of the target."""
        chances = random.random(len(rows[0]))
        for i in np.flatnonzero(chances < self.augment.upper + self.augment.title):
            change = str.upper if chances[i] < self.augment.upper else capitalise_words
            src = self.change(self.sides[0], rows[0][i], change)
            tgt = self.change(self.sides[1], rows[1][i], change)
            if src is None or tgt is None or np.array_equal(src, rows[0][i]):
                continue
            if max(len(src), len(tgt)) <= limit:
                rows[0][i], rows[1][i] = src, tgt

    def change(
        self, vocab: Vocab, ids: np.ndarray, change: Callable[[str], str]
    ) -> np.ndarray | None:
        """Return the pieces of the changed sentence, behind the tags that it has; None if it must
        not be changed.
        """
        (text,) = vocab.decode([ids.tolist()])
        (again,) = vocab.encode([text])
        n_tags = len(ids) - len(again)  # no text contains them
        if n_tags < 0 or UNK in ids or ids[n_tags:].tolist() != again:
            return None
        parts = self.symbols.split(text)  # every second one is a symbol
        parts[::2] = map(change, parts[::2])
        (changed,) = vocab.encode(["".join(parts)])
        return None if UNK in changed else np.array([*ids[:n_tags], *changed], ids.dtype)
