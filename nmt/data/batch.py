"""The tensors that cross rooms: sentences laid end to end, without padding.

`Packed` is one side of a batch: all tokens in a row and where each sentence begins. The row may have a dead tail beyond
the last offset, offsets may repeat (empty sentences) and `longest` may be more than is there: so every micro-batch of a
run can have one `BatchShape`, which compiled code and CUDA graphs need. What follows from the offsets alone is derived
once for a batch, here, because the layers share it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


class derived(Generic[T]):
    """As functools.cached_property, without the lock of Python 3.11, at which compiled code would break."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name = make, make.__name__

    def __get__(self, owner: Any, _: type) -> T:
        value = owner.__dict__[self.name] = self.make(owner)
        return value


@dataclass(frozen=True)
class BatchShape:
    """The sizes that all micro-batches of a run share, so that the code for them is compiled and recorded once."""

    tokens: int  # of each side, a dead tail included
    sentences: int  # at most; the rest are empty
    longest: int  # tokens of a sentence, at most


@dataclass(frozen=True)
class Packed:
    tokens: Tensor  # (T,) int64
    offsets: Tensor  # (S + 1,) int64, on the device of the tokens
    longest: int
    n_live: int  # tokens before the dead tail

    @property
    def n_sentences(self) -> int:
        return self.offsets.numel() - 1

    @derived
    def lengths(self) -> Tensor:  # (S,)
        return self.offsets[1:] - self.offsets[:-1]

    @derived
    def index(self) -> Tensor:
        return torch.arange(self.tokens.numel(), device=self.tokens.device)  # (T,)

    @derived
    def sentence(self) -> Tensor:
        """The sentence of each token; in the dead tail, one beyond the last."""  # (T,)
        return torch.searchsorted(self.offsets, self.index, right=True) - 1

    @derived
    def positions(self) -> Tensor:
        """The place of each token within its sentence; in the dead tail 0."""  # (T,)
        return torch.where(
            self.index < self.offsets[-1], self.index - self.offsets[self.sentence], 0
        )

    def to(self, device: torch.device) -> "Packed":
        return Packed(
            _sent(self.tokens, device), _sent(self.offsets, device), self.longest, self.n_live
        )

    def has_shape(self, shape: BatchShape) -> bool:
        return (self.tokens.numel(), self.n_sentences, self.longest) == (
            shape.tokens,
            shape.sentences,
            shape.longest,
        )


@dataclass(frozen=True)
class Batch:
    """A micro-batch. `tgt` begins with bos, `labels` ends with eos; a label of -1 is not counted."""

    src: Packed
    tgt: Packed
    labels: Tensor  # (T,) int64
    n_tokens: int  # labels that count

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            self.src.to(device), self.tgt.to(device), _sent(self.labels, device), self.n_tokens
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.src.tokens, self.src.offsets, self.tgt.tokens, self.tgt.offsets, self.labels

    def has_shape(self, shape: BatchShape) -> bool:
        return self.src.has_shape(shape) and self.tgt.has_shape(shape)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU asynchronously, which needs pinned memory."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def pack(sentences: Sequence[Sequence[int]]) -> Packed:
    """Lay lists of ids end to end."""
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.fromiter((t for s in sentences for t in s), np.int64, int(offsets[-1]))
    return Packed(
        torch.from_numpy(tokens),
        torch.from_numpy(offsets),
        int(lengths.max(initial=0)),
        tokens.size,
    )
