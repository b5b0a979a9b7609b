"""What an engine knows: for each field of some settings, the values that it computes as torch does.

An engine compares every field, so a setting that is added later, or a new value of an old one, means
that torch does the work until the engine learns it.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

ANY_VALUE = None  # the engine computes this field as torch does, whatever its value
KnownValues = Mapping[str, tuple[Any, ...] | None]


def find_unknown_value(values: Any, known: KnownValues) -> str | None:
    """Describe the first field of a dataclass that an engine does not know; None if it knows all."""
    for field in fields(values):
        value = getattr(values, field.name)
        if field.name not in known:
            return f"{field.name}={value}"
        values_known = known[field.name]
        if values_known is not ANY_VALUE and value not in values_known:
            return f"{field.name}={value}"
    return None
