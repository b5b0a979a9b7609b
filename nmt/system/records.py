"""Turns plain values, as in YAML and JSON, into frozen dataclasses: strictly, with the place of every
fault.

The configuration, a checkpoint's state and results.json are read here. A dataclass says what it
accepts: its annotations give the kind of value of each key, a `Rule` beside a default limits the
value, and a method `check` compares keys. Nothing is converted except whole numbers to float, and
nothing is ignored: an unknown key is a mistake.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from nmt.system.errors import UserError
from nmt.system.files import read_json

Record = TypeVar("Record")
Default = TypeVar("Default")
Item = TypeVar("Item")
NAMES_OF_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
# The remedy for a file that only nmt writes
OF_ANOTHER_VERSION = (
    "damaged, or of another version of nmt; commits 5f9c7938 and feddc889 read what unreleased versions "
    "wrote"
)
SHOWN = 99  # characters of a value or a key in a complaint; a stranger's file may hold any number


@dataclass(frozen=True)
class Rule:
    """A condition that a number must satisfy; `words` completes "it must ..."."""

    holds: Callable[[float], bool]
    words: str


COUNT = Rule(lambda n: n >= 0, "not be negative")


def default(value: Default, rule: Rule) -> Default:
    """Give a dataclass's field a default, and a rule for its numbers."""
    field: Default = dataclasses.field(default=value, metadata={"rule": rule})
    return field


@dataclass(frozen=True)
class RecordReader:
    """Reads one tree of plain values; keys of inner values are joined by dots, as in `training.steps`."""

    name_place: Callable[[str], str]  # of a dotted key: where it was written, and the key
    needs_all_keys: bool = False  # a program wrote them all; a person leaves some to their defaults
    remedy: str = ""  # for a file that is never edited by hand
    takes_any_text: bool = False  # text of corpora and names of files may hold anything
    # what is known of a key that is unknown here, if anything
    explain_key: Callable[[str], str | None] = lambda name: None

    def read(self, kind: type[Record], values: object, key: str = "") -> Record:
        """Return the record of this kind that the mapping `values` describes."""
        if not isinstance(values, dict):
            raise self._complain(key, f"{_show(values)} is not a section of keys and values")
        hints = typing.get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
        given = {}
        for name, value in values.items():
            inner = join_key(key, name)
            if name not in fields:
                raise self._complain_of_unknown(inner, name, fields)
            given[name] = self._read_value(hints[name], value, inner)
            rule: Rule | None = fields[name].metadata.get("rule")
            if rule and isinstance(value, int | float) and not rule.holds(value):
                raise self._complain(inner, f"is {value}; it must {rule.words}", " ")
        for name, field in fields.items():
            if name not in given and (self.needs_all_keys or not _has_default(field)):
                raise self._complain(join_key(key, name), "is missing")
        record: Any = kind(**given)
        complaint = record.check() if hasattr(record, "check") else None
        if complaint:
            raise self._complain(key, complaint)
        return typing.cast(Record, record)

    def _read_value(self, hint: Any, value: Any, key: str) -> Any:
        """Convert the value to the type of its annotation."""
        if hint is Any:
            return value
        options = typing.get_args(hint)
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            return self._read_union(options, value, key)
        if origin is Literal:
            return self._read_literal(options, value, key)
        if origin in (list, tuple):
            if not isinstance(value, list):
                raise self._complain(key, f"{_show(value)} is not a list")
            items = enumerate(value)
            return origin(self._read_value(options[0], item, f"{key}[{i}]") for i, item in items)
        if origin is dict:
            if not isinstance(value, dict):
                raise self._complain(key, f"{_show(value)} is not a section of keys and values")
            return {
                name: self._read_value(options[1], item, join_key(key, name[:SHOWN]))
                for name, item in value.items()
            }
        if dataclasses.is_dataclass(hint):
            return self.read(typing.cast(type, hint), value, key)
        return self._read_scalar(hint, value, key)

    def _read_union(self, options: tuple[Any, ...], value: Any, key: str) -> Any:
        if value is None and type(None) in options:
            return None
        kinds = [option for option in options if option is not type(None)]
        if len(kinds) > 1:
            fitting = [k for k in kinds if type(value) is k or _is_word_of(k, value)]
            if not fitting:
                names = " or ".join(_name_kind(kind) for kind in kinds)
                raise self._complain(key, f"{_show(value)} is not {names}")
            kinds = fitting
        return self._read_value(kinds[0], value, key)

    def _read_literal(self, options: tuple[Any, ...], value: Any, key: str) -> Any:
        if isinstance(value, str) and value in options:
            return value
        close = difflib.get_close_matches(str(value), options, 1)
        if value in ("gpu", "cuda"):  # which look like cpu
            close = ["auto, which takes the GPU"]
        remedy = f"; did you mean {close[0]}?" if close else ""
        raise self._complain(key, f"{_show(value)} is not one of {', '.join(options)}{remedy}")

    def _read_scalar(self, kind: type, value: Any, key: str) -> Any:
        is_number = type(value) in (int, float)
        # NaN, infinity, and what neither int64 nor float64 holds
        if is_number and not abs(value) < 2**63:
            raise self._complain(
                key, f"{_show(value)} is not a finite number between -2^63 and 2^63"
            )
        if kind is float and is_number:
            return float(value)
        if type(value) is not kind:  # by type: Python takes true for 1
            raise self._complain(key, f"{_show(value)} is not {NAMES_OF_KINDS[kind]}")
        unusable = None
        if isinstance(value, str) and not self.takes_any_text:
            unusable = find_unusable_character(value)
        if unusable:
            raise self._complain(
                key,
                f"{_show(value)} holds {unusable}, which no file name can contain; leave it out",
            )
        return value

    def _complain_of_unknown(self, key: str, name: str, known: typing.Iterable[str]) -> UserError:
        if self.remedy:
            return self._complain(key, "unknown key")
        if explanation := self.explain_key(name):
            return self._complain(key, f"unknown setting; {explanation}")
        return self._complain(key, f"unknown key; {suggest_key(name, known)}")

    def _complain(self, key: str, what: str, between: str = ": ") -> UserError:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return UserError(f"{self.name_place(key)}{between}{what}{remedy}")


def suggest_key(name: str, known: typing.Iterable[str]) -> str:
    """Say which key was probably meant, or which there are."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"


def leave_out_none(values: Mapping[str, Item | None]) -> dict[str, Item]:
    """Return the values that are there, as a file has them that leaves the others out."""
    return {key: value for key, value in values.items() if value is not None}


def find_unusable_character(text: str) -> str | None:
    """Name the first character that no path and no UTF-8 text can hold: NUL, half a character."""
    match = re.search("[\0\ud800-\udfff]", text)
    return f"U+{ord(match[0]):04X}" if match else None


def read_record(path: Path, kind: type[Record], remedy: str) -> Record:
    """Read a JSON file that holds one record, and that only nmt writes."""
    reader = RecordReader(name_places_in(path), remedy=remedy, takes_any_text=True)
    return reader.read(kind, read_json(path))


def name_places_in(file: str | Path) -> Callable[[str], str]:
    """For a `RecordReader` of what is in a file, or in a part of it."""
    return lambda key: f"{file}: {key}" if key else str(file)


def join_key(section: str, name: str) -> str:
    """Return the dotted key of what has this name in a section; the outermost section has no key."""
    return f"{section}.{name}" if section else name


def _show(value: object) -> str:
    return "an empty value" if value is None else repr(value)[:SHOWN]


def _name_kind(hint: Any) -> str:
    return NAMES_OF_KINDS.get(hint) or " or ".join(typing.get_args(hint))


def _is_word_of(hint: Any, value: Any) -> bool:
    return isinstance(value, str) and value in typing.get_args(hint)


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing
