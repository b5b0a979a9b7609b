"""Strict YAML: text -> plain values, and where each of them was written.

A SafeLoader that reads numbers and truth values as people mean them (1e-9 is a number, 010 is ten,
12:30:00 and `no` are text) and refuses what a config does not need and an attacker does: objects,
tags, aliases, duplicate keys. Every complaint names the line.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from nmt.system.errors import UserError
from nmt.system.escapes import OBEYED

MAX_NESTING = 20  # of values inside each other

Values = dict[str, Any]  # of a mapping, by key
Places = dict[str, str]  # where each value was written, by dotted key


@dataclass(frozen=True)
class YamlTree:
    """A plain tree of values and, for error messages, where each dotted key was written."""

    values: Values
    lines: Places = field(default_factory=dict)

    def name_place(self, key: str) -> str:
        """Where `key` was written, and its name."""
        return ": ".join(part for part in (self.lines.get(key), key) if part) or "config"


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases and tags, and with YAML 1.2's idea of what a number and a truth
    value is.
    """

    depth = 0  # of the value that is read

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        line = _name_line(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            raise UserError(
                f"{line}: aliases (*{event.anchor}) are not accepted; write the value out"
            )
        if event.tag is not None:
            raise UserError(
                f"{line}: objects and tags ({event.tag}) are not accepted; write plain values"
            )
        # Python's own limit depends on what else the process has loaded.
        if self.depth == MAX_NESTING:
            raise UserError(f"{line}: is nested too deeply; leave brackets out")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes strings which only our rules take for numbers, such as '1e5'."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # In single quotes a U+0085 would be written as it is, and read as a line end.
        style = '"' if OBEYED.search(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)

# Which plain words are not text: kind, pattern, possible first characters ("" is the empty value).
# The pattern of float takes quadratic time to refuse a text, so its length is bounded.
_NUMBER = (
    r"(?=.{1,99}$)(?:"
    r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+\.(?:[eE][-+]?[0-9]+)?)"
)
_WORDS = (
    ("bool", r"true|false|True|False", list("tfTF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", _NUMBER, list("-+.0123456789")),
    ("null", r"~|null|Null|", ["~", "n", "N", ""]),
)
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in _WORDS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), _first
        )


def parse_yaml(text: str, name: str) -> YamlTree:
    """Parse the plain values in `text`, which error messages call `name`."""
    lines: Places = {}
    try:
        loader = _Loader(text)
        loader.name = name
        node = loader.get_single_node()
        values = {} if node is None else _read_node(node, "", lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = f"{name}:{mark.line + 1}" if mark else name
        raise UserError(
            f"{line}: is not valid YAML: {problem}; is a space missing after ':', or does the indentation "
            "differ, here or above?"
        ) from None
    except ValueError:
        raise UserError(f"{name}: is not valid YAML: a number is too long") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{name}: a config must be a mapping of sections, not a {type(values).__name__}"
        )
    return YamlTree(values, lines)


def _read_node(node: yaml.Node, key: str, lines: Places) -> Any:
    """Return the node's plain value; add to `lines` where it and each value inside it were
    written.
    """
    lines.setdefault(key, _name_line(node.start_mark))
    if isinstance(node, yaml.MappingNode):
        return _read_mapping(node, key, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_read_node(item, f"{key}[{i}]", lines) for i, item in enumerate(node.value)]
    kind = node.tag.rpartition(":")[2]
    text: str = node.value
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text.replace("_", ""))
    if kind == "float":
        return float(text.replace("_", ""))
    return None if kind == "null" else text


def _read_mapping(node: yaml.MappingNode, key: str, lines: Places) -> Values:
    values: Values = {}
    for name_node, value_node in node.value:
        name = name_node.value
        line = _name_line(name_node.start_mark)
        if not isinstance(name_node, yaml.ScalarNode) or not name.isprintable():
            raise UserError(f"{line}: a key must be a plain word")
        if name in values:
            raise UserError(f"{line}: key {name!r} is given twice; keep one")
        inner = f"{key}.{name}" if key else name
        lines[inner] = line
        values[name] = _read_node(value_node, inner, lines)
    return values


def _name_line(mark: yaml.Mark) -> str:
    return f"{mark.name}:{mark.line + 1}"


def format_yaml(values: Any) -> str:
    """Text that `parse_yaml` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
