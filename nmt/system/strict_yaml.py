"""Strict YAML: text -> plain values, and where each of them was written.

A SafeLoader that means by a number what people mean (1e-9 is one, 010 is ten, 12:30:00 and `no` are text) and refuses
what a config has no use for and an attacker has: objects, tags, aliases, duplicate keys. Complaints name the line.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from nmt.system.errors import UserError


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases and tags, and with YAML 1.2's idea of what a number and a truth value is."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        place = f"{event.start_mark.name}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise UserError(
                f"{place}: aliases (*{event.anchor}) are not accepted; write the value out"
            )
        if event.tag is not None:
            raise UserError(
                f"{place}: objects and tags ({event.tag}) are not accepted; write plain values"
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes the strings which only our reading of YAML takes for numbers, such as '1e5'."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|false|True|False", "tfTF"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "float",
        r"(?=.{1,99}$)(?:"  # of bounded length: this pattern takes quadratic time to refuse a text
        r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+\.(?:[eE][-+]?[0-9]+)?)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|", "~nN\0"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}",
            re.compile(rf"^(?:{_pattern})$"),
            [c if c != "\0" else "" for c in _first],
        )


@dataclass(frozen=True)
class Source:
    """A plain tree of values and, for error messages, where each dotted key was written."""

    values: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)

    def name_place(self, key: str) -> str:
        """Where `key` was written, and its name."""
        return ": ".join(part for part in (self.places.get(key), key) if part) or "config"


def _plain(node: yaml.Node, key: str, places: dict[str, str]) -> Any:
    place = f"{node.start_mark.name}:{node.start_mark.line + 1}"
    places.setdefault(key, place)
    kind = node.tag.rpartition(":")[2]
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = key_node.value
            place = f"{key_node.start_mark.name}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode) or not name.isprintable():
                raise UserError(f"{place}: a key must be a plain word")
            if name in result:
                raise UserError(f"{place}: key {name!r} is given twice; keep one")
            inner = f"{key}.{name}" if key else name
            places[inner] = place
            result[name] = _plain(value_node, inner, places)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{key}[{i}]", places) for i, item in enumerate(node.value)]
    text = node.value
    if kind == "bool":
        return bool(text.lower() == "true")
    if kind == "int":
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if kind == "float" else None if kind == "null" else text


def parse_yaml(text: str, name: str) -> Source:
    """The plain values in `text`; `name` stands in error messages."""
    places: dict[str, str] = {}
    try:
        loader = _Loader(text)
        loader.name = name
        node = loader.get_single_node()
        values = {} if node is None else _plain(node, "", places)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(
            f"{name}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}"
        ) from None
    except (RecursionError, ValueError):
        raise UserError(f"{name}: not valid YAML: nested too deeply or a number too long") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{name}: a config is a mapping of sections, this is {type(values).__name__}"
        )
    return Source(values, places)


def format_yaml(values: Any) -> str:
    """Text that `parse_yaml` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
