"""Attention over packed sentences: softmax(Q K^T / sqrt(d_k)) V of section 3.2, one function for
its three uses. The projections around it are in `multi_head_attention.py`.

Sentences of similar length are padded to one width (`attention_mask.py`). Decoding steps
have their own attention, over a cache (`cache.py`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import pack
from nmt.model.attention_mask import AttentionMask
from nmt.model.dropout_masks import draw_factors
from nmt.system.errors import UserError

DrawFactors = Callable[[Tensor, float], Tensor]
Gather = Callable[[Tensor, Tensor], Tensor]


def look_up_rows(table: Tensor, numbers: Tensor) -> Tensor:
    return F.embedding(numbers, table)


def rotate(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Rotate queries or keys by the angles of their positions: (T, H, K), (T, K) -> (T, H, K)."""
    if rotation is None:
        return x
    sines, cosines = rotation[:, None].chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1).to(x.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    weights: list[Tensor] | None = None,
    dropout: float = 0.0,
    rotation: Tensor | None = None,
    draw: DrawFactors = draw_factors,
    look_up: Gather = look_up_rows,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d_k)) v within each sentence: (Tq, H, K), (Tk, H, K), (Tk, H, V)
    -> (Tq, H, V). `rotation`, if given, is applied to q and k first.

    If a list is given as `weights`, attention weights (S, H, Lq, Lk) are appended to it; the mask
    must then have a single group. Each weight is dropped with probability `dropout`, but not those
    that are appended; `draw` draws the factors for that.
    """
    heads, scale = v.shape[1:], q.shape[2] ** -0.5
    q, k, v = (x.flatten(1) for x in (rotate(q, rotation), rotate(k, rotation), v))

    def pad(x: Tensor, rows: Tensor) -> Tensor:
        return look_up(x, rows).unflatten(2, (heads[0], -1)).transpose(1, 2)  # (S, H, L, D)

    outputs = []
    for queries, keys, bias in mask.groups:
        scores = pad(q, queries) @ pad(k, keys).transpose(2, 3)  # (S, H, Lq, Lk)
        # fp32 or better, because the bias is fp32
        softmax = torch.add(bias, scores, alpha=scale).softmax(-1)
        if mask.has_empty_rows:
            softmax = softmax * (bias == 0)
        if weights is not None:
            longest = [side.longest for side in mask.packed]
            weights.append(softmax[:, :, : longest[0], : longest[1]])
        kept = softmax.to(q.dtype)
        if dropout:
            kept = kept * draw(kept, dropout)
        output = kept @ pad(v, keys)  # (S, H, Lq, V)
        outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1))
    nothing = v.new_zeros(1, v.shape[1])  # for the dead tail
    return look_up(torch.cat((*outputs, nothing)), mask.cells).view(-1, *heads)


def attend_matrices(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T / sqrt(d_k)) v of one sentence, with `attend`: (Lq, K), (Lk, K), (Lk, V)
    -> (Lq, V), or the same with heads in the middle, (Lq, H, K) and so on.

    The weights are returned, too: (Lq, Lk) or (H, Lq, Lk).
    """
    _check_matrices(q, k, v, window)
    if q.dim() == 2:
        output, weights = attend_matrices(q[:, None], k[:, None], v[:, None], causal, window)
        return output[:, 0], weights[0]
    queries = pack([[0] * len(q)]).to(q.device)
    keys = pack([[0] * len(k)]).to(q.device)
    collected: list[Tensor] = []
    mask = AttentionMask(queries, keys, causal, window, is_single_group=True)
    output = attend(q, k, v, mask, collected)  # (Lq, H, V)
    return output, collected[0][0]


def _check_matrices(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
    have_heads = {x.dim() for x in (q, k, v)}
    if have_heads not in ({2}, {3}) or q.shape[1:] != k.shape[1:] or k.shape[:-1] != v.shape[:-1]:
        raise UserError(
            f"q, k and v have the shapes {[*q.shape]}, {[*k.shape]} and {[*v.shape]}; give matrices "
            "(length, size) or, all three, (length, heads, size); queries and keys need one size, keys "
            "and values one length"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise UserError(f"q, k and v are {dtypes}; give one type of floating-point numbers")
    if window is not None and (window < 0 or len(q) != len(k)):
        raise UserError(
            f"window is {window}, for {len(q)} queries and {len(k)} keys; it must not be negative, "
            "and is for queries and keys of one sentence"
        )
