"""Sentence pairs from every kind of source: texts, archives, tables, the hub's datasets, sacreBLEU's
test sets, the demo.

A source is a stream of raw blocks and a function that parses one. Line n of one side is always paired
with line n of the other: a pair that cannot be read stops the reading with file:line or, if
data.on_bad_line says so, is dropped as a whole with its complaint. One pass, constant memory.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.downloads import find_files_beside, find_test_set_files
from nmt.corpus.file_formats import (
    ParsedSides,
    Source,
    open_file,
    open_pairs,
    open_tables,
)
from nmt.corpus.hub import (
    describe_dataset,
    fetch_dataset_files,
    find_dataset_files,
    read_dataset_tables,
)
from nmt.corpus.text_files import LinesOfSides, TextFile, decode_lines, read_line_blocks
from nmt.system.errors import UserError, explain_missing
from nmt.system.files import COMPRESSED

if TYPE_CHECKING:
    import numpy

PAIRS_AT_ONCE = 4096  # that `read_pairs` holds at a time
ARCHIVES = (".tgz", ".txz", ".tbz2", ".zip", ".tar", *(f".tar{suffix}" for suffix in COMPRESSED))


class Pair(NamedTuple):
    src: str
    tgt: str


class Block(NamedTuple):
    """Consecutive pairs of a corpus."""

    first: int  # line or row, from 1, of its first pair
    src: list[str]
    tgt: list[str]
    bad: list[str]  # complaints about the pairs left out
    share: float  # of the corpus, read by now; 1 if unknown


def describe_corpus(corpus: CorpusConfig) -> str:
    """A short name for messages and the ledger."""
    archive = f"{corpus.archive}: " if corpus.archive else ""
    if corpus.src is not None:
        return f"{archive}{corpus.src} + {corpus.tgt}"
    if corpus.dataset is not None:
        return describe_dataset(corpus)
    if corpus.file:
        return archive + corpus.file
    if corpus.sacrebleu:
        return f"sacrebleu {corpus.sacrebleu}"
    return f"demo {corpus.demo}"


def read_pairs(corpus: CorpusConfig, data: DataConfig) -> Iterator[Pair]:
    """Read the raw pairs of `corpus` from data.src to data.tgt, in order, once. A bad one stops it."""
    for block in read_blocks(corpus, replace(data, on_bad_line="stop"), PAIRS_AT_ONCE):
        yield from map(Pair, block.src, block.tgt)


def read_blocks(corpus: CorpusConfig, data: DataConfig, size: int) -> Iterator[Block]:
    """Read pairs in blocks of `size` raw ones."""
    source = _open_source(corpus, data, size)
    for number, (raw, share) in enumerate(source.blocks):
        first = 1 + number * size
        src, tgt, bad = source.parse(raw, first)
        if bad and data.on_bad_line == "stop":
            raise UserError(bad[min(bad)])
        if bad:  # a pair goes as a whole, so the sides stay parallel
            src = [text for i, text in enumerate(src) if i not in bad]
            tgt = [text for i, text in enumerate(tgt) if i not in bad]
        yield Block(first, src, tgt, [bad[i] for i in sorted(bad)], share)


def find_local_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """List the files on this machine that `corpus` reads, without those that are to come from the hub;
    `UserError` if one is missing.
    """
    if corpus.dataset is not None:
        return find_dataset_files(corpus, data)
    names = [corpus.src, corpus.tgt, corpus.file]
    if corpus.archive:
        names = [corpus.archive]  # src and tgt name its members
    paths = [Path(data.root) / name for name in names if name is not None]
    for path in paths:
        if corpus.archive is None and path.name.endswith(ARCHIVES):
            raise UserError(
                f"{path}: is an archive; give archive: {path.name}, and two of its members as src and tgt"
            )
        if not os.path.isfile(path):  # Path.is_file would raise if the name is too long
            remedy = f"give a file (relative paths start from data.root={data.root}; ~, $ and * mean themselves)"
            raise explain_missing(path, remedy)
    if len(paths) == 2 and os.path.samefile(*paths):
        raise UserError(f"{paths[1]}: is the same file as {paths[0]}; give two different files")
    return paths


def refuse_corpus_files(
    outputs: Iterable[Path], data: DataConfig, test_set: str | None = None
) -> None:
    """Refuse an output that the user named if a corpus of `data` or the named test set is read from it, or
    if it is a config.
    """
    own: list[Path] = []
    if test_set is not None:
        own += find_files_beside(test_set, data) or ()
    for corpus in data.corpora:
        with contextlib.suppress(UserError):  # it may be gone, and need not be on this machine
            own += find_local_files(corpus, data)
    inputs = [file.resolve() for file in own]
    for path in outputs:
        if path.resolve() in inputs:
            raise UserError(f"{path}: is a corpus or a test set; choose another file")
        if path.suffix in (".yaml", ".yml") and path.exists():
            raise UserError(f"{path}: exists, and is named like a config; choose another file")


def fetch_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """List the files that `corpus` reads, after fetching what is on the hub."""
    if corpus.dataset is not None:
        return fetch_dataset_files(corpus, data)
    return find_local_files(corpus, data)


# ---- sources ----------------------------------------------------------------------------------------------------


def _open_source(corpus: CorpusConfig, data: DataConfig, size: int) -> Source:
    if corpus.demo is not None:
        return _open_demo(corpus.demo, data, size)
    if corpus.sacrebleu is not None:
        src, tgt = find_test_set_files(corpus.sacrebleu, data)
        return _open_two_texts(TextFile(src), TextFile(tgt), size)
    paths = fetch_files(corpus, data)
    if corpus.dataset is not None:
        tables = read_dataset_tables(paths, corpus, data)
        return open_tables(tables, paths, data, size, f"dataset {describe_corpus(corpus)}")
    texts = list(map(TextFile, paths))
    if corpus.archive is not None:
        (archive,) = paths
        if not archive.name.endswith(ARCHIVES):
            raise UserError(
                f"{archive}: is not a supported archive; its name must end in one of {', '.join(ARCHIVES)}"
            )
        members = filter(None, (corpus.src, corpus.tgt, corpus.file))
        texts = [TextFile(archive, member) for member in members]
    if corpus.file is not None:
        return open_file(texts[0], data, size)
    return _open_two_texts(texts[0], texts[1], size)


def _open_demo(split: str, data: DataConfig, size: int) -> Source:
    from nmt.corpus.demo import generate_pairs

    if {data.src, data.tgt} != {"en", "de"}:
        raise UserError(
            f"demo: the demo corpus is English-German, but data.src={data.src} and "
            f"data.tgt={data.tgt}; set them to en and de"
        )

    pairs = generate_pairs(split)
    if data.src == "de":
        pairs = ((german, english) for english, german in pairs)
    return open_pairs(((pair, 1.0) for pair in pairs), size)


# ---- two texts --------------------------------------------------------------------------------------------------


def _open_two_texts(src: TextFile, tgt: TextFile, size: int) -> Source:
    def read() -> Iterator[tuple[LinesOfSides, float]]:
        nothing: tuple[list[bytes], float] = ([], 1.0)
        both = zip_longest(
            read_line_blocks(src, size), read_line_blocks(tgt, size), fillvalue=nothing
        )
        for (src_lines, share), (tgt_lines, _) in both:
            if len(src_lines) != len(tgt_lines):
                raise _explain_unequal_lengths(src, tgt)
            yield (src_lines, tgt_lines), share

    def parse(block: LinesOfSides, first: int) -> ParsedSides:
        src_texts, src_bad = decode_lines(block[0], first, src.name)
        tgt_texts, tgt_bad = decode_lines(block[1], first, tgt.name)
        return src_texts, tgt_texts, tgt_bad | src_bad

    return Source(read(), parse)


def _explain_unequal_lengths(src: TextFile, tgt: TextFile) -> UserError:
    """Name both numbers of lines, and where the shorter side probably lost some.

    From there on the lengths of its lines follow those of the other side with a shift: the best
    place has the least sum of |log ratio of lengths|.
    """
    import numpy as np

    for text in (src, tgt):
        first_line, _ = next(read_line_blocks(text, 1))
        _, bad = decode_lines(first_line, 1, text.name)
        if bad:  # perhaps UTF-16 or a compressed file, where lines mean nothing
            return UserError(bad[0])
    src_logs = _log_lengths(src)
    tgt_logs = _log_lengths(tgt)
    counts = f"{src.name} has {len(src_logs):,} lines but {tgt.name} has {len(tgt_logs):,}"
    if len(src_logs) < len(tgt_logs):
        short, short_logs, long_logs = src, src_logs, tgt_logs
    else:
        short, short_logs, long_logs = tgt, tgt_logs, src_logs
    n = len(short_logs)
    missing = len(long_logs) - n
    mismatch = np.abs(short_logs - long_logs[:n])
    mismatch_shifted = np.abs(short_logs - long_logs[missing:])
    cost = np.cumsum(mismatch - mismatch_shifted, dtype=np.float64)  # of a shift after this line
    line = int(np.argmin(np.concatenate([[0.0], cost])))
    lines = "a line is" if missing == 1 else f"{missing:,} lines are"
    where = f"near line {line + 1:,}" if line < n else "at the end"
    return UserError(
        f"{counts}; perhaps {lines} missing {where} of {short.name}; "
        "line n of one must be the translation of line n of the other"
    )


def _log_lengths(text: TextFile) -> "numpy.ndarray":
    """The logarithm of the characters of each line, minus its mean, because languages differ in
    length.
    """
    import numpy as np

    blocks = []
    for lines, _ in read_line_blocks(text, PAIRS_AT_ONCE):
        lengths = [len(line.decode(errors="replace")) for line in lines]
        blocks.append(np.log1p(lengths).astype(np.float32))
    logs = np.concatenate(blocks)
    return logs - logs.mean()
