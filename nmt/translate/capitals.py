"""Translates lines in capitals in lower case, and puts the translation in capitals.

A BPE cuts a word in capitals into pieces that a corpus hardly has. A model of captions with a BLEU of
38 has 0 on the same lines in capitals, and 38 again this way (docs/learning.md). Names lose their
capital in the source, which costs little.
"""

import regex

WORD_IN_CAPITALS = regex.compile(r"\p{Lu}{2,}")
LEAST_WORDS = 2  # of two letters and more: one alone is probably a name


def is_in_capitals(line: str) -> bool:
    return line.isupper() and len(WORD_IN_CAPITALS.findall(line)) >= LEAST_WORDS


def lower_capitals(line: str) -> str:
    """Return a line in small letters, except for its first."""
    lowered = line.lower()
    first = regex.search(r"\p{L}", lowered)
    assert first is not None
    return lowered[: first.start()] + first[0].upper() + lowered[first.end() :]
