"""Packed sentences, and which key each query attends to by the definition, one pair of places after
another.
"""

import torch
from torch import Tensor

from nmt.data.batch import Packed


def relation(
    q_lengths: list[int],
    k_lengths: list[int],
    tails: tuple[int, int],
    causal: bool,
    window: int | None,
) -> Tensor:
    """(Tq, Tk): which key each query sees, one pair of places after another."""
    may = torch.zeros(sum(q_lengths) + tails[0], sum(k_lengths) + tails[1], dtype=torch.bool)
    q_begin = k_begin = 0
    for n_queries, n_keys in zip(q_lengths, k_lengths, strict=True):
        for i in range(n_queries):
            for j in range(n_keys):
                is_near = window is None or abs(i - j) <= window
                may[q_begin + i, k_begin + j] = is_near and not (causal and j > i)
        q_begin += n_queries
        k_begin += n_keys
    return may


def side(lengths: list[int], tail: int, device: torch.device) -> Packed:
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    n_live = sum(lengths)
    tokens = torch.zeros(n_live + tail, dtype=torch.int64, device=device)
    return Packed(tokens, offsets, max(lengths), n_live)
