"""Attention over packed sentences: softmax(Q K^T / sqrt(d_k)) V of section 3.2, one function for
its three uses. The projections around it are in `multi_head_attention.py`.

In training on the CPU, short sentences are attended to one by one in compiled loops
(`compiled_attention.py`). Otherwise those of similar length are padded to one width, and attention is
computed with plain batched matrix products. Padding and packing gather one head's row at a time by index,
so no tensor is transposed and no gradient needs a scatter-add. On a GPU a kernel of ours reads the packed
rows in place (`attention_triton.py`).
Decoding steps have their own attention, over a cache (`cache.py`). No kernel drops attention weights,
so with `model.attention_dropout` a GPU trains through the padded products too.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import Packed, lazy_property, pack
from nmt.model.attention_triton import supports_triton, triton_attention
from nmt.model.dropout import draw_dropout
from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.system.tracing import not_traced

MASKED_SCORE = -1e30  # finite, because a sentence without tokens must not give NaN
# torch's softmax is three times slower for rows shorter than a vector register of fp32.
WIDTH_MULTIPLE = 16
# Batched products are faster for longer sentences.
MAX_COMPILED_LENGTH = 64


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
        self.live: list[Tensor] = []  # per group, (S, L): whether the position has a token
        # Per group, (S, L): the packed row of the token, 0 where there is none
        self.tokens: list[Tensor] = []
        # Per sentence: its first cell if there were one head, and the number of cells from one head
        # to the next.
        self.starts = packed.offsets.new_zeros(packed.n_sentences + 1)
        self.strides = torch.zeros_like(self.starts)
        self.indices: dict[tuple[int, ...], Tensor] = {}
        first = 0
        for group, width in zip(groups, widths, strict=True):
            places = torch.arange(width, device=group.device)
            live = places < packed.lengths[group, None]
            self.live.append(live)
            self.tokens.append(torch.where(live, packed.offsets[group, None] + places, 0))
            self.starts[group] = first + width * torch.arange(group.numel(), device=group.device)
            self.strides[group] = width
            first += group.numel() * width
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

    def unpad(self, cells: Sequence[Tensor], heads: int) -> Tensor:
        """Pack the cells of all groups, each (S * H, L, D): (T, H, D), zeros in the dead tail."""
        index = self.indices.get((heads,))
        if index is None:
            packed, head = self.packed, torch.arange(heads, device=self.starts.device)
            start, stride = self.starts[packed.sentence, None], self.strides[packed.sentence, None]
            places = start * heads + stride * head + packed.positions[:, None]  # (T, H)
            index = self.indices[heads,] = places.flatten()
        size = cells[0].shape[2]
        rows = torch.cat([*(x.reshape(-1, size) for x in cells), cells[0].new_zeros(1, size)])
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


class _Pad(torch.autograd.Function):
    """Packed heads (T, H, D) -> the cells of each group, (S * H, L, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: PaddedGroups) -> tuple[Tensor, ...]:
        ctx.groups, ctx.heads = groups, x.shape[1]
        return tuple(groups.pad(x, group) for group in range(len(groups.live)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.groups.unpad(grads, ctx.heads), None


class _Unpad(torch.autograd.Function):
    """The cells of each group, (S * H, L, D) -> packed heads (T, H, D)."""

    @staticmethod
    def forward(ctx: Any, groups: PaddedGroups, heads: int, *cells: Tensor) -> Tensor:
        ctx.groups = groups
        return groups.unpad(cells, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = []
        for group, live in enumerate(ctx.groups.live):
            cells = ctx.groups.pad(grad, group)
            # cells without a token were padded with the gradient of row 0
            is_live = live[:, None, :, None].to(grad.dtype)  # (S, 1, L, 1)
            cells.view(len(live), -1, *cells.shape[1:]).mul_(is_live)
            grads.append(cells)
        return None, None, *grads


@not_traced
def _attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    collected: list[Tensor] | None,
    dropout: float,
) -> Tensor:
    heads, outputs = q.shape[1], []
    cells = (_Pad.apply(q, mask.queries), _Pad.apply(k, mask.keys), _Pad.apply(v, mask.keys))
    for bias, q_cells, k_cells, v_cells in zip(mask.score_biases, *cells, strict=True):
        scores = torch.bmm(q_cells, k_cells.transpose(1, 2))
        scores = scores.view(len(bias), heads, *scores.shape[1:])  # (S, H, Lq, Lk)
        # fp32 or better, because the bias is fp32
        weights = torch.add(bias, scores, alpha=q.shape[2] ** -0.5).softmax(-1)
        if mask.has_empty_rows:
            weights = weights * (bias == 0)
        if collected is not None:
            collected.append(weights.detach())
        weights = weights.to(q.dtype).flatten(0, 1)
        if dropout:
            weights = weights * draw_dropout(weights, dropout)
        outputs.append(torch.bmm(weights, v_cells))
    return _Unpad.apply(mask.queries, heads, *outputs)


@not_traced
def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    queries, keys = mask.packed
    # Without gradients nothing is compiled or loaded: a process that translates one line is soon done.
    is_training = torch.is_grad_enabled() and q.requires_grad
    is_short = max(queries.longest, keys.longest) <= MAX_COMPILED_LENGTH
    can_compile = is_training and is_short and q.dtype == v.dtype
    attend_compiled = load_compiled(q.dtype) if can_compile else None
    if attend_compiled is None:
        return _attend_padded(q, k, v, mask, None, 0.0)
    return attend_compiled(q, k, v, queries, keys, mask.n_ahead, mask.window)


@cache
def load_compiled(dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Return compiled attention for this type, or None if there is none, or if numba fails."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        from nmt.engines.cpu.compiled_attention import attend_compiled

        x = torch.ones(1, 1, 1, dtype=dtype, requires_grad=True)
        one_piece = pack([[0]])
        attend_compiled(x, x, x, one_piece, one_piece, None, None).sum().backward()
        return attend_compiled
    except Exception as error:  # numba is missing, or fails
        if not str(getattr(error, "name", "")).startswith("nmt.engines"):
            reason = f"{type(error).__name__}: {error}"
            say(f"warning: numba cannot compile attention ({reason}); training goes on more slowly")
        return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    weights: list[Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d_k)) v within each sentence: (Tq, H, K), (Tk, H, K), (Tk, H, V)
    -> (Tq, H, V).

    If a list is given as `weights`, attention weights (S, H, Lq, Lk) are appended to it; the mask
    must then have a single group. Each weight is dropped with probability `dropout`, but not those
    that are appended.
    """
    if weights is None and not dropout:
        if mask.is_on_cpu:
            return _attend_on_cpu(q, k, v, mask)
        if supports_triton(q, v):
            return triton_attention(q, k, v, mask.key_intervals, mask.query_intervals)
    collected: list[Tensor] | None = None if weights is None else []
    output = _attend_padded(q, k, v, mask, collected, dropout)
    if weights is not None and collected is not None:
        queries, keys = mask.packed
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
