"""Which keys each query of a packed batch attends to, and how its sentences are padded for that.

A mask is made once for all layers. Sentences of similar length are padded to one width. Padding and
packing gather one head's row at a time by index, so no tensor is transposed and no gradient needs a
scatter-add.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import Packed, lazy_property

MASKED_SCORE = -1e30  # finite, because a sentence without tokens must not give NaN
# torch's softmax is three times slower for rows shorter than a vector register of fp32.
WIDTH_MULTIPLE = 16


def round_up_width(longest: int) -> int:
    """Round up to the width that sentences of this length are padded to."""
    return -(-max(longest, 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


class PaddedGroups:
    """One side of a batch, padded: groups of sentences of similar length, each group padded to its
    own width.

    A cell is one head's row at one position of a sentence, including positions without a token. The
    cells of a group are ordered by sentence, head and position, and the groups are stored one after
    another.
    """

    def __init__(self, packed: Packed, groups: list[Tensor], widths: list[int]) -> None:
        self.packed, self.widths = packed, widths
        self.sizes = [group.numel() * width for group, width in zip(groups, widths, strict=True)]
        self.live: list[Tensor] = []  # per group, (S, L): whether the position has a token
        # Per group, (S, L): the packed row of the token, 0 where there is none
        self.tokens: list[Tensor] = []
        # Per sentence: its first cell if there were one head, and the number of cells from one head
        # to the next.
        self.starts = packed.offsets.new_zeros(packed.n_sentences + 1)
        self.strides = torch.zeros_like(self.starts)
        self.indices: dict[tuple[int, ...], Tensor] = {}
        first = 0
        for group, width, size in zip(groups, widths, self.sizes, strict=True):
            positions = torch.arange(width, device=group.device)
            live = positions < packed.lengths[group, None]
            self.live.append(live)
            self.tokens.append(torch.where(live, packed.offsets[group, None] + positions, 0))
            self.starts[group] = first + width * torch.arange(group.numel(), device=group.device)
            self.strides[group] = width
            first += size
        self.starts[-1] = first  # the dead tail reads the row of zeros after the last cell

    def pad(self, x: Tensor, group: int) -> Tensor:
        """Pad the packed heads x (T, H, D) to the cells of a group: (S * H, L, D)."""
        n, heads, size = x.shape
        if x.stride(2) != 1 or x.stride(1) != size or x.stride(0) % size:
            x = x.contiguous()
        # x may be a slice of a wider projection (queries, keys and values in one), which has more
        # rows per token.
        rows_per_token = x.stride(0) // size
        index = self.indices.get((group, heads, rows_per_token))
        if index is None:
            head = torch.arange(heads, device=x.device)[:, None]
            index = (self.tokens[group][:, None] * rows_per_token + head).flatten()  # (S * H * L,)
            self.indices[group, heads, rows_per_token] = index
        rows = x.as_strided(((n - 1) * rows_per_token + heads, size), (size, 1))
        return rows.index_select(0, index).view(-1, self.widths[group], size)

    def new_cells(self, like: Tensor, heads: int, size: int) -> list[Tensor]:
        """Allocate the cells of all groups, each (S * H, L, D), in one storage that ends with a row
        of zeros.
        """
        cells = like.new_empty(sum(self.sizes) * heads + 1, size)
        cells[-1] = 0.0
        groups = cells.split([*(n * heads for n in self.sizes), 1])
        return [
            part.view(-1, width, size) for part, width in zip(groups, self.widths, strict=False)
        ]

    def unpad(self, cells: list[Tensor], heads: int) -> Tensor:
        """Pack cells that `new_cells` allocated: (T, H, D), zeros in the unused tail."""
        index = self.indices.get((heads,))
        if index is None:
            packed, head = self.packed, torch.arange(heads, device=self.starts.device)
            start, stride = self.starts[packed.sentence, None], self.strides[packed.sentence, None]
            rows = start * heads + stride * head + packed.positions[:, None]  # (T, H)
            index = self.indices[heads,] = rows.flatten()
        size = cells[0].shape[2]
        rows = cells[0].as_strided((sum(self.sizes) * heads + 1, size), (size, 1))
        return rows.index_select(0, index).view(-1, heads, size)


class AttentionMask:
    """Which keys each query attends to: those of its own sentence, none ahead if `causal`, at most
    `window` positions away.

    It is made once for all layers. Because queries and keys lie end to end, a query attends to an
    interval of key rows, and the queries that attend to a key are an interval too.
    `is_single_group` pads all sentences to one width, which is required for returning attention
    weights.
    """

    def __init__(
        self,
        queries: Packed,
        keys: Packed,
        causal: bool = False,
        window: int | None = None,
        is_single_group: bool = False,
    ) -> None:
        self.packed, self.causal, self.window = (queries, keys), causal, window
        self.is_single_group = is_single_group

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
    def groups(self) -> list[Tensor]:
        """The sentences of each group: those whose longer side is padded to the same width."""
        queries, keys = self.packed
        if self.is_single_group:
            return [torch.arange(queries.n_sentences, device=queries.tokens.device)]
        sizes = (
            torch.maximum(queries.lengths, keys.lengths)
            .add(WIDTH_MULTIPLE - 1)
            .div(WIDTH_MULTIPLE, rounding_mode="floor")
        )
        return [(sizes == size).nonzero().squeeze(1) for size in sizes.unique().tolist()]

    def pad_groups(self, packed: Packed) -> PaddedGroups:
        if self.is_single_group:
            longest = [packed.longest]
        else:
            longest = [int(packed.lengths[group].max()) for group in self.groups]
        return PaddedGroups(packed, self.groups, [round_up_width(n) for n in longest])

    @lazy_property
    def queries(self) -> PaddedGroups:
        return self.pad_groups(self.packed[0])

    @lazy_property
    def keys(self) -> PaddedGroups:
        return self.queries if self.packed[0] is self.packed[1] else self.pad_groups(self.packed[1])

    @lazy_property
    def score_biases(self) -> list[Tensor]:
        """The bias on the scores of each group, (S, 1, Lq or 1, Lk) fp32: 0, or MASKED_SCORE where
        a key is masked out.
        """
        biases = []
        for live, n_queries in zip(self.keys.live, self.queries.widths, strict=True):
            is_visible = live[:, None, None, :]
            position = torch.arange(max(n_queries, live.shape[1]), device=live.device)
            ahead = position[: live.shape[1]] - position[:n_queries, None]
            if self.causal:
                is_visible = is_visible & (ahead <= 0)
            if self.window is not None:
                is_visible = is_visible & (ahead.abs() <= self.window)
            biases.append(torch.where(is_visible, 0.0, MASKED_SCORE))
        return biases

    @lazy_property
    def has_empty_rows(self) -> bool:
        """Whether some query may have no key to attend to: softmax would give it uniform weights,
        so they are set to zero.
        """
        queries, keys = self.packed
        return bool(((keys.lengths == 0) & (queries.lengths > 0)).any())
