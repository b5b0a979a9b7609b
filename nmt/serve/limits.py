"""How much a client may ask of the server.

Each limit has a default that suits text typed by people; nmt-serve has an option for those that
depend on the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException

MAX_STREAMED_LINES = 10_000  # of a request to /v1/stream, which is answered line by line


@dataclass(frozen=True)
class ServeLimits:
    max_body: int = 1_000_000  # bytes
    max_lines: int = 64  # of a request
    max_characters: int = 1_000  # of a line
    max_waiting: int = 1_024  # lines in the queue
    max_connections: int = 2_000  # with a request that is not answered yet
    timeout_s: float = 30.0  # for a whole request to come, and then for its answer


def check_lines(lines: Sequence[str], limits: ServeLimits, max_lines: int) -> None:
    """Refuse too many lines, lines that are too long, and what is no text."""
    if len(lines) > max_lines:
        raise HTTPException(413, f"q has {len(lines):,} lines, more than {max_lines:,}")
    for number, line in enumerate(lines, 1):
        if len(line) > limits.max_characters:
            raise HTTPException(
                413,
                f"q: line {number} has {len(line):,} characters, more than {limits.max_characters:,}",
            )
        try:
            line.encode()
        except UnicodeEncodeError:
            raise HTTPException(400, f"q: line {number} has half a character") from None
