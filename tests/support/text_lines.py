"""Texts of lines."""

from collections.abc import Iterable


def join_lines(lines: Iterable[str]) -> str:
    """Each line ends in a newline, the last too."""
    return "".join(f"{line}\n" for line in lines)
