"""JSON that somebody else may have written, into plain values that can be computed with.

A file of a stranger, or one that was cut or garbled, must not make anything fail later. So the text
is UTF-8, nothing is nested deeply enough to exhaust a recursion, and all numbers are finite and in a
range whose sums, differences and ratios are finite too. Whatever breaks a rule raises a `UserError`. Keys
and types are checked by the reader (records.py).
"""

import json
import math
from typing import Any

from nmt.system.errors import UserError

Fields = dict[str, Any]  # of a JSON object

MAX_DEPTH = 50
MAX_INTEGER = 2**63
MAX_FLOAT = 1e100  # no figure of a float32 computation comes near


def parse_json(data: bytes, name: str, remedy: str = "use another copy") -> Any:
    """Parse one JSON value; `name` is what it is called, for error messages."""
    try:
        value = json.loads(
            data.decode(),
            parse_int=_read_integer,
            parse_float=_read_float,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        fault = f"nested more than {MAX_DEPTH} levels deep"
    except (UnicodeDecodeError, json.JSONDecodeError):
        fault = "not JSON"
    except ValueError as error:
        fault = str(error)
    else:
        if not isinstance(value, dict | list) or not _is_deep(value):
            return value
        fault = f"nested more than {MAX_DEPTH} levels deep"
    raise UserError(f"{name}: is damaged ({fault}); {remedy}")


def _read_integer(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= MAX_INTEGER:
        raise ValueError(f"the number {_cut(digits)} is not between -2^63 and 2^63")
    return int(digits)


def _read_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value) or abs(value) > MAX_FLOAT:
        raise ValueError(f"the number {_cut(digits)} is not between -1e100 and 1e100")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _cut(digits: str) -> str:
    return digits if len(digits) <= 24 else f"{digits[:20]}..."


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True
