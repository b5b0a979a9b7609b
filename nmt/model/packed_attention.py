"""Attention over packed sentences: softmax(Q K^T / sqrt(d_k)) V of section 3.2, one function for
its three uses. The projections around it are in `multi_head_attention.py`.

On a CPU, sentences of similar length are padded to one width, and attention is computed with plain batched
matrix products. Padding and packing gather one head's row at a time by index, so no tensor is transposed
and no gradient needs a scatter-add. On a GPU a kernel of ours reads the packed rows in place
(`attention_triton.py`).
Decoding steps have their own attention, over a cache (`cache.py`). No kernel drops attention weights,
so with `model.attention_dropout` a GPU trains through the padded products too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import Packed, lazy_property, pack
from nmt.model.dropout import draw_dropout
from nmt.model.positions import rotate
from nmt.system.errors import UserError
from nmt.system.tracing import not_traced

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
            places = torch.arange(width, device=group.device)
            live = places < packed.lengths[group, None]
            self.live.append(live)
            self.tokens.append(torch.where(live, packed.offsets[group, None] + places, 0))
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
        parts = cells.split([*(n * heads for n in self.sizes), 1])
        return [part.view(-1, width, size) for part, width in zip(parts, self.widths, strict=False)]

    def unpad(self, cells: list[Tensor], heads: int) -> Tensor:
        """Pack cells that `new_cells` allocated: (T, H, D), zeros in the unused tail."""
        index = self.indices.get((heads,))
        if index is None:
            packed, head = self.packed, torch.arange(heads, device=self.starts.device)
            start, stride = self.starts[packed.sentence, None], self.strides[packed.sentence, None]
            places = start * heads + stride * head + packed.positions[:, None]  # (T, H)
            index = self.indices[heads,] = places.flatten()
        size = cells[0].shape[2]
        rows = cells[0].as_strided((sum(self.sizes) * heads + 1, size), (size, 1))
        return rows.index_select(0, index).view(-1, heads, size)


class AttentionMask:
    """Which keys each query attends to: those of its own sentence, none ahead if `causal`, at most
    `window` places away.

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
        self.is_on_cpu = queries.tokens.device.type == "cpu"
        # Grouping reads the lengths on the host, which on a GPU would force a synchronisation.
        self.is_single_group = is_single_group or not self.is_on_cpu

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
        place = first + rows.positions
        if behind is not None:
            first = torch.minimum(torch.maximum(first, place - behind), last)
        if ahead is not None:
            last = torch.maximum(torch.minimum(last, place + ahead + 1), first)
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
            place = torch.arange(max(n_queries, live.shape[1]), device=live.device)
            ahead = place[: live.shape[1]] - place[:n_queries, None]
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
        return not self.is_on_cpu or bool(((keys.lengths == 0) & (queries.lengths > 0)).any())


class _PaddedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        collected: list[Tensor] | None,
        dropout: float,
    ) -> Tensor:
        heads, scale = q.shape[1], q.shape[2] ** -0.5
        outputs = mask.queries.new_cells(v, heads, v.shape[2])
        saved = []
        drawn = []
        for group, bias in enumerate(mask.score_biases):
            q_cells = mask.queries.pad(q, group)  # (S * H, Lq, K)
            k_cells = mask.keys.pad(k, group)  # (S * H, Lk, K)
            v_cells = mask.keys.pad(v, group)  # (S * H, Lk, V)
            scores = torch.bmm(q_cells, k_cells.transpose(1, 2))
            scores = scores.view(bias.shape[0], heads, -1, bias.shape[3])  # (S, H, Lq, Lk)
            # fp32 or better, because the bias is fp32
            weights = torch.add(bias, scores, alpha=scale).softmax(-1)
            if mask.has_empty_rows:
                weights.mul_(bias == 0)
            if collected is not None:
                collected.append(weights)
            weights = weights.to(q.dtype).view(-1, *weights.shape[2:])
            kept = weights
            if dropout:
                drawn.append(draw_dropout(weights, dropout))
                kept = weights * drawn[group]
            torch.bmm(kept, v_cells, out=outputs[group])
            saved += [q_cells, k_cells, v_cells, weights, outputs[group]]
        ctx.save_for_backward(*saved, *drawn)
        ctx.mask, ctx.heads, ctx.scale = mask, heads, scale
        return mask.queries.unpad(outputs, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        mask, heads, saved = ctx.mask, ctx.heads, ctx.saved_tensors
        d_q = mask.queries.new_cells(grad, heads, saved[0].shape[2])
        d_k = mask.keys.new_cells(grad, heads, saved[0].shape[2])
        d_v = mask.keys.new_cells(grad, heads, saved[2].shape[2])
        drawn = saved[5 * len(mask.queries.live) :]  # empty without dropout
        for group, live in enumerate(mask.queries.live):
            q_cells, k_cells, v_cells, weights, output = saved[5 * group : 5 * group + 5]
            d_output = mask.queries.pad(grad, group)
            # cells without a token were padded with the gradient of row 0
            is_live = live[:, None, :, None].to(grad.dtype)  # (S, 1, Lq, 1)
            d_output.view(live.shape[0], heads, live.shape[1], -1).mul_(is_live)
            kept = weights * drawn[group] if drawn else weights
            torch.bmm(kept.transpose(1, 2), d_output, out=d_v[group])
            d_scores = torch.bmm(d_output, v_cells.transpose(1, 2))  # (S * H, Lq, Lk)
            if drawn:
                d_scores.mul_(drawn[group])
            # through the softmax: weights * (d_weights - sum of weights * d_weights)
            d_scores.sub_((d_output * output).sum(-1, keepdim=True)).mul_(weights)
            d_scores.mul_(ctx.scale)
            torch.bmm(d_scores, k_cells, out=d_q[group])
            torch.bmm(d_scores.transpose(1, 2), q_cells, out=d_k[group])
        return (
            mask.queries.unpad(d_q, heads),
            mask.keys.unpad(d_k, heads),
            mask.keys.unpad(d_v, heads),
            None,
            None,
            None,
        )


@not_traced
def _attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    collected: list[Tensor] | None,
    dropout: float,
) -> Tensor:
    return _PaddedAttention.apply(q, k, v, mask, collected, dropout)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    weights: list[Tensor] | None = None,
    dropout: float = 0.0,
    rotation: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d_k)) v within each sentence: (Tq, H, K), (Tk, H, K), (Tk, H, V)
    -> (Tq, H, V). `rotation`, if given, is applied to q and k first.

    If a list is given as `weights`, attention weights (S, H, Lq, Lk) are appended to it; the mask
    must then have a single group. Each weight is dropped with probability `dropout`, but not those
    that are appended.
    """
    queries, keys = mask.packed
    q, k = rotate(q, rotation), rotate(k, rotation)
    if weights is None and not dropout and not mask.is_on_cpu:
        from nmt.model import attention_triton  # a CPU starts a tenth of a second sooner without

        if attention_triton.supports_triton(q, v):
            intervals = mask.key_intervals, mask.query_intervals
            return attention_triton.triton_attention(q, k, v, *intervals)
    if weights is None:
        return _attend_padded(q, k, v, mask, None, dropout)
    collected: list[Tensor] = []
    output = _attend_padded(q, k, v, mask, collected, dropout)
    weights.append(collected[0][:, :, : queries.longest, : keys.longest])
    return output


def attend_matrices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: int | None = None,
    weights: list[Tensor] | None = None,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d_k)) v of one sentence, with `attend`: (Lq, K), (Lk, K), (Lk, V)
    -> (Lq, V), or the same with heads in the middle, (Lq, H, K) and so on.

    If a list is given as `weights`, (Lq, Lk) or (H, Lq, Lk) is appended to it.
    """
    _check_matrices(q, k, v, window)
    has_heads = q.dim() == 3
    if not has_heads:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    queries = pack([[0] * len(q)]).to(q.device)
    keys = pack([[0] * len(k)]).to(q.device)
    mask = AttentionMask(queries, keys, causal, window, is_single_group=True)
    collected: list[Tensor] | None = None if weights is None else []
    output = attend(q, k, v, mask, collected)  # (Lq, H, V)
    if weights is not None and collected is not None:
        of_heads = collected[0][0]  # (H, Lq, Lk)
        weights.append(of_heads if has_heads else of_heads[0])
    return output if has_heads else output[:, 0]


def _check_matrices(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
    sizes = f"q, k and v have the shapes {[*q.shape]}, {[*k.shape]} and {[*v.shape]}"
    if q.dim() not in (2, 3) or not q.dim() == k.dim() == v.dim():
        raise UserError(
            f"{sizes}; give matrices (length, size) or, all three, (length, heads, size)"
        )
    if q.shape[1:] != k.shape[1:] or k.shape[:-1] != v.shape[:-1]:
        raise UserError(
            f"{sizes}; queries and keys need one size, keys and values one length, all one number of heads"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise UserError(f"q, k and v are {dtypes}; give one type of floating-point numbers")
    if window is not None and (window < 0 or len(q) != len(k)):
        raise UserError(
            f"window is {window}, for {len(q)} queries and {len(k)} keys; it must not be negative, "
            "and is for queries and keys of one sentence"
        )
