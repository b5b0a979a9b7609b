"""Models that have shapes but no weights, because the weights are in a file or in another model.

torch's "meta" device takes no memory. But to draw normal numbers there, torch makes an import that takes a second.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# kaiming_uniform_ hides its own draw from the mode
DRAWS = (
    nn.init.kaiming_uniform_,
    nn.init.normal_,
    nn.init.uniform_,
    Tensor.normal_,
    Tensor.uniform_,
)


class WithoutDrawing(TorchFunctionMode):
    """The models that are made in here do not draw the weights that are about to be read from a file:
    for base that takes half a second.
    """

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
    """Make models without weights inside this block."""
    with torch.device("meta"), WithoutDrawing():
        yield
