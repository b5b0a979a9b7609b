"""Commands that run in the process of the tests."""

from collections.abc import Callable

from support.capture import Capture, read_errors

Main = Callable[[list[str]], int]


def succeed(main: Main, *words: object) -> None:
    assert main([*map(str, words)]) == 0


def refuse(capture: Capture, main: Main, *words: object) -> str:
    """The last line of a refusal."""
    assert main([*map(str, words)]) == 2
    return read_errors(capture)[-1]
