"""Texts of lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def join_lines(lines: Iterable[str]) -> str:
    """Each line ends in a newline, the last too."""
    return "".join(f"{line}\n" for line in lines)


def read_text_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def read_json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in read_text_lines(path)]
