"""Which keys each query of a packed batch attends to, and how its sentences are padded for that.

A mask is made once for all layers. Sentences of similar length are padded to one width, where attention is
computed with plain batched products (`packed_attention.py`). Kernels that need no padding read intervals.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import Packed, lazy_property

MASKED_SCORE = -1e30  # finite, because a sentence without tokens must not give NaN
# torch's softmax is three times slower for rows shorter than a vector register of fp32.
WIDTH_MULTIPLE = 16


class PaddedGroup(NamedTuple):
    """Sentences of similar length. A shorter one is padded with its own last token."""

    queries: Tensor  # (S, Lq) packed rows
    keys: Tensor  # (S, Lk)
    bias: (
        Tensor  # (S, 1, Lq or 1, Lk) fp32, on scores: 0, or MASKED_SCORE where a key is masked out
    )


def round_up_width(longest: int) -> int:
    """Round up to the width that sentences of this length are padded to."""
    return -(-max(longest, 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def pad_rows(packed: Packed, sentences: Tensor, width: int) -> Tensor:
    """Return the packed rows of these sentences, each padded to a width: (S, L)."""
    last = (packed.offsets[sentences + 1] - 1).clamp(min=0)[:, None]
    return torch.minimum(packed.offsets[sentences, None] + _count_to(width, packed), last)


def _count_to(n: int, packed: Packed) -> Tensor:
    return torch.arange(n, device=packed.tokens.device)


class AttentionMask:
    """Which keys each query attends to: those of its own sentence, none ahead if `causal`, at most
    `window` positions away.

    It is made once for all layers. Because queries and keys lie end to end, a query attends to an
    interval of key rows, and the queries that attend to a key are an interval too.
    `is_single_group` pads all sentences to one width, which is required for returning attention
    weights.
    """

    # Whether the lengths are read, to group sentences by them. The host would wait for a GPU.
    host_reads = True

    def __init__(
        self,
        queries: Packed,
        keys: Packed,
        causal: bool = False,
        window: int | None = None,
        is_single_group: bool = False,
    ) -> None:
        self.packed, self.causal, self.window = (queries, keys), causal, window
        self.is_single_group = is_single_group or not self.host_reads

    @property
    def n_ahead(self) -> int | None:
        """How many places ahead a query sees; None is no limit."""
        return 0 if self.causal else self.window

    @lazy_property
    def key_intervals(self) -> Tensor:
        """The first key row that each query attends to and one past the last, (2, Tq); both are 0
        in the dead tail.
        """
        queries, keys = self.packed
        return self.find_intervals(queries, keys, ahead=self.n_ahead, behind=self.window)

    @lazy_property
    def query_intervals(self) -> Tensor:
        """The first query row that attends to each key and one past the last, (2, Tk); both are 0
        in the dead tail.
        """
        queries, keys = self.packed
        behind = 0 if self.causal else self.window
        return self.find_intervals(keys, queries, ahead=self.window, behind=behind)

    def find_intervals(
        self, rows: Packed, others: Packed, ahead: int | None, behind: int | None
    ) -> Tensor:
        """For each row, find the first and one past the last row of `others` in the same sentence
        that is at most `behind` positions before it and `ahead` positions after it, (2, T). None
        means no limit."""
        # The dead tail counts as one more sentence, without tokens.
        bounds = torch.stack((others.offsets[:-1], others.offsets[1:]))
        first, last = F.pad(bounds, (0, 1))[:, rows.sentence]  # (T,)
        row = first + rows.positions
        if behind is not None:
            first = torch.minimum(torch.maximum(first, row - behind), last)
        if ahead is not None:
            last = torch.maximum(torch.minimum(last, row + ahead + 1), first)
        return torch.stack((first, last)).int()

    @lazy_property
    def members(self) -> list[Tensor]:
        """The sentences of each group: those whose longer side is padded to the same width."""
        queries, keys = self.packed
        if self.is_single_group:
            return [_count_to(queries.n_sentences, queries)]
        sizes = torch.maximum(queries.lengths, keys.lengths).add(WIDTH_MULTIPLE - 1)
        sizes = sizes.div(WIDTH_MULTIPLE, rounding_mode="floor")
        return [(sizes == size).nonzero().squeeze(1) for size in sizes.unique().tolist()]

    @lazy_property
    def groups(self) -> list[PaddedGroup]:
        return [self._pad_group(sentences) for sentences in self.members]

    def _pad_group(self, sentences: Tensor) -> PaddedGroup:
        queries, keys = self.packed
        widths = []
        for side in self.packed:
            longest = side.longest
            if not self.is_single_group:
                longest = int(side.lengths[sentences].max())
            widths.append(round_up_width(longest))
        n_queries, n_keys = widths
        position = _count_to(n_keys, keys)
        ahead = position - _count_to(n_queries, keys)[:, None]
        is_visible = (position < keys.lengths[sentences, None])[:, None, None]
        if self.causal:
            is_visible = is_visible & (ahead <= 0)
        if self.window is not None:
            is_visible = is_visible & (ahead.abs() <= self.window)
        return PaddedGroup(
            pad_rows(queries, sentences, n_queries),
            pad_rows(keys, sentences, n_keys),
            torch.where(is_visible, 0.0, MASKED_SCORE),
        )

    @lazy_property
    def cells(self) -> Tensor:
        """Where each query is among all padded queries, group after group, (Tq,); beyond the last in the
        dead tail.
        """
        queries = self.packed[0]
        starts = queries.offsets.clone()  # of the sentences, and of the dead tail
        n_cells = 0
        for sentences, group in zip(self.members, self.groups, strict=True):
            n, width = group.queries.shape
            starts[sentences] = n_cells + width * _count_to(n, queries)
            n_cells += n * width
        starts[-1] = n_cells
        return starts[queries.sentence] + queries.positions

    @lazy_property
    def has_empty_rows(self) -> bool:
        """Whether some query may have no key to attend to: softmax would give it uniform weights,
        so they are set to zero.
        """
        queries, keys = self.packed
        if not self.host_reads:
            return True
        return bool(((keys.lengths == 0) & (queries.lengths > 0)).any())
