"""Rows to pairs: the cells of .tsv, .jsonl, .parquet and of whatever gives Arrow tables.

Columns bear the names of the languages, or `src` and `tgt`, or lie in a column `translation` as on the hub. A cell is
text or the row is bad: a bad row is a complaint beside an empty pair, never a missing row, so nothing shifts. Tables
pass through in record batches and are never whole in memory.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nmt.config import DataConfig
from nmt.corpus.text_files import Complaints, decode, reason
from nmt.system.errors import UserError

if TYPE_CHECKING:
    import pyarrow

ROWS = 4096  # of a table at a time
Row = TypeVar("Row")
Sides = tuple[list[str], list[str], Complaints]


# ---- text -------------------------------------------------------------------------------------------------------


def pairs_of_tsv(lines: list[bytes], first: int, name: str) -> Sides:
    texts, undecodable = decode(lines, first, name)

    def pair(line: str, n: int) -> tuple[str, str]:
        cells = line.split("\t")
        if len(cells) != 2:
            raise UserError(
                f"{name}:{n}: {len(cells) - 1} tabs instead of one; a line is source, tab, target"
            )
        return cells[0], cells[1]

    return _gathered(texts, first, pair, undecodable)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two halves of damaged lines can make one object, which then has a key twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key occurs twice")
    return row


JSON = json.JSONDecoder(object_pairs_hook=_object)


def pairs_of_jsonl(lines: list[bytes], first: int, name: str, data: DataConfig) -> Sides:
    texts, undecodable = decode(lines, first, name)
    example = f'{{"{data.src}": "...", "{data.tgt}": "..."}}'

    def pair(line: str, n: int) -> tuple[str, str]:
        place = f"{name}:{n}"
        try:
            row = JSON.decode(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{place}: not JSON ({reason(error)}); a line is an object like {example}"
            ) from None
        if not isinstance(row, dict):
            raise UserError(f"{place}: {line[:40]!r} is not an object like {example}")
        inner = row.get("translation")
        cells = (
            {f"translation.{key}": value for key, value in inner.items()}
            if isinstance(inner, dict)
            else row
        )
        src, tgt = _columns(list(cells), data, place)
        return _sentence(cells[src], src, place), _sentence(cells[tgt], tgt, place)

    return _gathered(texts, first, pair, undecodable)


def _gathered(
    rows: Iterable[Row], first: int, pair: Callable[[Row, int], tuple[str, str]], bad: Complaints
) -> Sides:
    """Both sides of all rows, an empty pair for a bad one. A complaint that is there already stands."""
    sides: list[tuple[str, str]] = []
    for i, row in enumerate(rows):
        try:
            sides.append(pair(row, first + i))
        except UserError as error:
            bad.setdefault(i, str(error))
            sides.append(("", ""))
    return [src for src, _ in sides], [tgt for _, tgt in sides], bad


def _columns(names: Sequence[str], data: DataConfig, place: str) -> tuple[str, str]:
    """Which two of the columns are the source and the target."""
    known = (
        (f"translation.{data.src}", f"translation.{data.tgt}"),
        (data.src, data.tgt),
        ("src", "tgt"),
    )
    for src, tgt in known:
        if src in names and tgt in names:
            return src, tgt
    found = ", ".join(map(repr, names)) or "none"
    raise UserError(
        f"{place}: no columns {data.src!r} and {data.tgt!r}, but {found[:200]}; "
        "name them after data.src and data.tgt, or 'src' and 'tgt'"
    )


def _sentence(value: Any, column: str, place: str) -> str:
    """The text of a cell. A line break inside it becomes a space: from here on a sentence is a line."""
    if not isinstance(value, str):
        what = (
            "not valid UTF-8"
            if isinstance(value, UnicodeDecodeError)
            else (f"{'null' if value is None else repr(value)[:40]} instead of text")
        )
        raise UserError(f"{place}: {column} is {what}; mend or remove the row")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{place}: {column} holds half a character (lone surrogate "
                f"U+{ord(value[error.start]):04X}); mend or remove the row"
            ) from None
    return value.removesuffix("\n").removesuffix("\r").replace("\n", " ")


# ---- Arrow ------------------------------------------------------------------------------------------------------


def n_rows(path: Path) -> int | None:
    """The rows of a parquet file, by its metadata; of other files they are not known."""
    if path.suffix != ".parquet":
        return None
    from pyarrow import parquet

    with _readable(path):
        return int(parquet.read_metadata(path).num_rows)


def tables_of_parquet(path: Path, data: DataConfig) -> Iterator["pyarrow.Table"]:
    import pyarrow
    from pyarrow import parquet

    with _readable(path):  # a buffer would hold all that is read of the file
        file = parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        names = file.schema_arrow.empty_table().flatten().column_names
        for batch in file.iter_batches(ROWS, columns=_columns(names, data, str(path))):
            yield pyarrow.Table.from_batches([batch])


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not a readable parquet file ({reason(error)}); fetch it again"
        ) from None


def cut(
    tables: Iterable["pyarrow.Table"], size: int, data: DataConfig, name: str
) -> Iterator["pyarrow.Table"]:
    """The source and the target column, `size` rows at a time."""
    import pyarrow

    n, rest = 0, []
    for table in tables:
        flat = table.flatten()  # a struct column becomes columns `translation.de`, `translation.en`
        rest.append(flat.select(_columns(flat.column_names, data, name)))
        n += len(table)
        while n >= size:
            whole = pyarrow.concat_tables(rest)
            yield whole[:size]
            n, rest = n - size, [whole[size:]]
    if n:
        yield pyarrow.concat_tables(rest)


def pairs_of_table(table: "pyarrow.Table", first: int, name: str) -> Sides:
    src, tgt = table.column_names

    def pair(row: tuple[Any, Any], n: int) -> tuple[str, str]:
        place = f"{name}: row {n}"
        return _sentence(row[0], src, place), _sentence(row[1], tgt, place)

    return _gathered(zip(_cells(table[src]), _cells(table[tgt]), strict=True), first, pair, {})


def _cells(column: "pyarrow.ChunkedArray") -> list[Any]:
    """The values of a column, in place of invalid UTF-8 the error."""
    try:
        return cast(list[Any], column.to_pylist())
    except UnicodeDecodeError:
        return [_cell(scalar) for scalar in column]


def _cell(scalar: "pyarrow.Scalar") -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error
