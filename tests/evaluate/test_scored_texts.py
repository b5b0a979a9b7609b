"""translations.json holds the lines of the last evaluation, and only so many."""

import json
from dataclasses import replace
from pathlib import Path

from pytest import raises

from nmt.evaluate.scored_texts import ScoredTexts, read_scored_texts, write_scored_texts
from nmt.system.errors import UserError
from nmt.system.files import read_json

TEXTS = ScoredTexts("average", "test", "en-de", "a" * 64, ["a\u2028b"], ["ä"], ["\x1b[m"])


def test_what_is_written_is_read_and_replaced(tmp_path: Path) -> None:
    assert read_scored_texts(tmp_path) is None
    write_scored_texts(tmp_path, TEXTS)
    assert read_scored_texts(tmp_path) == TEXTS
    without_source = replace(TEXTS, sources=[])
    write_scored_texts(tmp_path, without_source)
    assert read_scored_texts(tmp_path) == without_source


def test_lists_of_unequal_length_are_refused(tmp_path: Path) -> None:
    write_scored_texts(tmp_path, TEXTS)
    path = tmp_path / "translations.json"
    path.write_text(json.dumps(read_json(path) | {"references": []}))
    with raises(UserError, match="differ in length"):
        read_scored_texts(tmp_path)
