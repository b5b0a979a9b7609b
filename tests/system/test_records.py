"""Records that a program wrote: every key must be there, damage is named by place and key, in one
printable line.

What people write by hand, with defaults and suggestions, is tested through configs in
tests/test_config.py.
"""

from dataclasses import dataclass

from pytest import mark, raises

from nmt.system.errors import UserError
from nmt.system.records import COUNT, RecordReader, default
from nmt.system.strict_json import Fields


@dataclass(frozen=True)
class Inner:
    value: float
    low: float | None = None


@dataclass(frozen=True)
class Outer:
    n: int = default(0, COUNT)
    names: tuple[str, ...] = ()
    scores: list[Inner] | None = None
    settings: dict[str, str | int | bool] | None = None


READER = RecordReader(
    lambda key: f"x.json: {key}" if key else "x.json",
    needs_all_keys=True,
    remedy="use another copy",
)
GOOD: Fields = {
    "n": 3,
    "names": ["a"],
    "scores": [{"value": 1, "low": None}],
    "settings": {"beam": 4, "sample": False},
}


def test_a_complete_record_is_read() -> None:
    record = READER.read(Outer, GOOD)
    assert record == Outer(3, ("a",), [Inner(1.0)], {"beam": 4, "sample": False})
    assert record.scores and type(record.scores[0].value) is float


@mark.parametrize(
    "change, complaint",
    [
        ({"n": -1}, "x.json: n is -1; it must not be negative; use another copy"),
        ({"n": True}, "x.json: n: True is not an integer; use another copy"),
        (
            {"n": 2**63},
            "x.json: n: 9223372036854775808 is not a finite number between -2^63 and 2^63",
        ),
        ({"more": 1}, "x.json: more: unknown key; use another copy"),
        ({"\x1b[2J" * 99: 1}, "x.json: <U+001B>[2J"),
        ({"names": "a"}, "x.json: names: 'a' is not a list"),
        ({"scores": [{"value": 1}]}, "x.json: scores[0].low: is missing; use another copy"),
        ({"scores": [{"value": float("nan"), "low": 1}]}, "scores[0].value: nan is not a finite"),
        ({"settings": {"beam": [4]}}, "settings.beam: [4] is not a string or an integer or true"),
        ({"settings": 5}, "x.json: settings: 5 is not a section of keys and values"),
    ],
)
def test_damage_is_named_by_place_and_key(change: Fields, complaint: str) -> None:
    with raises(UserError) as caught:
        READER.read(Outer, GOOD | change)
    text = str(caught.value)
    assert complaint in text and text.endswith("use another copy")
    assert text.isprintable() and len(text) < 2_100


def test_what_is_no_record_is_refused() -> None:
    with raises(UserError, match=r"x\.json: \[1\] is not a section of keys and values"):
        READER.read(Outer, [1])
    with raises(UserError, match=r"x\.json: names: is missing"):
        READER.read(Outer, {"n": 3})
