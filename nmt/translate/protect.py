"""Strings that must survive a translation: addresses, placeholders, long numbers.

With `decoding.protect` a line is translated as usual. If one of its strings is lost, the line is
searched again with these strings required (nmt/translate/phrases.py).
"""

from collections import Counter
from dataclasses import dataclass

import regex

PROTECTED = regex.compile(
    r"""
    (?:https?|ftp)://[^\s<>"'()\[\]{}]*[^\s<>"'()\[\]{}.,;:!?]  # a URL, without the mark that ends its sentence
    | www\.[\w.-]+\w(?:/[^\s<>"'()]*[^\s<>"'().,;:!?])?
    | (?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+  # an e-mail address
    | \$?\{[\w.:-]*\}  # {0}, {name}, ${x}
    | (?<![\w%])%(?:\d+\$)?[-+0]?\d*(?:\.\d+)?[sdifgx](?!\w)  # %s, %1$s, %.2f
    # a number, a date, a time, an IP address, but no 1,000.5, which is 1.000,5 in other languages
    | (?<![\w.,:/-])\d{1,3}(?:\.\d{1,3}){3}(?![\w:/-]|[.,]\d)
    | (?<![\w.,:/-])\d+(?:[:/-]\d+)*(?![\w:/-]|[.,]\d)
    """,
    regex.VERBOSE,
)
LONG_NUMBER = 4  # digits; shorter ones are often written as words


@dataclass(frozen=True)
class Survival:
    """How many protected strings there were, and how many their translations have."""

    n_strings: int = 0
    n_first: int = 0  # without a demand
    n_kept: int = 0

    def __add__(self, other: "Survival") -> "Survival":
        return Survival(
            self.n_strings + other.n_strings,
            self.n_first + other.n_first,
            self.n_kept + other.n_kept,
        )

    def __str__(self) -> str:
        return (
            f"protected strings: {self.n_kept:,} of {self.n_strings:,} are in their translations, "
            f"{self.n_kept - self.n_first:,} of them because they were required"
        )


def find_protected(text: str) -> Counter[str]:
    """Count the strings of a text that must survive."""
    found = Counter(one[0] for one in PROTECTED.finditer(text))
    for string in list(found):
        is_number = string[0].isdecimal() and "@" not in string
        if is_number and sum(map(str.isdecimal, string)) < LONG_NUMBER:
            del found[string]
    return found


def count_strings(by_line: dict[int, Counter[str]]) -> int:
    return sum(counter.total() for counter in by_line.values())


def find_lost(protected: Counter[str], translation: str) -> Counter[str]:
    """Return which strings a translation does not have as often as its source."""
    return protected - find_protected(translation) if protected else protected
