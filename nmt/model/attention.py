"""The one place that knows how attention is computed: over packed sentences, and one step at a time with a cache.

Sentences of like length are spread together onto a (sentence, head, place) grid, attended with plain batched matrix
products, and gathered back; at translation lengths this beats fused kernels on CPU. Spreading looks up rows of one head
each, so no tensor is transposed, and gathering is a look-up too, so neither has a scatter-add for a gradient.
On GPU a kernel reads packed rows as they lie: ours (`attention_triton.py`), or torch's where that was measured to be
faster (`attention_varlen.py`, `attention_choice.py`). Section 3.2: one function, three uses.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import Packed, lazy_property
from nmt.model.attention_triton import packed_attention, supports
from nmt.model.attention_varlen import supports_varlen, varlen_attention

TRITON, VARLEN = "triton", "varlen"  # the ways that a GPU may take: kernels of ours, or torch's

FAR = -1e30  # finite: a sentence without tokens must give a number, not NaN
WIDTH = 16  # grids are a multiple of this wide: below a vector register of fp32 torch's softmax is three times slower


def padded(longest: int) -> int:
    return -(-max(longest, 1) // WIDTH) * WIDTH


class Grid:
    """One side of a batch as cells: for each group of sentences (sentence, head, place), one group after another."""

    def __init__(self, packed: Packed, groups: list[Tensor], widths: list[int]) -> None:
        self.packed, self.widths = packed, widths
        self.sizes = [group.numel() * width for group, width in zip(groups, widths, strict=True)]
        self.live, self.tokens = (
            [],
            [],
        )  # of each group (S, L): is there a token, and which (token 0 where not)
        self.starts = packed.offsets.new_zeros(
            packed.n_sentences + 1
        )  # of a sentence's cells, were there one head
        self.strides = torch.zeros_like(self.starts)  # from one of its heads to the next
        self.indices: dict[tuple[int, ...], Tensor] = {}
        first = 0
        for group, width, size in zip(groups, widths, self.sizes, strict=True):
            places = torch.arange(width, device=group.device)
            live = places < packed.lengths[group, None]
            self.live.append(live)
            self.tokens.append(torch.where(live, packed.offsets[group, None] + places, 0))
            self.starts[group] = first + width * torch.arange(group.numel(), device=group.device)
            self.strides[group] = width
            first += size
        self.starts[-1] = first  # the dead tail's, a row of zeros after all cells

    def spread(self, x: Tensor, group: int) -> Tensor:
        """The packed heads x (T, H, D) in the cells of a group: (S * H, L, D)."""
        n, heads, size = x.shape
        if x.stride(2) != 1 or x.stride(1) != size or x.stride(0) % size:
            x = x.contiguous()
        each = (
            x.stride(0) // size
        )  # rows of one head for a token, where x is a slice of a wider product
        index = self.indices.get((group, heads, each))
        if index is None:
            head = torch.arange(heads, device=x.device)[:, None]
            index = (self.tokens[group][:, None] * each + head).flatten()  # (S * H * L,)
            self.indices[group, heads, each] = index
        rows = x.as_strided(((n - 1) * each + heads, size), (size, 1))
        return rows.index_select(0, index).view(-1, self.widths[group], size)

    def room(self, like: Tensor, heads: int, size: int) -> list[Tensor]:
        """Unfilled cells of all groups, each (S * H, L, D); the first's storage holds the others too."""
        cells = like.new_empty(sum(self.sizes) * heads + 1, size)
        cells[-1] = 0.0
        parts = cells.split([*(n * heads for n in self.sizes), 1])
        return [part.view(-1, width, size) for part, width in zip(parts, self.widths, strict=False)]

    def gather(self, cells: list[Tensor], heads: int) -> Tensor:
        """What `room` gave, filled, as packed heads (T, H, D); the dead tail is zero."""
        index = self.indices.get((heads,))
        if index is None:
            packed, head = self.packed, torch.arange(heads, device=self.starts.device)
            start, stride = self.starts[packed.sentence, None], self.strides[packed.sentence, None]
            index = (
                start * heads + stride * head + packed.positions[:, None]
            ).flatten()  # (T * H,)
            self.indices[heads,] = index
        size = cells[0].shape[2]
        rows = cells[0].as_strided((sum(self.sizes) * heads + 1, size), (size, 1))
        return rows.index_select(0, index).view(-1, heads, size)


class Field:
    """Which keys each query sees: those of its own sentence, with `causal` none ahead, with `window` only so many
    places to each side. Made once for all layers. `is_whole` keeps all sentences in one group. Where queries and keys
    lie end to end, this is an interval of rows: `seen` by a query, `seeing` a key. `path` is the way a GPU takes."""

    def __init__(
        self,
        queries: Packed,
        keys: Packed,
        causal: bool = False,
        window: int | None = None,
        is_whole: bool = False,
        path: str = TRITON,
    ) -> None:
        self.packed, self.causal, self.window, self.path = (queries, keys), causal, window, path
        self.is_on_cpu = queries.tokens.device.type == "cpu"
        self.is_whole = is_whole or not self.is_on_cpu  # elsewhere lengths are not read back

    @property
    def takes_varlen(self) -> bool:
        """Whether torch's kernel is wanted and fits: it counts a window from the ends of sentences, not from their
        beginnings."""
        queries, keys = self.packed
        return self.path == VARLEN and (queries is keys or not self.causal and self.window is None)

    @lazy_property
    def seen(self) -> Tensor:
        """For each query the first key row it looks at and one past the last; both 0 in the dead tail."""  # (2, Tq)
        queries, keys = self.packed
        return self.intervals(
            queries, keys, ahead=0 if self.causal else self.window, behind=self.window
        )

    @lazy_property
    def seeing(self) -> Tensor:
        """For each key the first query row that looks at it and one past the last; both 0 in the dead tail."""
        queries, keys = self.packed  # (2, Tk)
        return self.intervals(
            keys, queries, ahead=self.window, behind=0 if self.causal else self.window
        )

    def intervals(
        self, rows: Packed, others: Packed, ahead: int | None, behind: int | None
    ) -> Tensor:
        """The rows of `others` within a row's sentence that lie at most so many places ahead of it or behind it."""
        # One more sentence, without tokens, stands for the dead tail.
        bounds = torch.stack((others.offsets[:-1], others.offsets[1:]))
        first, last = F.pad(bounds, (0, 1))[:, rows.sentence]  # (T,)
        place = first + rows.positions
        if behind is not None:
            first = torch.minimum(torch.maximum(first, place - behind), last)
        if ahead is not None:
            last = torch.maximum(torch.minimum(last, place + ahead + 1), first)
        return torch.stack((first, last)).int()

    @lazy_property
    def groups(self) -> list[Tensor]:
        """Sentences of like length."""
        queries, keys = self.packed
        if self.is_whole:
            return [torch.arange(queries.n_sentences, device=queries.tokens.device)]
        sizes = (
            torch.maximum(queries.lengths, keys.lengths)
            .add(WIDTH - 1)
            .div(WIDTH, rounding_mode="floor")
        )
        return [(sizes == size).nonzero().squeeze(1) for size in sizes.unique().tolist()]

    def grid(self, packed: Packed) -> Grid:
        longest = [
            packed.longest if self.is_whole else int(packed.lengths[g].max()) for g in self.groups
        ]
        return Grid(packed, self.groups, [padded(n) for n in longest])

    @lazy_property
    def queries(self) -> Grid:
        return self.grid(self.packed[0])

    @lazy_property
    def keys(self) -> Grid:
        return self.queries if self.packed[0] is self.packed[1] else self.grid(self.packed[1])

    @lazy_property
    def masks(self) -> list[Tensor]:
        """For each group (S, 1, Lq or 1, Lk) fp32: 0 where a query may look, else FAR."""
        masks = []
        for live, n_queries in zip(self.keys.live, self.queries.widths, strict=True):
            may = live[:, None, None, :]
            place = torch.arange(max(n_queries, live.shape[1]), device=live.device)
            ahead = place[: live.shape[1]] - place[:n_queries, None]
            if self.causal:
                may = may & (ahead <= 0)
            if self.window is not None:
                may = may & (ahead.abs() <= self.window)
            masks.append(torch.where(may, 0.0, FAR))
        return masks

    @lazy_property
    def has_void(self) -> bool:
        """Whether some query may look at nothing, so that its weights must be made zero."""
        queries, keys = self.packed
        return not self.is_on_cpu or bool(((keys.lengths == 0) & (queries.lengths > 0)).any())


class _GridAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, field: Field, seen: list[Tensor] | None
    ) -> Tensor:
        heads, scale = q.shape[1], q.shape[2] ** -0.5
        mixed = field.queries.room(v, heads, v.shape[2])
        saved = []
        for index, mask in enumerate(field.masks):
            q_grid = field.queries.spread(q, index)  # (S * H, Lq, K)
            k_grid, v_grid = (
                field.keys.spread(k, index),
                field.keys.spread(v, index),
            )  # (S * H, Lk, K or V)
            scores = torch.bmm(q_grid, k_grid.transpose(1, 2)).view(
                mask.shape[0], heads, -1, mask.shape[3]
            )
            weights = torch.add(mask, scores, alpha=scale).softmax(
                -1
            )  # at least fp32, as the mask is
            if field.has_void:
                weights.mul_(mask == 0)
            if seen is not None:
                seen.append(weights)
            weights = weights.to(q.dtype).view(-1, *weights.shape[2:])
            torch.bmm(weights, v_grid, out=mixed[index])
            saved += [q_grid, k_grid, v_grid, weights, mixed[index]]
        ctx.save_for_backward(*saved)
        ctx.field, ctx.heads, ctx.scale = field, heads, scale
        return field.queries.gather(mixed, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        field, heads, saved = ctx.field, ctx.heads, ctx.saved_tensors
        q_room, k_room = (
            grid.room(grad, heads, saved[0].shape[2]) for grid in (field.queries, field.keys)
        )
        v_room = field.keys.room(grad, heads, saved[2].shape[2])
        for index, live in enumerate(field.queries.live):
            q_grid, k_grid, v_grid, weights, mixed = saved[5 * index : 5 * index + 5]
            d_mixed = field.queries.spread(grad, index)
            d_mixed.view(live.shape[0], heads, live.shape[1], -1).mul_(
                live[:, None, :, None].to(grad.dtype)
            )
            torch.bmm(weights.transpose(1, 2), d_mixed, out=v_room[index])
            d_scores = torch.bmm(d_mixed, v_grid.transpose(1, 2))
            d_scores.sub_((d_mixed * mixed).sum(-1, keepdim=True)).mul_(
                weights
            )  # through the softmax
            d_scores.mul_(ctx.scale)
            torch.bmm(d_scores, k_grid, out=q_room[index])
            torch.bmm(d_scores.transpose(1, 2), q_grid, out=k_room[index])
        return (
            field.queries.gather(q_room, heads),
            field.keys.gather(k_room, heads),
            field.keys.gather(v_room, heads),
            None,
            None,
        )


@torch.compiler.disable
def _grid_attention(
    q: Tensor, k: Tensor, v: Tensor, field: Field, seen: list[Tensor] | None
) -> Tensor:
    return _GridAttention.apply(q, k, v, field, seen)


def attend(
    q: Tensor, k: Tensor, v: Tensor, field: Field, weights: list[Tensor] | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(d_k)) v within each sentence: (Tq, H, K), (Tk, H, K), (Tk, H, V) -> (Tq, H, V).

    A list given as `weights` receives (S, H, Lq, Lk); the field must then be whole.
    """
    queries, keys = field.packed
    if weights is None and not field.is_on_cpu:
        if field.takes_varlen and supports_varlen(q, v):
            return varlen_attention(
                q,
                k,
                v,
                queries.offsets,
                keys.offsets,
                queries.longest,
                keys.longest,
                field.causal,
                field.window,
            )
        if supports(q, v):
            return packed_attention(q, k, v, field.seen, field.seeing)
    seen: list[Tensor] | None = None if weights is None else []
    mixed = _grid_attention(q, k, v, field, seen)
    if weights is not None and seen is not None:
        weights.append(seen[0][:, :, : queries.longest, : keys.longest])
    return mixed
