"""What a terminal obeys is written out; everything else stays as it is."""

import re

from hypothesis import given
from hypothesis import strategies as st
from pytest import importorskip
from support.hostile_text import BIDI, CONTROLS, OBEYED, PAYLOADS, SEPARATORS

from nmt.system.escapes import escape_line, escape_lines, escape_markdown
from nmt.system.strict_yaml import format_yaml, parse_yaml

# what st.text() draws, which first tries for seconds what UTF-8 can write
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def test_each_character_that_is_obeyed_is_written_out() -> None:
    for character in [*CONTROLS, *SEPARATORS, *BIDI, "\n"]:
        assert escape_line(f"a{character}b") == f"a<U+{ord(character):04X}>b"


@given(st.one_of(TEXT, st.sampled_from(PAYLOADS)))
def test_nothing_else_changes(text: str) -> None:
    line = escape_line(text)
    assert OBEYED.isdisjoint(line) and "\n" not in line
    assert escape_line(line) == line
    if OBEYED.isdisjoint(text):
        assert escape_lines(text) == text
    for written, original in zip(escape_lines(text).split("\n"), text.split("\n"), strict=True):
        assert written == escape_line(original)


def test_what_languages_need_stays() -> None:
    for text in ("a\tb", "naïve café", "می\u200cخواهم", "👩\u200d🔬", "10\u202f000\xa0€"):
        assert escape_line(text) == text


def test_a_recorded_config_says_what_the_config_said() -> None:
    for text in [*CONTROLS, *SEPARATORS, *BIDI, *PAYLOADS]:
        values = {"name": f"a{text}b", "out": text}
        assert parse_yaml(format_yaml(values), "config.yaml").values == values


@given(st.one_of(TEXT, st.sampled_from(PAYLOADS)))
def test_markdown_shows_a_text_and_nothing_else(text: str) -> None:
    markdown_it = importorskip("markdown_it")
    parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    table = f"| head |\n|---|\n| a {escape_markdown(text)} b |\n"
    tokens = parser.parse(table)
    cells = [token.children for token in tokens if token.type == "inline"]
    assert len(cells) == 2 and tokens[-1].type == "table_close"
    assert {inline.type for inline in cells[1]} <= {"text", "text_special"}
    shown = "".join(inline.content for inline in cells[1])
    spaced = escape_line(re.sub(r"\s+", " ", text))
    assert shown == f"a {spaced} b"
