"""Reads the n-best lists that nmt-translate writes: lines of columns, or JSON objects.

Candidates come with their source, in the order of the file, and every source has at least one: so
the output made from a list has as many lines as the text that was translated.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from nmt.agreement import check_agreement
from nmt.corpus.text_files import TextFile, read_lines
from nmt.system.errors import UserError
from nmt.system.strict_json import parse_json

LINKS = re.compile(r"(\d+-\d+( \d+-\d+)*)?")  # may follow a text


@dataclass(frozen=True)
class NBest:
    """The candidates of one source, best first, and the scores that they came with."""

    source: str
    texts: list[str]
    scores: list[float]


def read_n_best(
    path: str, source_path: str | None, needed: tuple[str, str | None] = ("", None)
) -> Iterator[NBest]:
    """Read a list of `--json`, which holds its sources, or of `--n-best`, whose sources are the lines
    of another file. `needed` is a direction such as en-de, behind a word for whose it is.
    """
    lines = read_lines(TextFile(Path(path)))
    first = next(lines)  # an empty file is refused
    numbered = enumerate(chain([first], lines), 1)
    if first.startswith("{"):
        if source_path is not None:
            raise UserError(f"{path}: contains the sources; leave out --src")
        for number, line in numbered:
            yield _parse_object(line, f"{path}:{number}", needed)
    elif source_path is None:
        raise UserError(
            f"{path}: has no sources; give the text that was translated as --src FILE, or a list that "
            "nmt-translate wrote with --json"
        )
    else:
        yield from _read_columns(path, numbered, source_path)


def _parse_object(line: str, place: str, needed: tuple[str, str | None]) -> NBest:
    value: Any = parse_json(line.encode(), place)
    source: Any = None
    direction: Any = None
    try:
        source, direction = value["source"], value.get("direction")
        texts = [one["text"] for one in value["candidates"]]
        scores = [float(one["score"]) for one in value["candidates"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        texts = scores = []
    strings = [source, "" if direction is None else direction, *texts]
    are_texts = all(isinstance(one, str) for one in strings)
    if not texts or not are_texts or not all(map(math.isfinite, scores)):
        raise UserError(
            f"{place}: is not an object with source and candidates, each with text and a finite score; "
            "give what nmt-translate wrote with --json"
        )
    check_agreement("direction", place, direction, *needed, "give a model of the other direction")
    return NBest(source, texts, scores)


def _read_columns(
    path: str, numbered: Iterator[tuple[int, str]], source_path: str
) -> Iterator[NBest]:
    """Collect consecutive lines `number TAB score TAB text` of one number, counted from 0."""
    rows = (_parse_columns(line, f"{path}:{number}") for number, line in numbered)
    sources = read_lines(TextFile(Path(source_path)))
    n = 0  # sources so far
    for index, group in groupby(rows, key=lambda row: row.number):
        own = list(group)
        source = next(sources, None)
        if index != n:
            raise UserError(
                f"{own[0].place}: its number is {index}, and not {n}; numbers count from 0: give the whole "
                "list, in its order"
            )
        if source is None:
            raise UserError(
                f"{own[0].place}: its number is {index}, but {source_path} has {n:,} lines; "
                "give the text that was translated"
            )
        yield NBest(source, [row.text for row in own], [row.score for row in own])
        n += 1
    if next(sources, None) is not None:
        raise UserError(
            f"{path}: ends with number {n - 1}, but {source_path} has more than {n:,} lines; "
            "give the text that was translated"
        )


class NBestLine(NamedTuple):
    place: str
    number: int
    score: float
    text: str


def _parse_columns(line: str, place: str) -> NBestLine:
    cells: Sequence[str] = line.split("\t")
    try:
        row = NBestLine(place, int(cells[0]), float(cells[1]), cells[2])
    except (IndexError, ValueError):
        row = None
    # More cells come from a text with a tab, whose end would be lost.
    is_whole = LINKS.fullmatch("\t".join(cells[3:])) is not None
    if row is None or not math.isfinite(row.score) or not is_whole:
        raise UserError(
            f"{place}: is not number TAB finite score TAB text; give what nmt-translate --n-best wrote"
        )
    return row
