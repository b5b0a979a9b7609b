"""A file with one number for each line of a corpus, such as nmt-score writes, read beside it.

Line n scores pair n, always: a file with another number of lines, or a line that is not a number, is
refused with its place. -inf is a number, because nmt-score gives it to impossible pairs; NaN is not
comparable with anything.
"""

import math
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nmt.corpus.text_files import TextFile, read_line_blocks
from nmt.system.errors import UserError

MAX_SHOWN = 40  # characters of a line


def add_scores(
    blocks: Iterator[tuple[Any, float]], path: Path, size: int
) -> Iterator[tuple[tuple[Any, list[bytes]], float]]:
    """Pair each raw block of a corpus with its lines of the file."""
    n = 0  # pairs so far
    both = zip_longest(blocks, read_line_blocks(TextFile(path), size))
    for block, of_file in both:
        lines = of_file[0] if of_file else []
        n_pairs = count_raw_pairs(block[0]) if block else 0
        if n_pairs < len(lines):
            raise UserError(
                f"{path}:{n + n_pairs + 1}: the corpus has no such line, but only {n + n_pairs:,}; "
                "give one score for each line of the corpus"
            )
        if n_pairs > len(lines):
            raise UserError(
                f"{path}: ends after line {n + len(lines):,}, but the corpus has more; "
                "give one score for each line of the corpus"
            )
        n += n_pairs
        raw, share = block
        yield (raw, lines), share


def count_raw_pairs(raw: Any) -> int:
    """Return the number of pairs of a raw block: of two lists of lines, or of one list or table."""
    return len(raw[0]) if isinstance(raw, tuple) else len(raw)


def parse_scores(lines: list[bytes], first: int, name: str) -> list[float]:
    """Read the numbers of a block that begins at line `first`."""
    scores = []
    for number, line in enumerate(lines, first):
        try:
            score = float(line)
        except ValueError:
            score = math.nan
        if math.isnan(score) or score == math.inf:
            shown = line.strip().decode(errors="replace")[:MAX_SHOWN]
            raise UserError(
                f"{name}:{number}: {shown!r} is not a finite number or -inf; give one score for each "
                "line of the corpus"
            )
        scores.append(score)
    return scores
