"""The tensors that packages exchange: sentences laid end to end, without padding.

`Packed` is one side of a batch: all tokens in a row, and where each sentence begins. The row may
have an unused tail beyond the last offset, offsets may repeat (empty sentences), and `longest` is only
an upper bound. So every micro-batch of a run can have one `BatchShape`, which compiled code and
CUDA graphs need. What follows from the offsets alone is computed here, once for a batch, because
all layers share it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Computed = TypeVar("Computed")
Sentences = Sequence[Sequence[int]]


class lazy_property(Generic[Computed]):
    """Like functools.cached_property, without the lock of Python 3.11, which torch.compile cannot
    trace.
    """

    def __init__(self, make: Callable[[Any], Computed]) -> None:
        self.make = make
        self.name = make.__name__

    def __get__(self, owner: Any, _: type) -> Computed:
        # The instance's own attribute shadows this descriptor from the next look-up on.
        value = owner.__dict__[self.name] = self.make(owner)
        return value


@dataclass(frozen=True)
class BatchShape:
    """The sizes that all micro-batches of a run share, so that their code is compiled and recorded
    once.
    """

    src_tokens: int  # including a dead tail
    tgt_tokens: int
    sentences: int  # at most; the rest are empty
    longest: int  # tokens of a sentence, at most


@dataclass(frozen=True)
class Packed:
    """One side of a batch: T tokens of S sentences."""

    tokens: Tensor  # (T,) int64
    offsets: Tensor  # (S + 1,) int64, on the device of the tokens
    longest: int
    n_live: int  # tokens before the dead tail

    @property
    def n_sentences(self) -> int:
        return self.offsets.numel() - 1

    @lazy_property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]  # (S,)

    @lazy_property
    def index(self) -> Tensor:
        return torch.arange(self.tokens.numel(), device=self.tokens.device)  # (T,)

    @lazy_property
    def sentence(self) -> Tensor:
        """The sentence of each token; in the unused tail, one beyond the last."""
        return torch.searchsorted(self.offsets, self.index, right=True) - 1  # (T,)

    @lazy_property
    def positions(self) -> Tensor:
        """The place of each token within its sentence; 0 in the unused tail."""
        is_live = self.index < self.offsets[-1]
        return torch.where(is_live, self.index - self.offsets[self.sentence], 0)  # (T,)

    def to(self, device: torch.device) -> "Packed":
        tokens = _copy_to(self.tokens, device)
        offsets = _copy_to(self.offsets, device)
        return Packed(tokens, offsets, self.longest, self.n_live)

    def has_shape(self, shape: BatchShape, n_tokens: int) -> bool:
        sizes = (self.tokens.numel(), self.n_sentences, self.longest)
        return sizes == (n_tokens, shape.sentences, shape.longest)


@dataclass(frozen=True)
class Batch:
    """A micro-batch. `tgt` begins with bos and `labels` end with eos; a label of -1 does not count."""

    src: Packed
    tgt: Packed
    labels: Tensor  # (T,) int64
    n_tokens: int  # labels that count

    def to(self, device: torch.device) -> "Batch":
        labels = _copy_to(self.labels, device)
        return Batch(self.src.to(device), self.tgt.to(device), labels, self.n_tokens)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.src.tokens, self.src.offsets, self.tgt.tokens, self.tgt.offsets, self.labels

    def has_shape(self, shape: BatchShape) -> bool:
        return self.src.has_shape(shape, shape.src_tokens) and self.tgt.has_shape(
            shape, shape.tgt_tokens
        )


def _copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; to a GPU asynchronously, which needs pinned memory."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def pack(sentences: Sentences) -> Packed:
    """Lay lists of ids end to end."""
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.fromiter((t for s in sentences for t in s), np.int64, int(offsets[-1]))
    longest = int(lengths.max(initial=0))
    return Packed(torch.from_numpy(tokens), torch.from_numpy(offsets), longest, tokens.size)
