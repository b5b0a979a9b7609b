"""Functions that torch.compile does not trace.

`torch.compiler.disable` says the same, but importing what it needs takes a second, which every command
would wait for.
"""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch

Answer = TypeVar("Answer")


def not_traced(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Decorate a function that runs uncompiled, between the graphs of a compiled model."""

    @wraps(function)
    def call(*args: object) -> Answer:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args)
        return function(*args)

    return call
