"""The one place that knows how attention is computed: over packed sentences, and one step at a time with a cache.

Sentences are spread from the packed row onto a (sentence, place) grid, attended with plain batched matrix products, and
gathered back; at translation lengths this beats fused kernels on CPU. Both moves are their own inverse, so their
gradients are index look-ups too, never scatter-adds. Cells without a token are masked as keys and dropped as queries.
Section 3.2 of the paper: one function, used three ways.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.batch import Packed

FAR = -1e30  # finite: a sentence without tokens must give a number, not NaN
FLOOR = -80.0  # exp of anything that underflows is ten times slower on CPU


class Mask(NamedTuple):
    """What a query may look at, once for all layers, each (S, 1, Lq or 1, Lk)."""

    may: Tensor  # 1 or 0: multiplies the weights
    shut: Tensor  # 0 or FAR: keeps what is masked out of the maximum


class _Spread(torch.autograd.Function):
    """Tokens onto the grid: (T, F) -> (S * L, F). Cells without a token show some token; attention masks them."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return flat.index_select(0, packed.cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.packed), None


class _Gather(torch.autograd.Function):
    """The grid back to tokens: (S * L, F) -> (T, F). The dead tail is zero."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return _gathered(grid, packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        packed: Packed = ctx.packed
        return grad.index_select(0, packed.cells).mul_(packed.live.reshape(-1, 1)), None


def _gathered(grid: Tensor, packed: Packed) -> Tensor:
    flat = grid.index_select(0, packed.slots)
    flat[packed.n_live:] = 0.0
    return flat


class _Softmax(torch.autograd.Function):
    """Softmax of scores + mask over the last dimension; on CPU rows below 16 twice as fast as torch's."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Mask) -> Tensor:
        weights = scores + mask.shut  # at least fp32, as the mask is
        weights = weights.sub_(weights.amax(-1, keepdim=True)).clamp_(min=FLOOR).exp_().mul_(mask.may)
        weights = weights.div_(weights.sum(-1, keepdim=True).clamp_(min=0.5)).to(scores.dtype)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        product = weights * grad
        return product.addcmul_(weights, product.sum(-1, keepdim=True), value=-1.0), None


def allowed(queries: Packed, keys: Packed, causal: bool, window: int | None) -> Mask:
    """The keys of its own sentence; with `causal` none ahead, with `window` only so many places to each side."""
    may = keys.live[:, None, None, :]
    if causal or window is not None:
        device = keys.tokens.device
        ahead = torch.arange(keys.longest, device=device) - torch.arange(queries.longest, device=device)[:, None]
        if causal:
            may = may & (ahead <= 0)
        if window is not None:
            may = may & (ahead.abs() <= window)
    return Mask(may.float(), torch.where(may, 0.0, FAR))


def attend(q: Tensor, k: Tensor, v: Tensor, queries: Packed, keys: Packed, mask: Mask,
           weights: list[Tensor] | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d_k)) v within each sentence: (Tq, H, K), (Tk, H, K), (Tk, H, V) -> (Tq, H, V).

    `mask` comes from `allowed`, once for all layers. A list given as `weights` receives (S, H, Lq, Lk).
    """
    q_grid = _spread(q * q.shape[-1] ** -0.5, queries).transpose(1, 2)  # (S, H, Lq, K)
    k_grid = _spread(k, keys).permute(0, 2, 3, 1)  # (S, H, K, Lk)
    v_grid = _spread(v, keys).transpose(1, 2)  # (S, H, Lk, V)
    seen = _Softmax.apply(q_grid @ k_grid, mask)  # (S, H, Lq, Lk)
    if weights is not None:
        weights.append(seen.detach())
    mixed = (seen @ v_grid).transpose(1, 2)  # (S, Lq, H, V)
    flat = _Gather.apply(mixed.reshape(-1, q.shape[1] * v.shape[2]), queries)
    return flat.view(-1, q.shape[1], v.shape[2])


def _spread(flat: Tensor, packed: Packed) -> Tensor:
    grid = _Spread.apply(flat.flatten(1), packed)
    return grid.view(packed.n_sentences, packed.longest, *flat.shape[1:])  # (S, L, H, D)


@dataclass
class Cache:
    """What decoding remembers between steps: the memory's keys and values once per sentence, each hypothesis' own.

    There are S sentences with B hypotheses each; rows of `keys` and `values` are the S * B hypotheses in order.
    """

    memory_keys: Tensor  # (N, S, H, K, Ls)
    memory_values: Tensor  # (N, S, H, Ls, V)
    memory_mask: Mask
    keys: Tensor  # (room, N, S * B, H, K): time first, so that the part in use is one block
    values: Tensor  # (room, N, S * B, H, V)
    length: int = 0  # steps taken

    @property
    def n_sentences(self) -> int:
        return self.memory_keys.shape[1]

    def grow(self) -> None:
        """Make room for another step."""
        if self.length == self.keys.shape[0]:
            self.keys = torch.cat((self.keys, torch.empty_like(self.keys)))
            self.values = torch.cat((self.values, torch.empty_like(self.values)))

    def reorder(self, rows: Tensor) -> None:
        """Keep the hypotheses `rows`, in that order (a row may repeat)."""
        room = max(16, self.length + 8)
        for name, old in (("keys", self.keys), ("values", self.values)):
            new = old.new_empty(room, old.shape[1], rows.numel(), *old.shape[3:])
            torch.index_select(old[:self.length], 2, rows, out=new[:self.length])
            setattr(self, name, new)

    def keep(self, sentences: Tensor) -> None:
        """Forget the memory of all sentences but these; their hypotheses follow with `reorder`."""
        self.memory_keys = self.memory_keys.index_select(1, sentences)
        self.memory_values = self.memory_values.index_select(1, sentences)
        self.memory_mask = Mask(*(part.index_select(0, sentences) for part in self.memory_mask))


def attend_past(q: Tensor, k: Tensor, v: Tensor, cache: Cache, layer: int, window: int | None) -> Tensor:
    """Self-attention of one new position over itself and the cached past: (R, H, K) -> (R, H, V)."""
    t = cache.length
    cache.keys[t, layer] = k
    cache.values[t, layer] = v
    first = 0 if window is None else max(0, t - window)
    keys = cache.keys[first:t + 1, layer].permute(1, 2, 3, 0)  # (R, H, K, t)
    values = cache.values[first:t + 1, layer].permute(1, 2, 0, 3)  # (R, H, t, V)
    scores = (q * q.shape[-1] ** -0.5).unsqueeze(2) @ keys  # (R, H, 1, t)
    return (scores.softmax(-1) @ values).squeeze(2)


def attend_memory(q: Tensor, cache: Cache, layer: int) -> Tensor:
    """Attention of one new position over the source: (S * B, H, K) -> (S * B, H, V)."""
    grid = (q * q.shape[-1] ** -0.5).view(cache.n_sentences, -1, *q.shape[1:]).transpose(1, 2)  # (S, H, B, K)
    seen = _Softmax.apply(grid @ cache.memory_keys[layer], cache.memory_mask)  # (S, H, B, Ls)
    mixed = (seen @ cache.memory_values[layer]).transpose(1, 2)  # (S, B, H, V)
    return mixed.reshape(q.shape[0], q.shape[1], -1)


def memory_grid(k: Tensor, v: Tensor, src: Packed) -> tuple[Tensor, Tensor]:
    """Keys (S, H, K, Ls) and values (S, H, Ls, V) of the memory in the form the cache keeps."""
    return _spread(k, src).permute(0, 2, 3, 1).contiguous(), _spread(v, src).transpose(1, 2).contiguous()

