"""Two rings of tests: the usual one, `make test`, and the soak, which asks for more of the same."""

import os
from typing import TypeVar

T = TypeVar("T")


def amount(usual: T, soak: T) -> T:
    """What to take in `make test`, and what in `make soak`."""
    return soak if os.environ.get("NMT_SOAK") == "1" else usual
