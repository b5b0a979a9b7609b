"""From pieces to characters: which part of a translation corresponds to which part of its source.

An alignment links pieces (nmt/translate/alignment.py). A document has characters, and puts its
markup around those.
"""

from collections.abc import Sequence

import regex

from nmt.data.vocab import SPACE, Vocab, Vocabulary
from nmt.documents.document import Link

BETWEEN_SPACES = regex.compile("[^ ]+")
Characters = tuple[int, int]


def link_characters(
    vocab: Vocabulary, source: str, text: str, ids: Sequence[int], alignment: Sequence[int]
) -> list[Link]:
    """Return for each piece of a translation its characters, and those of the source that it follows."""
    (source_ids,) = vocab.src.encode([source])
    sources = place_pieces(vocab.src, source_ids, source)
    targets = place_pieces(vocab.tgt, ids, text)
    return [Link(sources[i], target) for i, target in zip(alignment, targets, strict=False)]


def place_pieces(vocab: Vocab, ids: Sequence[int], text: str) -> list[Characters]:
    """Return the characters that each piece of a text has. A piece of a word with unknown characters, or
    with some that are spelled in bytes, has the whole word.
    """
    words: list[list[str]] = []
    for piece in vocab.pieces(ids):
        if piece.startswith(SPACE) or not words:
            words.append([])
        words[-1].append(piece.removeprefix(SPACE))
    spans = [found.span() for found in BETWEEN_SPACES.finditer(text)]
    if sum(any(word) for word in words) != len(spans):  # the text is not that of the pieces
        return [(0, len(text))] * len(ids)
    places: list[Characters] = []
    remaining = iter(spans)
    for word in words:
        start, stop = next(remaining) if any(word) else (0, 0)
        if sum(map(len, word)) != stop - start:
            places += [(start, stop)] * len(word)
            continue
        for piece in word:
            places.append((start, start + len(piece)))
            start += len(piece)
    return places
