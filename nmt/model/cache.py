"""The decoder's keys and values between steps, and attention of one new position over them.

A sentence's hypotheses share one block of keys and values. Each writes to its own slots and never moves what it wrote;
a mask says which slots belong to each hypothesis, so reordering the beam changes only the mask. The slots grow step by
step.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from nmt.model.attention_mask import MASKED_SCORE, WIDTH_MULTIPLE, AttentionMask


@dataclass
class Cache:
    """The keys and values of the encoder's output (the memory) and of the pieces of each hypothesis,
    for S sentences with B = `beam` hypotheses each.

    The slots of a layer are ordered by step, then by hypothesis. Slots not yet written are zero,
    because matrix products read all of them.
    """

    beam: int
    n_heads: int
    memory_keys: list[Tensor]  # per layer (S * H, Ls, K)
    memory_values: list[Tensor]  # per layer (S * H, Ls, V)
    memory_mask: Tensor  # (S, 1, 1, Ls) fp32: 0 at a token, else MASKED_SCORE
    keys: list[Tensor]  # per layer (S * H, capacity * B, K)
    values: list[Tensor]  # per layer (S * H, capacity * B, V)
    mask: Tensor  # (S, 1, B, capacity * B) fp32
    small_product: int  # as the backend says
    length: int = 0  # steps taken

    def advance(self) -> None:
        """Begin another step, in which each hypothesis attends to itself; grow if necessary."""
        first = self.length * self.beam
        if first == self.mask.shape[3]:
            # grow by whole steps, and by at least a vector register of slots
            unit = self.beam * -(-WIDTH_MULTIPLE // self.beam)
            more = unit * max(1, first // (4 * unit))
            for rows in (self.keys, self.values):
                # layer by layer, so that only one is in memory twice
                for layer, x in enumerate(rows):
                    rows[layer] = torch.cat((x, x.new_zeros(len(x), more, x.shape[2])), 1)
            hidden = self.mask.new_full((*self.mask.shape[:3], more), MASKED_SCORE)
            self.mask = torch.cat((self.mask, hidden), 3)
        here = slice(first, first + self.beam)
        self.mask[:, 0, :, here].diagonal(dim1=1, dim2=2).zero_()
        self.length += 1

    def write(self, cells: Tensor, new: Tensor) -> None:
        """Write the keys or values of this step (S, H, B, K) into those of all steps, (S, H, capacity * B, K)."""
        first = (self.length - 1) * self.beam
        cells[:, :, first : first + self.beam].copy_(new)

    def window_mask(self, window: int) -> Tensor:
        """Return the mask for a layer that attends only to this step and the `window` steps before it."""
        mask = self.mask.clone()
        n_before = max(0, (self.length - 1 - window) * self.beam)  # cells before the window
        mask[:, :, :, :n_before] = MASKED_SCORE
        return mask

    def reorder(self, parents: Tensor) -> None:
        """Make each hypothesis continue the hypothesis of its sentence whose index `parents` (S, B) holds."""
        # Keys and values stay: a new hypothesis sees the slots that its parent saw.
        index = parents[:, None, :, None].expand(-1, -1, -1, self.mask.shape[3])
        self.mask = self.mask.gather(2, index)

    def keep(self, n: int, free_rows: Tensor, moved_rows: Tensor) -> None:
        """Copy the sentences of `moved_rows` into `free_rows`, then keep only the first `n`."""
        layers = (self.memory_keys, self.memory_values, self.keys, self.values)

        # Moving the last sentences forward copies less than gathering all that stay.
        for x in (*itertools.chain(*layers), self.memory_mask, self.mask):
            sentences = x.view(len(self.mask), -1, *x.shape[1:])
            sentences[free_rows] = sentences[moved_rows]

        for rows in layers:
            for layer, x in enumerate(rows):
                rows[layer] = x[: n * self.n_heads]
        self.memory_mask, self.mask = self.memory_mask[:n], self.mask[:n]


# ---- attention of one step, on a cache that has just advanced -----------------------------------------------------


def attend_past(
    cache: Cache, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None
) -> Tensor:
    """Attend from one new position to itself and the past: (S * B, H, K) -> (S * B, H * V)."""
    keys, values = cache.keys[layer], cache.values[layer]
    for rows, new in ((keys, k), (values, v)):
        cells = rows.view(-1, cache.n_heads, *rows.shape[-2:])
        cache.write(cells, new.view(-1, cache.beam, *new.shape[1:]).transpose(1, 2))
    mask = cache.mask if window is None else cache.window_mask(window)
    return _attend(cache, q, keys, values, mask)


def attend_memory(cache: Cache, q: Tensor, layer: int) -> Tensor:
    """Attend from one new position to the source: (S * B, H, K) -> (S * B, H * V)."""
    keys, values = cache.memory_keys[layer], cache.memory_values[layer]
    return _attend(cache, q, keys, values, cache.memory_mask)


def _attend(cache: Cache, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    beam, heads, size = cache.beam, cache.n_heads, q.shape[2]
    keys = keys.view(-1, *keys.shape[-2:])  # (S * H, L, K)
    values = values.view(-1, *values.shape[-2:])  # (S * H, L, V)
    grid = q.view(-1, beam, heads, size).transpose(1, 2)
    grid = grid.reshape(-1, beam, size)  # (S * H, B, K)
    n_products = grid.shape[0] * beam * keys.shape[1] * size
    is_small = n_products <= cache.small_product
    if is_small:  # bmm would wake other threads, which takes longer than two passes here
        scores = (grid.unsqueeze(2) * keys.unsqueeze(1)).sum(-1)
    else:
        scores = torch.bmm(grid, keys.transpose(1, 2))  # (S * H, B, L)
    scores = scores.view(len(mask), heads, beam, -1)
    weights = torch.add(mask, scores, alpha=size**-0.5).softmax(-1)  # fp32, as the mask is
    weights = weights.to(q.dtype).view(-1, beam, keys.shape[1])  # (S * H, B, L)
    if is_small:
        output = (weights.unsqueeze(3) * values.unsqueeze(1)).sum(2)
    else:
        output = torch.bmm(weights, values)  # (S * H, B, V)
    by_head = output.view(-1, heads, beam, output.shape[2])  # (S, H, B, V)
    return by_head.transpose(1, 2).reshape(len(q), -1)


def pad_memory(k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Pad keys and values of the memory as a cache keeps them: (S * H, Ls, K) and (S * H, Ls, V).

    The mask has one group, so that all sentences are padded to one length.
    """
    rows = mask.groups[0].keys
    padded = [x[rows].transpose(1, 2).flatten(0, 1) for x in (k, v)]
    return padded[0], padded[1]
