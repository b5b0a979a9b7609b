"""What the decoder remembers between its steps, and attention of one new position over it.

`Cache` grows with each step and is for the CPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nmt.model.attention import FAR, WIDTH, Field

FEW = 1 << 16  # multiplications of an attention so small that threads would wait longer than they work


@dataclass
class Cache:
    """What decoding remembers between steps: keys and values of the memory, and of what each hypothesis has said.

    There are S sentences with `beam` = B hypotheses each. A hypothesis writes its step's keys and values at its own
    place and never moves them: when hypotheses change places, `mask` changes, which says where each one's past lies.
    So a sentence's hypotheses share one block of keys, and one product serves them all.
    """

    beam: int
    n_heads: int
    memory_keys: list[Tensor]  # of each layer (S * H, Ls, K)
    memory_values: list[Tensor]  # (S * H, Ls, V)
    memory_mask: Tensor  # (S * H, 1, Ls) fp32: 0 at a token, else FAR
    keys: list[Tensor]  # of each layer (S * H, room * B, K): of the first step all hypotheses, of the second ...; zero
    values: list[Tensor]  # (S * H, room * B, V)      where nothing has been written: products take all of it
    mask: Tensor  # (S, 1, B, room * B) fp32
    length: int = 0  # steps taken

    def advance(self) -> "Step":
        """Room for another step, in which each hypothesis sees itself."""
        first = self.length * self.beam
        if first == self.mask.shape[3]:
            unit = self.beam * -(-WIDTH // self.beam)  # whole steps, at least a vector register full
            more = unit * max(1, first // (4 * unit))
            for rows in (self.keys, self.values):
                for layer, x in enumerate(rows):  # one after another, so that only one is there twice
                    rows[layer] = torch.cat((x, x.new_zeros(len(x), more, x.shape[2])), 1)
            self.mask = torch.cat((self.mask, self.mask.new_full((*self.mask.shape[:3], more), FAR)), 3)
        here = slice(first, first + self.beam)
        self.mask[:, 0, :, here].diagonal(dim1=1, dim2=2).zero_()
        self.length += 1
        return Step(self, here, self.mask.expand(-1, self.n_heads, -1, -1).flatten(0, 1))

    def reorder(self, parents: Tensor) -> None:
        """Each hypothesis continues the one of its sentence that `parents` (S, B) names."""
        self.mask = self.mask.gather(2, parents[:, None, :, None].expand(-1, -1, -1, self.mask.shape[3]))

    def keep(self, n: int, holes: Tensor, movers: Tensor) -> None:
        """Only the first `n` sentences stay, after those at `movers` took the places `holes`."""
        for rows in (*self.memory_keys, *self.memory_values, *self.keys, *self.values, self.memory_mask, self.mask):
            sentences = rows.view(len(self.mask), -1, *rows.shape[1:])
            sentences[holes] = sentences[movers]
        self.memory_keys, self.memory_values, self.keys, self.values = (
            [x[:n * self.n_heads] for x in rows]
            for rows in (self.memory_keys, self.memory_values, self.keys, self.values))
        self.memory_mask, self.mask = self.memory_mask[:n * self.n_heads], self.mask[:n]


@dataclass
class Step:
    """One step of decoding: where the new keys and values go, and which of all there are each hypothesis sees."""

    cache: Cache
    here: slice
    mask: Tensor  # (S * H, B, room * B)

    def attend_past(self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        """Self-attention of one new position over itself and the past: (S * B, H, K) -> (S * B, H * V)."""
        keys, values, mask, beam = self.cache.keys[layer], self.cache.values[layer], self.mask, self.cache.beam
        for rows, new in ((keys, k), (values, v)):
            cells = rows.view(-1, self.cache.n_heads, *rows.shape[1:])[:, :, self.here]
            cells.copy_(new.view(-1, beam, *new.shape[1:]).transpose(1, 2))
        if window is not None:
            mask = mask.clone()
            mask[:, :, :max(0, self.here.start - window * beam)] = FAR
        return self._attend(q, keys, values, mask)

    def attend_memory(self, q: Tensor, layer: int) -> Tensor:
        """Attention of one new position over the source: (S * B, H, K) -> (S * B, H * V)."""
        cache = self.cache
        return self._attend(q, cache.memory_keys[layer], cache.memory_values[layer], cache.memory_mask)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        beam, heads, size = self.cache.beam, self.cache.n_heads, q.shape[2]
        grid = q.view(-1, beam, heads, size).transpose(1, 2).reshape(-1, beam, size)  # (S * H, B, K)
        if grid.shape[0] * beam * keys.shape[1] * size > FEW:
            scores = torch.bmm(grid, keys.transpose(1, 2))  # (S * H, B, L)
            weights = torch.add(mask, scores, alpha=size ** -0.5).softmax(-1).to(q.dtype)
            mixed = torch.bmm(weights, values)  # (S * H, B, V)
        else:  # a product that wakes other threads takes longer than two plain passes
            scores = (grid.unsqueeze(2) * keys.unsqueeze(1)).sum(-1)
            weights = torch.add(mask, scores, alpha=size ** -0.5).softmax(-1).to(q.dtype)
            mixed = (weights.unsqueeze(3) * values.unsqueeze(1)).sum(2)
        return mixed.view(-1, heads, beam, mixed.shape[2]).transpose(1, 2).reshape(len(q), -1)


def memory_grid(k: Tensor, v: Tensor, field: Field) -> tuple[Tensor, Tensor]:
    """Keys (S * H, Ls, K) and values (S * H, Ls, V) of the memory in the form the cache keeps, from a whole field."""
    return field.keys.spread(k, 0), field.keys.spread(v, 0)
