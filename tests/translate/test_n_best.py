"""N-best lists as nmt-translate writes them, and what is refused about others."""

import json
from pathlib import Path

import pytest

from nmt.system.errors import UserError
from nmt.translate.n_best import NBest, read_n_best

LISTS = [NBest("a b", ["A", "B"], [-1.0, -2.0]), NBest("", [""], [0.0]), NBest("c", ["C"], [-3.5])]
TABLE = "0\t-1.0\tA\n0\t-2.0\tB\n1\t0\t\n2\t-3.5\tC\t0-0\n"  # the last with its alignment
SOURCES = "a b\n\nc\n"


def read(folder: Path, text: str, sources: str | None = None) -> list[NBest]:
    (folder / "list").write_text(text)
    if sources is not None:
        (folder / "src").write_text(sources)
    return list(read_n_best(str(folder / "list"), sources and str(folder / "src")))


def test_both_kinds_say_the_same(tmp_path: Path) -> None:
    objects = ""
    for number, one in enumerate(LISTS, 1):
        candidates = [{"text": t, "score": s} for t, s in zip(one.texts, one.scores, strict=True)]
        row = {"line": number, "source": one.source, "candidates": candidates}
        objects += json.dumps(row) + "\n"
    assert read(tmp_path, objects) == LISTS
    assert read(tmp_path, TABLE, SOURCES) == LISTS


@pytest.mark.parametrize(
    "text, sources, message",
    [
        (TABLE, None, "list: has no sources; give the text that was translated as --src FILE"),
        (TABLE, SOURCES + "d\n", "ends with number 2, but .*src has more than 3 lines"),
        (TABLE, "a b\n\n", "list:4: its number is 2, but .*src has 2 lines"),
        (TABLE.replace("1\t0", "2\t0"), SOURCES, "list:3: its number is 2, and not 1"),
        ("1\t-1\tA\n", SOURCES, "list:1: its number is 1, and not 0; numbers count from 0"),
        ("0\t-1\tA\n0 -1 A\n", SOURCES, "list:2: is not number TAB finite score TAB text"),
        *(
            (f"0\t{row}\n", SOURCES, "list:1: is not number TAB finite score TAB text")
            for row in ("x\tA", "nan\tA", "-inf\tA", "-1\tA\tB", "-1\tA\t0-0\tB")
        ),
        *(
            (
                f'{{"source": "a", "candidates": [{{"text": "A", "score": {score}}}]}}\n',
                None,
                "finite",
            )
            for score in ('"nan"', '"inf"')
        ),
        ('{"source": "a", "candidates": []}\n', None, "list:1: is not an object with source"),
        ('{"source": "a", "candidates": [{"text": "A"}]}\n', None, "list:1: is not an object"),
        (
            '{"source": 1, "candidates": [{"text": "A", "score": 0}]}\n',
            None,
            "list:1: is not an obj",
        ),
        ('{"source": "a"\n', None, "list:1: is damaged"),
        ('{"source": "a"}\n', "a\n", "list: contains the sources; leave out --src"),
        ("", SOURCES, "list: is empty"),
    ],
)
def test_other_lists_are_refused(
    tmp_path: Path, text: str, sources: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text, sources)
