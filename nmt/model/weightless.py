"""Models that have shapes but no weights, because the weights are in a file or in another model.

torch's "meta" device takes no memory. But to draw normal numbers there, torch imports what takes a second.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DRAWS = (nn.init.normal_, nn.init.uniform_, Tensor.normal_, Tensor.uniform_)


class _DrawNothing(TorchFunctionMode):
    """Leave out what draws random weights."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in DRAWS:
            return None  # a layer does not use what a draw returns
        return function(*args, **(settings or {}))


@contextmanager
def without_weights() -> Iterator[None]:
    """Make the models that are made in here without weights."""
    with torch.device("meta"), _DrawNothing():
        yield
