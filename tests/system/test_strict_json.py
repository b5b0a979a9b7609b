"""JSON of strangers: what cannot be computed with later is refused at once."""

import math

from pytest import mark, raises

from nmt.system.errors import UserError
from nmt.system.strict_json import MAX_DEPTH, parse_json

REFUSED = {
    "cut off": (b'{"step": 1', "not JSON"),
    "nothing": (b"", "not JSON"),
    "no UTF-8": (b'"\xff"', "not JSON"),
    "UTF-16": ('{"step": 1}'.encode("utf-16"), "not JSON"),
    "nested": (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested more than 50 levels deep"),
    "nested past Python": (b'{"a":' * 100_000, "nested more than 50 levels deep"),
    "400 digits": (b'{"nll": 1' + b"0" * 400 + b"}", "the number 10000000000000000000..."),
    "5,000 digits": (b"1" * 5_000, "the number 11111111111111111111..."),
    "2^63": (b"-9223372036854775808", "not between -2^63 and 2^63"),
    "1e400": (b"[1e400]", "not between -1e100 and 1e100"),
    "1e308": (b"[1e308, -1e308]", "the number 1e308 is not between -1e100 and 1e100"),
    "NaN": (b"[NaN]", "NaN is not a number in JSON"),
    "infinity": (b"[-Infinity]", "-Infinity is not a number in JSON"),
}


@mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_with_is_refused(case: str) -> None:
    data, message = REFUSED[case]
    with raises(UserError) as caught:
        parse_json(data, "run/results.json")
    assert str(caught.value).startswith("run/results.json: is damaged (")
    assert message in str(caught.value) and len(str(caught.value)) < 200


def test_everything_else_is_read() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(deepest, "x")
    text = b'{"a": [1, -2.5e99, true, null, "\\ud800 \\u0000"], "b": 9223372036854775807}'
    assert parse_json(text, "x") == {
        "a": [1, -2.5e99, True, None, "\ud800 \x00"],
        "b": 2**63 - 1,
    }
    assert math.copysign(1, parse_json(b"-0.0", "x")) == -1
