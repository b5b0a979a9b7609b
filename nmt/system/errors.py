"""The two exceptions that a command reports in one line.

A `UserError` is the user's to fix: it names the key or the file:line, the value, and the remedy;
the command exits with code 2. A `Failure` is not a mistake in the input: damaged checkpoints, a
full disk, a NaN loss; the command exits with code 1. Any other exception is a bug of ours: a
traceback and code 1.
"""


class UserError(Exception):
    """A mistake in the input, the configuration or the command line; its text is one line, ready to
    print.
    """


class Failure(Exception):
    """A reason why the work cannot go on, in one line that also says what to do."""
