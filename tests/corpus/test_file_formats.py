"""Rows to pairs: which columns, which cells are text, what each mistake is called; never a whole
table in memory.
"""

import json
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from pytest import mark, raises

from nmt.config import DataConfig
from nmt.corpus.file_formats import (
    count_rows,
    parse_jsonl,
    parse_table,
    parse_tsv,
    read_parquet_tables,
    rebatch_tables,
)
from nmt.system.errors import UserError
from nmt.system.strict_json import Fields

DATA = DataConfig(src="en", tgt="de")


def jsonl(*lines: str) -> tuple[list[str], list[str], dict[int, str]]:
    return parse_jsonl([f"{line}\n".encode() for line in lines], 1, "x.jsonl", DATA)


def table(columns: Fields) -> tuple[list[str], list[str], dict[int, str]]:
    blocks = list(rebatch_tables([pa.table(columns)], 100, DATA, "x.parquet"))
    assert len(blocks) == 1
    return parse_table(blocks[0], 1, "x.parquet")


# ---- columns ----------------------------------------------------------------------------------------------------


@mark.parametrize(
    "row",
    [
        {"de": "d", "id": 1, "en": "e"},
        {"src": "e", "tgt": "d"},
        {"translation": {"de": "d", "fr": "f", "en": "e"}},
        {"en": "e", "de": "d", "src": "other", "tgt": "other"},
        {"id": 3, "translation": {"en": "e", "de": "d"}},
    ],
)
def test_columns_bear_the_languages_or_the_sides(row: Fields) -> None:
    assert jsonl(json.dumps(row)) == (["e"], ["d"], {})
    assert table({name: [cell] for name, cell in row.items()}) == (["e"], ["d"], {})


def test_other_columns_are_named(tmp_path: Path) -> None:
    what = (
        "the columns 'en' and 'de' are missing (found: 'en', 'fr'); "
        "rename the columns to the values of data.src and data.tgt, or to 'src' and 'tgt'"
    )
    assert jsonl('{"en": "a", "fr": "b"}')[2] == {0: f"x.jsonl:1: {what}"}
    parquet.write_table(pa.table({"en": ["a"], "fr": ["b"]}), tmp_path / "x.parquet")
    with raises(UserError) as caught:
        list(read_parquet_tables(tmp_path / "x.parquet", DATA))
    assert str(caught.value) == f"{tmp_path}/x.parquet: {what}"


# ---- cells ------------------------------------------------------------------------------------------------------


@mark.parametrize(
    "cell, text",
    [
        ("a\nb\r\n", "a b"),
        ("a\n", "a"),
        ("\n", ""),
        ("", ""),
        ("a\u2028b\x0b\x85\0", "a\u2028b\x0b\x85\0"),
        ("😀\r", "😀"),
    ],
)
def test_a_line_break_within_a_cell_becomes_a_space(cell: str, text: str) -> None:
    assert (
        jsonl(json.dumps({"en": cell, "de": "x"}))
        == table({"en": [cell], "de": ["x"]})
        == ([text], ["x"], {})
    )


@mark.parametrize(
    "line, complaint",
    [
        (
            '{"en": "a"',
            "is not JSON (Expecting ',' delimiter: line 1 column 11 (char 10)); each line must be an object like "
            '{"en": "...", "de": "..."}',
        ),
        ("", "is not JSON (Expecting value"),
        ("[" * 100_000, "is not JSON ("),
        ('{"en": ' + "1" * 5000 + "}", "is not JSON ("),
        ("[1]", "'[1]' is not an object; each line must be one like"),
        ("null", "'null' is not an object; each line must be one like"),
        (
            '{"en": "a", "de": "b", "de": "c"}',
            "is not JSON (a key occurs twice); each line must be",
        ),
        ('{"en": "a", "de": null}', "de is null instead of text; fix or remove the row"),
        ('{"translation": {"en": 3, "de": "b"}}', "translation.en is 3 instead of text"),
        (
            '{"translation": {"en": "a"}, "de": "b"}',
            "the columns 'en' and 'de' are missing (found: 'translation.en'",
        ),
        (
            '{"en": "\\ud83d", "de": "b"}',
            "en contains half a character (the lone surrogate U+D83D); fix or remove the row",
        ),
        (
            '{"en": "\\ude00\\ud83d", "de": "b"}',
            "en contains half a character (the lone surrogate U+DE00)",
        ),
    ],
)
def test_a_bad_line_of_jsonl_is_named_and_keeps_its_place(line: str, complaint: str) -> None:
    src, tgt, bad = jsonl('{"en": "a", "de": "b"}', line, '{"en": "\\ud83d\\ude00", "de": "c"}')
    assert (src, tgt) == (["a", "", "😀"], ["b", "", "c"])
    assert list(bad) == [1] and bad[1].startswith(f"x.jsonl:2: {complaint}") and "\n" not in bad[1]


def test_a_bad_line_of_tsv_is_named_and_keeps_its_place() -> None:
    lines = [b"a\tb\r\n", b"a\n", b"a\tb\tc\n", b"\xff\n", b"\t\n"]
    assert parse_tsv(lines, 7, "x.tsv") == (
        ["a", "", "", "", ""],
        ["b", "", "", "", ""],
        {
            1: "x.tsv:8: 0 tabs instead of one; each line must be source, tab, target",
            2: "x.tsv:9: 2 tabs instead of one; each line must be source, tab, target",
            3: "x.tsv:10:1: byte 0xff is not valid UTF-8; convert the file to UTF-8",
        },
    )


def test_a_bad_row_of_a_table_is_named_and_keeps_its_place() -> None:
    en = pa.array([b"a", b"\xffb", b"c", None, b"\xed\xa0\xbd"]).view(pa.string())
    assert table({"en": en, "de": ["1", "2", None, None, "5"]}) == (
        ["a", "", "", "", ""],
        ["1", "", "", "", ""],
        {
            1: "x.parquet: row 2: en is not valid UTF-8; fix or remove the row",
            2: "x.parquet: row 3: de is null instead of text; fix or remove the row",
            3: "x.parquet: row 4: en is null instead of text; fix or remove the row",
            4: "x.parquet: row 5: en is not valid UTF-8; fix or remove the row",
        },
    )
    nested = pa.array([None, {"en": "a", "de": "b"}, {"en": None, "de": "b"}])
    assert table({"translation": nested}) == (
        ["", "a", ""],
        ["", "b", ""],
        {
            0: "x.parquet: row 1: translation.en is null instead of text; fix or remove the row",
            2: "x.parquet: row 3: translation.en is null instead of text; fix or remove the row",
        },
    )
    assert table({"en": [1], "de": ["x"]})[2] == {
        0: "x.parquet: row 1: en is 1 instead of text; fix or remove the row"
    }


@mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
)
def test_every_kind_of_text_column_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    parquet.write_table(
        pa.table({"en": pa.array(["a", "é"], kind), "de": ["b", "c"]}), tmp_path / "x.parquet"
    )
    blocks = rebatch_tables(read_parquet_tables(tmp_path / "x.parquet", DATA), 9, DATA, "x")
    assert [parse_table(block, 1, "x") for block in blocks] == [(["a", "é"], ["b", "c"], {})]


@mark.parametrize("name", ["en", "de"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.parquet"
    columns = [pa.array(["a"]) for _ in range(4)]
    parquet.write_table(pa.table(columns, names=["en", "de", name, "id"]), path)
    with raises(UserError, match=rf"x\.parquet: 2 columns have the name '{name}'; rename"):
        list(read_parquet_tables(path, DATA))
    parquet.write_table(pa.table(columns, names=["en", "de", "id", "id"]), path)
    assert len(list(read_parquet_tables(path, DATA))) == 1


# ---- parquet ----------------------------------------------------------------------------------------------------


@mark.parametrize("size", [1, 3, 7, 10, 11])
@mark.parametrize("group", [1, 4, 100])
def test_tables_are_cut_into_equal_blocks(tmp_path: Path, size: int, group: int) -> None:
    rows = [{"id": i, "translation": {"de": f"d{i}", "en": f"e{i}"}} for i in range(10)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=group)
    blocks = list(
        rebatch_tables(read_parquet_tables(tmp_path / "x.parquet", DATA), size, DATA, "x")
    )
    assert [len(block) for block in blocks] == [min(size, 10 - i) for i in range(0, 10, size)]
    assert sum((parse_table(block, 1, "x")[0] for block in blocks), []) == [
        f"e{i}" for i in range(10)
    ]


def test_a_large_file_is_never_whole_in_memory(tmp_path: Path) -> None:
    text = [f"{i}" * 50 for i in range(120_000)]
    whole = pa.table({"en": text, "de": text, "embedding": text})
    parquet.write_table(whole, tmp_path / "x.parquet", row_group_size=2000)
    n_bytes = whole.nbytes
    del whole
    before = pa.total_allocated_bytes()
    most = max(
        pa.total_allocated_bytes()
        for _ in rebatch_tables(read_parquet_tables(tmp_path / "x.parquet", DATA), 500, DATA, "x")
    )
    assert 0 < most - before < n_bytes / 6


def test_rows_are_counted_by_metadata(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": range(123)}), tmp_path / "x.parquet", row_group_size=10)
    (tmp_path / "x.tsv").write_text("a\tb\n")
    (tmp_path / "y.parquet").write_bytes(b"PAR1 no PAR1")
    assert count_rows(tmp_path / "x.parquet") == 123 and count_rows(tmp_path / "x.tsv") is None
    with raises(UserError, match="y.parquet: is not a readable parquet file .*; download it again"):
        count_rows(tmp_path / "y.parquet")


def test_a_flipped_byte_under_a_checksum_is_found(tmp_path: Path) -> None:
    text = ["Hallo Welt", "Haus"] * 500
    parquet.write_table(
        pa.table({"en": text, "de": text}),
        tmp_path / "x.parquet",
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    content[content.index(b"Haus\n\0\0\0Hallo") + 11] ^= 1
    (tmp_path / "x.parquet").write_bytes(content)
    with raises(UserError, match="x.parquet: is not a readable parquet file"):
        list(read_parquet_tables(tmp_path / "x.parquet", DATA))
