"""Attention over packed sentences: softmax(Q K^T / sqrt(d_k)) V of section 3.2, one function for
its three uses. The projections around it are in `multi_head_attention.py`.

Sentences of similar length are padded to one width (`attention_mask.py`), and attention is computed with
plain batched matrix products. Decoding steps have their own attention, over a cache (`cache.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nmt.data.batch import pack
from nmt.model.attention_mask import AttentionMask
from nmt.model.dropout_masks import draw_factors
from nmt.system.errors import UserError

DrawFactors = Callable[[Tensor, float], Tensor]


def rotate(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Rotate queries or keys by the angles of their positions: (T, H, K), (T, K) -> (T, H, K)."""
    if rotation is None:
        return x
    sines, cosines = rotation[:, None].chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1).to(x.dtype)


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
        draw: DrawFactors,
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
                drawn.append(draw(weights, dropout))
                kept = weights * drawn[group]
            torch.bmm(kept, v_cells, out=outputs[group])
            saved += [q_cells, k_cells, v_cells, weights, outputs[group]]
        ctx.save_for_backward(*saved, *drawn)
        ctx.mask, ctx.heads, ctx.scale = mask, heads, scale
        return mask.queries.unpad(outputs, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
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
            None,
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    weights: list[Tensor] | None = None,
    dropout: float = 0.0,
    rotation: Tensor | None = None,
    draw: DrawFactors = draw_factors,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d_k)) v within each sentence: (Tq, H, K), (Tk, H, K), (Tk, H, V)
    -> (Tq, H, V). `rotation`, if given, is applied to q and k first.

    If a list is given as `weights`, attention weights (S, H, Lq, Lk) are appended to it; the mask
    must then have a single group. Each weight is dropped with probability `dropout`, but not those
    that are appended; `draw` draws the factors for that.
    """
    q, k = rotate(q, rotation), rotate(k, rotation)
    if weights is None:
        return _PaddedAttention.apply(q, k, v, mask, None, dropout, draw)
    collected: list[Tensor] = []
    output = _PaddedAttention.apply(q, k, v, mask, collected, dropout, draw)
    queries, keys = mask.packed
    weights.append(collected[0][:, :, : queries.longest, : keys.longest])
    return output


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
