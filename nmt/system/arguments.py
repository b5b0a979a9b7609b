"""What callers from Python give: taken, or refused in one line that says what to give instead."""

from collections.abc import Iterable
from typing import TypeVar

from nmt.system.errors import UserError

Kind = TypeVar("Kind")


def take(
    value: object, kind: type[Kind] | tuple[type[Kind], ...], name: str, complaint: str
) -> Kind:
    """Return the value if it is of this kind; `complaint` completes "NAME is VALUE, ..."."""
    if not isinstance(value, kind):
        raise UserError(f"{name} is {value!r:.60}, {complaint}")
    return value


def take_text(text: object, name: str) -> str:
    return take(text, str, name, "which is not text; give a str")


def take_line(text: object, name: str) -> str:
    """Return a line without its end."""
    line = take_text(text, name).removesuffix("\n")
    if "\n" in line:
        raise UserError(
            f"{name} is {line!r:.60}, with a line break inside; give one line each "
            "(running text: translate_text)"
        )
    return line


def take_lines(lines: object) -> list[str]:
    """Return the lines that a caller gave, without line ends: an open file gives its lines too."""
    remedy = 'give a list of lines, such as ["A sentence."], or one text to translate_text'
    return [
        take_line(text, f"line {number}") for number, text in _number(lines, "translate", remedy)
    ]


def take_pairs(pairs: object, sides: str) -> tuple[list[str], list[str]]:
    """Return the two sides of the pairs that a caller gave. A pair is a tuple: two lists of two lines
    look like two pairs.
    """
    remedy = f"give pairs: list(zip({sides}))"
    columns: tuple[list[str], list[str]] = [], []
    for number, pair in _number(pairs, "pairs", remedy):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UserError(f"pair {number} is {pair!r:.60}, not a tuple of two; {remedy}")
        for column, text in zip(columns, pair, strict=True):
            column.append(take_line(text, f"a side of pair {number}"))
    return columns


def _number(items: object, name: str, remedy: str) -> Iterable[tuple[int, object]]:
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise UserError(f"{name}: got {items!r:.60}; {remedy}")
    return enumerate(items, 1)
