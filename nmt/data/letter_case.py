"""A share of an epoch's pairs in capitals, or with a capital at the start of each word, on both sides.

The BPE cuts a word in capitals into pieces that a corpus hardly has, so a model that has never seen a
headline translates it badly. One pair in a hundred is enough, and costs ordinary text nothing.
A pair stays as it is if its text cannot be got back from its pieces, or if it would have unknown
characters or too many pieces.
"""

import re
from collections.abc import Callable

import numpy as np

from nmt.config import AugmentConfig
from nmt.data.vocab import UNK, Vocab

LetterChange = Callable[[str], str]


def capitalise_words(text: str) -> str:
    """Make the first letter of each word a capital; str.title() would also touch those after an
    apostrophe.
    """
    return re.sub(r"(?<!\S)[^\w\s]*\w", lambda start: start[0].title(), text)


def choose_changes(
    augment: AugmentConfig, n: int, random: np.random.Generator
) -> list[tuple[int, LetterChange]]:
    """Return the numbers of the pairs, of n, that change, and how."""
    chances = random.random(n)
    is_title = chances < augment.upper + augment.title
    return [
        (int(i), str.upper if chances[i] < augment.upper else capitalise_words)
        for i in np.flatnonzero(is_title)
    ]


class CaseChanger:
    """Changes the letters of sentences that are given as pieces."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        symbols = sorted(vocab.list_user_symbols(), key=len, reverse=True)
        self.symbols = re.compile(f"({'|'.join(map(re.escape, symbols))})") if symbols else None

    def change(self, ids: np.ndarray, change: LetterChange) -> np.ndarray | None:
        """Return the pieces of the changed sentence, behind the tags that it has; None if it has to
        stay as it is.
        """
        (text,) = self.vocab.decode([ids.tolist()])
        (again,) = self.vocab.encode([text])
        n_tags = len(ids) - len(again)  # no text contains them
        if n_tags < 0 or UNK in ids or ids[n_tags:].tolist() != again:
            return None
        (changed,) = self.vocab.encode([self._change_text(text, change)])
        if UNK in changed or not changed:
            return None
        return np.concatenate((ids[:n_tags], np.array(changed, ids.dtype)))

    def _change_text(self, text: str, change: LetterChange) -> str:
        if self.symbols is None:
            return change(text)
        parts = self.symbols.split(text)  # every second one is a symbol
        return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))
