"""How much a client may ask of the server, and how a request beyond that is refused.

Each limit has a default that suits text typed by people; nmt-serve has an option for those that
depend on the machine. A refusal is one JSON object with one clear line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

MAX_STREAMED_LINES = 10_000  # of a request to /v1/stream, which is answered line by line
MAX_ATTENTION_MAPS = 8  # of a request: all layers and heads of a long line are megabytes


@dataclass(frozen=True)
class ServeLimits:
    max_body: int = 1_000_000  # bytes
    max_lines: int = 64  # of a request
    max_characters: int = 1_000  # of a line
    max_waiting: int = 1_024  # lines in the queue
    max_connections: int = 2_000
    timeout_s: float = 30.0  # from a whole request to its answer
    receive_s: float = 10.0  # for a whole request, and for a client to read what was sent


class RequestRefused(Exception):
    """Why a request is not answered, and the status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientLeft(Exception):
    """Nobody waits for the answer."""


async def read_body(request: Request, limits: ServeLimits) -> bytes:
    """Read the body, and stop as soon as it is too long."""
    too_long = RequestRefused(413, f"the body has more than {limits.max_body:,} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.max_body:
        raise too_long
    chunks, n = [], 0
    try:
        async for chunk in request.stream():
            n += len(chunk)
            if n > limits.max_body:
                raise too_long
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientLeft from None
    return b"".join(chunks)


def check_lines(lines: Sequence[str], limits: ServeLimits, max_lines: int) -> None:
    """Refuse too many lines, lines that are too long, and what is no text."""
    if len(lines) > max_lines:
        raise RequestRefused(413, f"q has {len(lines):,} lines, more than {max_lines:,}")
    for number, line in enumerate(lines, 1):
        if len(line) > limits.max_characters:
            raise RequestRefused(
                413,
                f"q: line {number} has {len(line):,} characters, more than {limits.max_characters:,}",
            )
        try:
            line.encode()
        except UnicodeEncodeError:
            raise RequestRefused(400, f"q: line {number} has half a character") from None
