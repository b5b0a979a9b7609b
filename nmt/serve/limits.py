"""How much a client may ask of the server.

Each limit has a default that suits text typed by people; nmt-serve has an option for those that
depend on the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from starlette.exceptions import HTTPException

MAX_AT_ONCE = 64  # sentences of one request in the queue, so that others are answered beside it
MOST_CHARACTERS_AT_ONCE = 10_000  # of these sentences, unless one is longer
MAX_TEXTS = 10_000  # of a request
BYTES_PER_CHARACTER = 12  # in JSON, if all are escaped


@dataclass(frozen=True)
class ServeLimits:
    max_characters: int = 100_000  # of a request
    max_waiting: int = 1_024  # sentences in the queue
    max_connections: int = 2_000  # with a request that is not answered yet
    timeout_s: float = 30.0  # for a whole request to come, and then for its answer

    @property
    def max_at_once(self) -> int:
        return min(MAX_AT_ONCE, self.max_waiting)

    @cached_property
    def max_body(self) -> int:
        """Bytes of a request: its text, and some kilobytes of everything else."""
        return BYTES_PER_CHARACTER * self.max_characters + (64 << 10)


def check_amount(texts: Sequence[str], limits: ServeLimits) -> None:
    """Refuse too much text, and anything that is not text."""
    n_characters = sum(map(len, texts))
    if n_characters > limits.max_characters:
        raise HTTPException(
            413, f"q has {n_characters:,} characters, more than {limits.max_characters:,}"
        )
    if len(texts) > MAX_TEXTS:
        raise HTTPException(413, f"q has {len(texts):,} texts, more than {MAX_TEXTS:,}")
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise HTTPException(400, f"q: line {number} has half a character") from None
