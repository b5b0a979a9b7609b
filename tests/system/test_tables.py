"""A table looks the same in every format, and its cells do nothing but appear."""

import csv
import io

from pytest import mark

from nmt.system.tables import Cell, Code, Html, Table, format_interval

TABLE = Table(
    ["name", "score", "digest"],
    [["a|b <i>", "9.5", Code("a1|b2")], ["wide\u202ename", "10.25", None]],
)


def test_text_is_aligned_and_does_nothing_but_appear() -> None:
    assert "\n".join(TABLE.to_lines()) == (
        "name              score  digest\na|b <i>           9.5    a1|b2\nwide<U+202E>name  10.25"
    )


def test_markdown() -> None:
    assert TABLE.to_markdown() == (
        "| name | score | digest |\n"
        "|---|---|---|\n"
        "| a\\|b \\<i> | 9.5 | `a1\\|b2` |\n"
        "| wide<U+202E>name | 10.25 |  |".replace("<U", "\\<U")
    )


@mark.parametrize(
    "cell, shown",
    [
        ("<b>&", "&lt;b&gt;&amp;"),
        (Code("<b>"), "<code>&lt;b&gt;</code>"),
        (Html("<b>x</b>"), "<b>x</b>"),
        (None, ""),
        (2.5, "2.5"),
        ("\ud800", "\ufffd"),
    ],
)
def test_html_cells(cell: Cell, shown: str) -> None:
    assert f"<tbody>\n<tr><td>{shown}</td></tr>\n</tbody>" in Table(["head"], [[cell]]).to_html()


def test_a_stacked_html_table_names_its_columns_in_each_cell() -> None:
    html = Table(["a<"], [["1"]]).to_html("cap", is_stacked=True)
    assert '<td data-label="a&lt;">1</td>' in html
    assert '<div class="wide stacked" role="region" tabindex="0" aria-label="cap">' in html


def test_csv_has_all_digits() -> None:
    text = Table(["a", "b"], [[1 / 3, None], ['say "x", y', Code("c")]]).to_csv()
    rows = list(csv.reader(io.StringIO(text)))
    assert rows == [["a", "b"], [str(1 / 3), ""], ['say "x", y', "c"]]


def test_an_interval() -> None:
    assert format_interval(26.714, 27.98) == "26.71 to 27.98"
