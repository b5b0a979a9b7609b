"""The one exception that is the user's to mend.

A `UserError` carries a single line that names the key or the file:line, the value, and the remedy. Commands print
it and leave with exit code 2; everything else that escapes is ours and leaves with 1 and a traceback.
"""


class UserError(Exception):
    """A mistake in the input, the configuration or the command line; its text is one line, ready to print."""
