"""The two exceptions that are told in one line.

A `UserError` is the user's to mend: it names the key or the file:line, the value, and the remedy, and the command
leaves with exit code 2. A `Failure` is no mistake in the input: damaged checkpoints, a full disk, a loss that is no
number; the command leaves with 1. Everything else that escapes is ours and leaves with 1 and a traceback.
"""


class UserError(Exception):
    """A mistake in the input, the configuration or the command line; its text is one line, ready to print."""


class Failure(Exception):
    """The work cannot go on, for a reason that one line tells together with what to do."""
