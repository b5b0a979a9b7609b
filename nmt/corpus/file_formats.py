"""Opens files with both sides, whose names tell their format, and turns rows into pairs: the cells of .tsv,
.jsonl, .parquet and of anything that gives Arrow tables.

Columns are named after the languages, or `src` and `tgt`, or inside a column `translation` as on
the hub. If a cell is not text, its row is bad: it becomes an empty pair with a complaint, never a missing
row, so line numbers do not shift. Tables pass through in record batches and are never whole in memory.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nmt.config import DataConfig
from nmt.corpus.text_files import Complaints, TextFile, TextPair, decode_lines, read_line_blocks
from nmt.corpus.tmx import read_tmx_pairs
from nmt.system.errors import UserError, describe_error
from nmt.system.extras import import_extra
from nmt.system.files import COMPRESSED
from nmt.system.strict_json import Fields

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_BATCH = 4096
AnyRow = TypeVar("AnyRow")
ParsedSides = tuple[list[str], list[str], Complaints]


@dataclass(frozen=True)
class Source:
    """How a corpus is read: blocks as they are stored, and a function that turns one into pairs."""

    blocks: Iterator[tuple[Any, float]]  # with the share of the corpus read by then
    parse: Callable[[Any, int], ParsedSides]  # of a raw block and the number of its first line


# ---- files ----------------------------------------------------------------------------------------------------


def open_file(text: TextFile, data: DataConfig, size: int) -> Source:
    """Open one file with both sides; its name tells its format."""
    name = text.name
    path = Path(text.member or text.path)
    kind = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    blocks = read_line_blocks(text, size)
    if kind == ".tsv":
        return Source(blocks, partial(parse_tsv, name=name))
    if kind == ".jsonl":
        return Source(blocks, partial(parse_jsonl, name=name, data=data))
    if kind == ".tmx":
        return open_pairs(read_tmx_pairs(text, data), size)
    if path.suffix == ".parquet" and text.member is None:
        return open_tables(read_parquet_tables(path, data), [path], data, size, name)
    raise UserError(
        f"{name}: is not a .tsv, .jsonl, .tmx or .parquet file; give two text files as src: and tgt:"
    )


def open_pairs(pairs: Iterator[tuple[TextPair, float]], size: int) -> Source:
    """Open a corpus that comes as pairs, with the share of it read so far."""

    def read() -> Iterator[tuple[list[TextPair], float]]:
        while block := list(islice(pairs, size)):
            yield [pair for pair, _ in block], block[-1][1]

    def parse(block: list[TextPair], first: int) -> ParsedSides:
        return [src for src, _ in block], [tgt for _, tgt in block], {}

    return Source(read(), parse)


def open_tables(
    tables: Iterable[Any], paths: list[Path], data: DataConfig, size: int, name: str
) -> Source:
    counts = [count_rows(path) for path in paths]
    total = 0 if None in counts else sum(filter(None, counts))  # 0 if unknown

    def read() -> Iterator[tuple[Any, float]]:
        n = 0
        for table in rebatch_tables(tables, size, data, name):
            n += len(table)
            share = min(1.0, n / total) if total else 1.0
            yield table, share
        if n == 0:
            raise UserError(f"{name}: is empty; it should hold one pair per row")

    return Source(read(), partial(parse_table, name=name))


# ---- text -------------------------------------------------------------------------------------------------------


def parse_tsv(lines: list[bytes], first: int, name: str) -> ParsedSides:
    texts, undecodable = decode_lines(lines, first, name)

    def parse_row(line: str, number: int) -> TextPair:
        cells = line.split("\t")
        if len(cells) != 2:
            raise UserError(
                f"{name}:{number}: {len(cells) - 1} tabs instead of one; each line must be source, tab, target"
            )
        return cells[0], cells[1]

    return _parse_rows(texts, first, parse_row, undecodable)


def _refuse_double_keys(pairs: list[tuple[str, Any]]) -> Fields:
    """Refuse duplicate keys: two halves of damaged lines can form one object with a key twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key occurs twice")
    return row


JSON = json.JSONDecoder(object_pairs_hook=_refuse_double_keys)


def parse_jsonl(lines: list[bytes], first: int, name: str, data: DataConfig) -> ParsedSides:
    texts, undecodable = decode_lines(lines, first, name)
    example = f'{{"{data.src}": "...", "{data.tgt}": "..."}}'

    def parse_row(line: str, number: int) -> TextPair:
        line_name = f"{name}:{number}"
        try:
            row = JSON.decode(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{line_name}: is not JSON ({describe_error(error)}); each line must be an object like {example}"
            ) from None
        if not isinstance(row, dict):
            raise UserError(
                f"{line_name}: {line[:40]!r} is not an object; each line must be one like {example}"
            )
        cells = row
        inner = row.get("translation")
        if isinstance(inner, dict):
            cells = {f"translation.{key}": value for key, value in inner.items()}
        src, tgt = _choose_columns(list(cells), data, line_name)
        return _check_cell(cells[src], src, line_name), _check_cell(cells[tgt], tgt, line_name)

    return _parse_rows(texts, first, parse_row, undecodable)


def _parse_rows(
    rows: Iterable[AnyRow],
    first: int,
    parse_row: Callable[[AnyRow, int], TextPair],
    bad: Complaints,
) -> ParsedSides:
    """Both sides of all rows, an empty pair for a bad one. An existing complaint takes precedence."""
    sides: list[TextPair] = []
    for i, row in enumerate(rows):
        try:
            sides.append(parse_row(row, first + i))
        except UserError as error:
            bad.setdefault(i, str(error))
            sides.append(("", ""))
    return [src for src, _ in sides], [tgt for _, tgt in sides], bad


def _choose_columns(names: Sequence[str], data: DataConfig, where: str) -> tuple[str, str]:
    """Which two of the columns are the source and the target."""
    known = (
        (f"translation.{data.src}", f"translation.{data.tgt}"),
        (data.src, data.tgt),
        ("src", "tgt"),
    )
    for src, tgt in known:
        if src in names and tgt in names:
            for column in (src, tgt):
                if names.count(column) > 1:
                    raise UserError(
                        f"{where}: {names.count(column)} columns have the name {column!r}; "
                        "rename all but one of them"
                    )
            return src, tgt
    present = ", ".join(map(repr, names)) or "none"
    raise UserError(
        f"{where}: the columns {data.src!r} and {data.tgt!r} are missing (found: {present[:200]}); "
        "rename the columns to the values of data.src and data.tgt, or to 'src' and 'tgt'"
    )


def _check_cell(value: Any, column: str, where: str) -> str:
    """The text of a cell. A line break inside it becomes a space: from here on a sentence is a
    line.
    """
    remedy = "fix or remove the row"
    if isinstance(value, UnicodeDecodeError):
        raise UserError(f"{where}: {column} is not valid UTF-8; {remedy}")
    if not isinstance(value, str):
        what = "null" if value is None else repr(value)[:40]
        raise UserError(f"{where}: {column} is {what} instead of text; {remedy}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(value[error.start]):04X}"
            raise UserError(
                f"{where}: {column} contains half a character (the lone surrogate {code}); {remedy}"
            ) from None
    return value.removesuffix("\n").removesuffix("\r").replace("\n", " ")


# ---- Arrow ------------------------------------------------------------------------------------------------------


def count_rows(path: Path) -> int | None:
    """The rows of a parquet file, by its metadata; None for other files."""
    if path.suffix != ".parquet":
        return None
    import_extra("pyarrow")
    from pyarrow import parquet

    with _explain_unreadable(path):
        return int(parquet.read_metadata(path).num_rows)


def read_parquet_tables(path: Path, data: DataConfig) -> Iterator["pyarrow.Table"]:
    pyarrow = import_extra("pyarrow")
    from pyarrow import parquet

    with _explain_unreadable(path):
        # without pre_buffer, which would keep all that is read of the file in memory
        file = parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        names = file.schema_arrow.empty_table().flatten().column_names
        columns = _choose_columns(names, data, str(path))
        for batch in file.iter_batches(ROWS_PER_BATCH, columns=columns):
            yield pyarrow.Table.from_batches([batch])


@contextlib.contextmanager
def _explain_unreadable(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: is not a readable parquet file ({describe_error(error)}); download it again"
        ) from None


def rebatch_tables(
    tables: Iterable["pyarrow.Table"], size: int, data: DataConfig, name: str
) -> Iterator["pyarrow.Table"]:
    """The source and the target column, `size` rows at a time."""
    pyarrow = import_extra("pyarrow")
    n = 0
    rest = []
    for table in tables:
        flat = table.flatten()  # a struct column becomes columns `translation.de`, `translation.en`
        sides = flat.select(_choose_columns(flat.column_names, data, name))
        for side in sides.columns:
            _check_offsets(side, name)
        rest.append(sides)
        n += len(table)
        while n >= size:
            whole = pyarrow.concat_tables(rest)
            yield whole[:size]
            n -= size
            rest = [whole[size:]]
    if n:
        yield pyarrow.concat_tables(rest)


def _check_offsets(column: "pyarrow.ChunkedArray", name: str) -> None:
    """Refuse texts that begin or end outside of what was read. Arrow reads files as they are, and a
    damaged one would crash the process or yield text from elsewhere in memory.
    """
    import pyarrow

    # As bytes, because a text that is not UTF-8 is a bad row, not a damaged file.
    if pyarrow.types.is_string(column.type):
        column = column.cast(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        raise UserError(
            f"{name}: is damaged ({describe_error(error)}); download it again"
        ) from None


def parse_table(table: "pyarrow.Table", first: int, name: str) -> ParsedSides:
    src, tgt = table.column_names

    def parse_row(row: tuple[Any, Any], number: int) -> TextPair:
        row_name = f"{name}: row {number}"
        return _check_cell(row[0], src, row_name), _check_cell(row[1], tgt, row_name)

    rows = zip(_list_cells(table[src]), _list_cells(table[tgt]), strict=True)
    return _parse_rows(rows, first, parse_row, {})


def _list_cells(column: "pyarrow.ChunkedArray") -> list[Any]:
    """The values of a column, with the error in place of invalid UTF-8."""
    try:
        return cast(list[Any], column.to_pylist())
    except UnicodeDecodeError:
        return [_read_cell(scalar) for scalar in column]


def _read_cell(scalar: "pyarrow.Scalar") -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error
