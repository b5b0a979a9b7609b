"""The two exceptions that a command reports in one line.

A `UserError` is the user's to fix: it names the key or the file:line, the value, and the remedy;
the command exits with code 2. A `Failure` is not a mistake in the input: damaged checkpoints, a
full disk, a NaN loss; the command exits with code 1. Any other exception is a bug of ours: a
traceback and code 1.

Messages quote what strangers wrote: names, values, complaints of other libraries. So every message
becomes one line here, of limited length, in which nothing acts on a terminal.
"""

import os
from pathlib import Path

from nmt.system.escapes import escape_line

MAX_BEGINNING, MAX_END = 1_500, 500  # characters of a message; the remedy is at its end


class ForeseenError(Exception):
    """An error whose text is one line, ready to print."""

    def __init__(self, message: str) -> None:
        super().__init__(fit_into_line(message))


class UserError(ForeseenError):
    """A mistake in the input, the configuration or the command line."""


class Failure(ForeseenError):
    """A reason why the work cannot go on; the line also says what to do."""


def fit_into_line(message: str) -> str:
    """Write out control characters, and leave out the middle of a message that is too long."""
    message = escape_line(message)
    if len(message) <= MAX_BEGINNING + MAX_END:
        return message
    return f"{message[:MAX_BEGINNING]} [...] {message[-MAX_END:]}"


def describe_error(error: BaseException) -> str:
    """Return another library's error message in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def explain_missing(path: str | Path, remedy: str) -> UserError:
    """The one message for a file or a folder that the user named and that is not there, or is no such."""
    what = "not found"
    if os.path.isdir(path):  # Path.is_dir would raise if the name is too long
        what = "is a folder"
    elif os.path.isfile(path):
        what = "is a file"
    elif os.path.exists(path):
        what = "is a pipe or a device"
    elif os.path.islink(path):
        what = "is a link that leads nowhere"
    elif {*"~$*"} & {*str(path)}:
        what = "not found (~, $ and * are not expanded)"
    return UserError(f"{path}: {what}; {remedy}")
