"""Sentence pairs from wherever they lie: texts, archives, tables, the hub's datasets, sacreBLEU's test sets, the demo.

A source is a stream of raw blocks and a function that makes pairs of one, so that a restart passes over blocks without
looking into them. Line n of one side meets line n of the other, always: a pair that cannot be read stops the reading
with file:line or, if data.on_bad_line says so, goes as a whole with its complaint. One pass, constant memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus import downloads as remote
from nmt.corpus.tables import (
    Sides,
    cut,
    n_rows,
    pairs_of_jsonl,
    pairs_of_table,
    pairs_of_tsv,
    tables_of_parquet,
)
from nmt.corpus.text_files import TextFile, decode, read_raw
from nmt.system.errors import UserError

if TYPE_CHECKING:
    import numpy

BLOCK = 4096  # pairs that `read_pairs` holds at a time
PACKED = (".gz", ".xz", ".zst")
ARCHIVES = (".tgz", ".txz", ".tar", *(f".tar{suffix}" for suffix in PACKED))


class Pair(NamedTuple):
    src: str
    tgt: str


class Block(NamedTuple):
    first: int  # line or row, from 1, of its first pair
    src: list[str]
    tgt: list[str]
    bad: list[str]  # complaints about the pairs left out
    share: float  # of the corpus, read by now; 1 where nobody can tell


Raw = Iterator[tuple[Any, float]]  # blocks as they lie, and the share read by then
Parse = Callable[[Any, int], Sides]  # of a raw block and the number of its first line


def describe(corpus: CorpusConfig) -> str:
    """A short name for messages and the ledger."""
    if corpus.src is not None:
        return f"{corpus.archive + ': ' if corpus.archive else ''}{corpus.src} + {corpus.tgt}"
    if corpus.dataset is not None:
        return " ".join(
            part for part in (corpus.dataset, corpus.subset, corpus.split or "train") if part
        )
    return corpus.file or (
        f"sacrebleu {corpus.sacrebleu}" if corpus.sacrebleu else f"demo {corpus.demo}"
    )


def read_pairs(corpus: CorpusConfig, data: DataConfig) -> Iterator[Pair]:
    """The raw pairs of `corpus` from data.src to data.tgt, in order, once. A bad one stops it."""
    for block in read_blocks(corpus, replace(data, on_bad_line="stop"), BLOCK):
        yield from map(Pair, block.src, block.tgt)


def read_blocks(
    corpus: CorpusConfig, data: DataConfig, size: int, skip: int = 0
) -> Iterator[Block]:
    """The same, `size` raw pairs at a time, without the first `skip` blocks."""
    raw, parse = _source(corpus, data, size)
    for i, (block, share) in islice(enumerate(raw), skip, None):
        first = 1 + i * size
        src, tgt, bad = parse(block, first)
        if bad:
            if data.on_bad_line == "stop":
                raise UserError(bad[min(bad)])
            src, tgt = (
                [text for k, text in enumerate(side) if k not in bad] for side in (src, tgt)
            )
        yield Block(first, src, tgt, [bad[k] for k in sorted(bad)], share)


def local_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """The files on this machine that `corpus` reads; `UserError` where one is missing."""
    if corpus.dataset is not None:
        return remote.files_of_dataset(corpus, data)
    names = (corpus.archive,) if corpus.archive else (corpus.src, corpus.tgt, corpus.file)
    paths = [Path(data.root) / name for name in names if name is not None]
    for path in paths:
        if corpus.archive is None and path.name.endswith(ARCHIVES):
            raise UserError(
                f"{path}: an archive; give archive: {path.name} with src and tgt, the names of two members"
            )
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "not found"
            raise UserError(
                f"{path}: {what}; give a file, relative paths start from data.root={data.root}"
            )
    return paths


# ---- sources ----------------------------------------------------------------------------------------------------


def _source(corpus: CorpusConfig, data: DataConfig, size: int) -> tuple[Raw, Parse]:
    if corpus.demo is not None:
        return _of_demo(corpus.demo, data, size)
    if corpus.sacrebleu is not None:
        return _of_two_texts(
            *remote.texts_of_test_set(corpus.sacrebleu, f"{data.src}-{data.tgt}"), size
        )
    paths = local_files(corpus, data)
    if corpus.dataset is not None:
        return _of_tables(
            remote.tables_of_dataset(corpus, data), paths, data, size, f"dataset {describe(corpus)}"
        )
    if corpus.archive is not None:
        if not paths[0].name.endswith(ARCHIVES):
            raise UserError(f"{paths[0]}: not an archive by its name; known: {', '.join(ARCHIVES)}")
        return _of_two_texts(TextFile(paths[0], corpus.src), TextFile(paths[0], corpus.tgt), size)
    if corpus.src is not None:
        return _of_two_texts(TextFile(paths[0]), TextFile(paths[1]), size)
    path, name = paths[0], str(paths[0])
    kind = path.with_suffix("").suffix if path.suffix in PACKED else path.suffix
    if kind == ".tsv":
        return read_raw(TextFile(path), size), partial(pairs_of_tsv, name=name)
    if kind == ".jsonl":
        return read_raw(TextFile(path), size), partial(pairs_of_jsonl, name=name, data=data)
    if path.suffix == ".parquet":
        return _of_tables(tables_of_parquet(path, data), paths, data, size, name)
    raise UserError(
        f"{path}: not a .tsv, .jsonl or .parquet file; two text files are given as src: and tgt:"
    )


def _of_tables(
    source: Iterable[Any], paths: list[Path], data: DataConfig, size: int, name: str
) -> tuple[Raw, Parse]:
    counts = [n_rows(path) for path in paths]
    total = sum(filter(None, counts)) if counts and None not in counts else 0

    def raw() -> Raw:
        n = 0
        for table in cut(source, size, data, name):
            n += len(table)
            yield table, min(1.0, n / total) if total else 1.0
        if n == 0:
            raise UserError(f"{name}: empty; it should hold one pair per row")

    return raw(), partial(pairs_of_table, name=name)


def _of_demo(split: str, data: DataConfig, size: int) -> tuple[Raw, Parse]:
    from nmt.corpus import demo

    if {data.src, data.tgt} != {"en", "de"}:
        raise UserError(
            f"demo: the embedded corpus is English-German, not data.src={data.src} data.tgt={data.tgt}"
        )
    pairs = demo.pairs(split)

    def parse(block: list[tuple[str, str]], first: int) -> Sides:
        english, german = [pair[0] for pair in block], [pair[1] for pair in block]
        return (english, german, {}) if data.src == "en" else (german, english, {})

    return ((block, 1.0) for block in iter(lambda: list(islice(pairs, size)), [])), parse


# ---- two texts --------------------------------------------------------------------------------------------------


def _of_two_texts(src: TextFile, tgt: TextFile, size: int) -> tuple[Raw, Parse]:
    def raw() -> Raw:
        for (a, share), (b, _) in zip_longest(
            read_raw(src, size), read_raw(tgt, size), fillvalue=([], 1.0)
        ):
            if len(a) != len(b):
                raise _unequal(src, tgt)
            yield (a, b), share

    def parse(block: tuple[list[bytes], list[bytes]], first: int) -> Sides:
        (a, bad), (b, more) = decode(block[0], first, src.name), decode(block[1], first, tgt.name)
        return a, b, more | bad

    return raw(), parse


def _unequal(src: TextFile, tgt: TextFile) -> UserError:
    """Both counts, and where the shorter side probably lost lines: there the lengths of its lines begin to follow those
    of the other side with a shift. The best place has the least sum of |log ratio of lengths|."""
    import numpy as np

    a, b = _log_lengths(src), _log_lengths(tgt)
    (short, x), (_, y) = sorted(((src, a), (tgt, b)), key=lambda side: len(side[1]))
    n, missing = len(x), len(y) - len(x)
    gain = np.abs(x - y[:n]) - np.abs(x - y[missing:])  # of a shift at this line
    place = int(np.argmin(np.concatenate([[0.0], np.cumsum(gain, dtype=np.float64)])))
    lines = "a line is" if missing == 1 else f"{missing:,} lines are"
    where = f"near line {place + 1:,}" if place < n else "at the end"
    return UserError(
        f"{src.name} has {len(a):,} lines but {tgt.name} has {len(b):,}; perhaps {lines} missing {where} "
        f"of {short.name}; line n of one must be the translation of line n of the other"
    )


def _log_lengths(text: TextFile) -> "numpy.ndarray":
    """The logarithm of the characters of each line, its mean taken off: languages differ in length."""
    import numpy as np

    logs = np.concatenate(
        [
            np.log1p([len(line.decode(errors="replace")) for line in lines]).astype(np.float32)
            for lines, _ in read_raw(text, BLOCK)
        ]
    )
    return logs - logs.mean()
