"""The decoder's keys and values between steps, and attention of one new position over them.

A sentence's hypotheses share one block of keys and values. Each writes to its own slots and never moves what it wrote;
a mask says which slots belong to each hypothesis, so reordering the beam changes only the mask. On the CPU a `Cache`
grows step by step. On a GPU a step is recorded once and replayed (`nmt/engines/cuda/`), so a `StaticCache` keeps its
addresses and shapes, and the step number is a tensor on the device.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nmt.model.attention_mask import MASKED_SCORE, WIDTH_MULTIPLE, AttentionMask

# Multiplications; waking other threads takes longer than computing a product smaller than this
SMALL_PRODUCT = 1 << 16


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
    length: int = 0  # steps taken
    small_product = SMALL_PRODUCT

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

    def positions(self, tokens: Tensor) -> Tensor:
        """Return the position of each token of this step."""
        return torch.full_like(tokens, self.length - 1)

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
        self.mask = follow_parents(self.mask, parents)

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


class Buffers:
    """Named tensors that keep their addresses while their shapes change: each uses the beginning of a flat allocation.

    So a step recorded for a shape can be replayed whenever that shape recurs, even for other sentences, until `n_moves`
    grows, which means that a larger allocation was necessary.
    """

    def __init__(self) -> None:
        self.allocations: dict[str, Tensor] = {}
        self.n_moves = 0

    def store(
        self,
        name: str,
        x: Tensor,
        n: int,
        fill: float,
        axis: int = -1,
        sizes: tuple[int, int] | None = None,
    ) -> Tensor:
        """Copy `x` into the first corner of the tensor `name`, with `fill` around it, and return that
        tensor. It has the shape of `x`, but for `n` rows, and along `axis` the first of `sizes`.

        The allocation has room for the second of `sizes`, which is expected later. `x` must not be in
        that allocation.
        """
        shape, largest = [n, *x.shape[1:]], [n, *x.shape[1:]]
        if sizes is not None:
            shape[axis], largest[axis] = sizes
        size = max(math.prod(shape), math.prod(largest))
        allocation = self.allocations.get(name)
        if allocation is None or allocation.numel() < size or allocation.dtype != x.dtype:
            self.allocations.pop(name, None)
            allocation = self.allocations[name] = x.new_empty(size)
            self.n_moves += 1
        stored = allocation[: math.prod(shape)].view(*shape)
        corner = stored
        for dimension, n in enumerate(x.shape):
            corner = corner.narrow(dimension, 0, n)
        if corner.shape != stored.shape:
            stored.fill_(fill)
        corner.copy_(x)
        return stored


class StaticCache:
    """A cache for recorded steps: a step changes it in place, and it changes its shape only between
    steps.

    The first dimension of its tensors is the sentence. Of the `n` rows, the first ones are in use
    and the rest are padding.
    """

    small_product = 0

    def __init__(self, beam: int, n_heads: int) -> None:
        self.beam, self.n_heads, self.buffers = beam, n_heads, Buffers()
        self.n = self.capacity = self.max_capacity = self.n_source = self.n_positions = 0
        self.table: Tensor | None = None
        self.memory_keys: list[Tensor] = []  # per layer (n, H, Ls, K)
        self.memory_values: list[Tensor] = []  # per layer (n, H, Ls, V)
        self.keys: list[Tensor] = []  # per layer (n, H, capacity * B, K)
        self.values: list[Tensor] = []  # per layer (n, H, capacity * B, V)

    @property
    def n_moves(self) -> int:
        """The number of times that all recorded steps became invalid."""
        return self.buffers.n_moves

    def load(self, fresh: Cache, n: int, capacity: int, max_capacity: int, table: Tensor) -> None:
        """Take over the sentences of a cache that has not taken a step yet.

        There is room for `capacity` steps, and later for up to `max_capacity`. A recorded step
        reads the decoder's positions from the address of `table`, so the table is kept alive here.
        """
        if self.table is not table:
            self.table, self.n_positions = table, len(table)
            self.buffers.n_moves += 1
        self.n, self.capacity, self.max_capacity = n, capacity, max_capacity
        self.n_source = round_up_source_width(fresh.memory_mask.shape[3])
        self.memory_mask, self.mask = fresh.memory_mask, fresh.mask
        self.memory_keys = self._split_heads(fresh.memory_keys)
        self.memory_values = self._split_heads(fresh.memory_values)
        self.keys = self._split_heads(fresh.keys)
        self.values = self._split_heads(fresh.values)
        self._store_all(lambda x: x)
        no_steps = torch.zeros(1, dtype=torch.int64, device=fresh.mask.device)
        self.length = self.buffers.store("length", no_steps, 1, 0)  # steps taken

    def _split_heads(self, layers: list[Tensor]) -> list[Tensor]:
        return [x.unflatten(0, (-1, self.n_heads)) for x in layers]

    def resize(self, rows: Tensor | None, n: int, capacity: int) -> None:
        """Change the capacity, and keep only the sentences at `rows`, if given."""
        self.n, self.capacity = n, capacity
        # Copies, because the buffers that the tensors lie in are written to.
        self._store_all(lambda x: x.clone() if rows is None else x.index_select(0, rows))

    def _store_all(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Put a copy of each tensor into its buffer, padded to the sizes of now."""
        source = (self.n_source, self.n_source)
        steps = (self.capacity * self.beam, self.max_capacity * self.beam)
        self.memory_mask = self._store("memory mask", copy(self.memory_mask), source)
        self.mask = self._store("mask", copy(self.mask), steps)
        for name, layers, sizes in (
            ("memory keys", self.memory_keys, source),
            ("memory values", self.memory_values, source),
            ("keys", self.keys, steps),
            ("values", self.values, steps),
        ):
            for layer, x in enumerate(layers):
                layers[layer] = self._store(f"{name} {layer}", copy(x), sizes)

    def _store(self, name: str, x: Tensor, sizes: tuple[int, int]) -> Tensor:
        """Copy a tensor into its buffer, padded to the first of these sizes, with room for the second: a
        mask with MASKED_SCORE, keys and values with zeros.
        """
        axis, fill = (3, MASKED_SCORE) if name.endswith("mask") else (2, 0.0)
        return self.buffers.store(name, x, self.n, fill, axis, sizes)

    def list_state(self) -> list[Tensor]:
        """List what a step changes, except keys and values: the step after a recording writes those again."""
        return [self.mask, self.length]

    # ---- within a recorded step ----

    def advance(self) -> None:
        # The slot of this step. Warm-ups before a recording may go one step too far; they use the
        # last slot again.
        self.position = self.length.clamp(max=min(self.capacity, self.n_positions) - 1)  # (1,)
        hypotheses = torch.arange(self.beam, device=self.position.device)
        self.here = self.position * self.beam + hypotheses  # (B,)
        self.columns = torch.arange(self.capacity * self.beam, device=self.position.device)
        # each hypothesis attends to itself
        self.mask.masked_fill_(self.columns == self.here[:, None], 0.0)
        self.length.add_(1)

    def positions(self, tokens: Tensor) -> Tensor:
        return self.position.expand_as(tokens)

    def write(self, cells: Tensor, new: Tensor) -> None:
        cells.index_copy_(2, self.here, new)

    def window_mask(self, window: int) -> Tensor:
        return self.mask.masked_fill(
            self.columns < (self.position - window) * self.beam, MASKED_SCORE
        )

    def reorder(self, parents: Tensor) -> None:
        self.mask.copy_(follow_parents(self.mask, parents))


AnyCache = Cache | StaticCache


def follow_parents(mask: Tensor, parents: Tensor) -> Tensor:
    """Return the mask of hypotheses that continue those with the indexes `parents`, (S, B)."""
    # Keys and values stay: a new hypothesis sees the cells that its parent saw.
    index = parents[:, None, :, None].expand(-1, -1, -1, mask.shape[3])
    return mask.gather(2, index)


def round_up_to_class(n: int) -> int:
    """Round n up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    This keeps the number of shapes to record small, and at most a third of the rows are padding.
    """
    power = 1 << max(n - 1, 0).bit_length()  # the least power of two that is at least n
    between = power * 3 // 4
    if power >= 4 and n <= between:
        return between
    return power


def round_up_source_width(longest: int) -> int:
    """Round the length of the longest source up to one of a few widths, multiples of WIDTH_MULTIPLE."""
    return WIDTH_MULTIPLE * round_up_to_class(-(-longest // WIDTH_MULTIPLE))


# ---- attention of one step, on a cache that has just advanced -----------------------------------------------------


def attend_past(
    cache: AnyCache, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None
) -> Tensor:
    """Attend from one new position to itself and the past: (S * B, H, K) -> (S * B, H * V)."""
    keys, values = cache.keys[layer], cache.values[layer]
    for rows, new in ((keys, k), (values, v)):
        cells = rows.view(-1, cache.n_heads, *rows.shape[-2:])
        cache.write(cells, new.view(-1, cache.beam, *new.shape[1:]).transpose(1, 2))
    mask = cache.mask if window is None else cache.window_mask(window)
    return _attend(cache, q, keys, values, mask)


def attend_memory(cache: AnyCache, q: Tensor, layer: int) -> Tensor:
    """Attend from one new position to the source: (S * B, H, K) -> (S * B, H * V)."""
    keys, values = cache.memory_keys[layer], cache.memory_values[layer]
    return _attend(cache, q, keys, values, cache.memory_mask)


def _attend(cache: AnyCache, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
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
    return mask.keys.pad(k, 0), mask.keys.pad(v, 0)
