"""The tensors that cross rooms: sentences laid end to end, without padding.

`Packed` is one side of a batch: all tokens in a row and where each sentence begins. The row may have a dead tail beyond
the last offset and offsets may repeat (empty sentences), so that shapes can be held constant. What attention needs to
see sentences as rows is derived once for a batch, here, because the layers share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    tokens: Tensor  # (T,) int64
    offsets: Tensor  # (S + 1,) int64, on the device of the tokens
    longest: int
    n_live: int  # tokens before the dead tail

    @property
    def n_sentences(self) -> int:
        return self.offsets.numel() - 1

    @cached_property
    def lengths(self) -> Tensor:  # (S,)
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def index(self) -> Tensor:
        return torch.arange(self.tokens.numel(), device=self.tokens.device)  # (T,)

    @cached_property
    def sentence(self) -> Tensor:
        """The sentence of each token; in the dead tail, one beyond the last."""  # (T,)
        return torch.searchsorted(self.offsets, self.index, right=True) - 1

    @cached_property
    def positions(self) -> Tensor:
        """The place of each token within its sentence; in the dead tail, anything valid."""  # (T,)
        return self.index - self.offsets[self.sentence]

    @cached_property
    def live(self) -> Tensor:
        """Which cells of the (S, longest) grid hold a token."""  # (S, L) bool
        return torch.arange(self.longest, device=self.tokens.device) < self.lengths[:, None]

    @cached_property
    def cells(self) -> Tensor:
        """The token that stands in each cell of the grid, row by row; cells without one show token 0."""  # (S * L,)
        column = torch.arange(self.longest, device=self.tokens.device)
        return torch.where(self.live, self.offsets[:-1, None] + column, 0).flatten()

    @cached_property
    def slots(self) -> Tensor:
        """The cell of each token: the inverse of `cells`; tokens of the dead tail show cell 0."""  # (T,)
        return torch.where(self.index < self.n_live, self.sentence * self.longest + self.positions, 0)

    def to(self, device: torch.device) -> "Packed":
        return Packed(self.tokens.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True),
                      self.longest, self.n_live)


@dataclass(frozen=True)
class Batch:
    """A micro-batch. `tgt` begins with bos, `labels` ends with eos; a label of -1 is not counted."""

    src: Packed
    tgt: Packed
    labels: Tensor  # (T,) int64
    n_tokens: int  # labels that count

    def to(self, device: torch.device) -> "Batch":
        labels = self.labels.to(device, non_blocking=True)
        return Batch(self.src.to(device), self.tgt.to(device), labels, self.n_tokens)


def pack(sentences: Sequence[Sequence[int]]) -> Packed:
    """Lay lists of ids end to end."""
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.fromiter((t for s in sentences for t in s), np.int64, int(offsets[-1]))
    return Packed(torch.from_numpy(tokens), torch.from_numpy(offsets), int(lengths.max(initial=0)), tokens.size)
