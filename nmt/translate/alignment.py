"""Which source piece each target piece comes from, as far as attention shows it.

A finished translation goes through the decoder once more, and the memory attention of the last
layer but one is read, because it follows the source best; the last layer looks ahead. A target
piece is linked to the source piece that gets the most attention, averaged over the heads, when the
target piece is predicted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nmt.data.batch import Packed
from nmt.model.transformer import Transformer
from nmt.translate.batching import pack_pairs, split_pairs_by_cells

MAX_CELLS = 1 << 18  # of a batch, for each head of each layer


@torch.inference_mode()
def align(
    model: Transformer, src: Sequence[Sequence[int]], tgt: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Find for each target piece its source piece, both without marks; 0 if there is no source
    piece.
    """
    links: list[list[int]] = []
    device = model.tgt_embedding.weight.device
    for batch in split_pairs_by_cells(src, tgt, MAX_CELLS):
        sources, targets = pack_pairs(src[batch], tgt[batch], device)
        layers: list[Tensor] = []
        model.decode(targets, model.encode(sources), sources, layers)
        links += link_pieces(layers, sources, tgt[batch])
    return links


def link_pieces(
    layers: Sequence[Tensor], sources: Packed, tgt: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Link pieces by the memory attention of all layers, each (S, H, Lt, Ls)."""
    follows_best = max(0, len(layers) - 2)
    attention = layers[follows_best].mean(1)  # (S, Lt, Ls)

    # the closing eos gets much attention and means nothing
    positions = torch.arange(attention.shape[2], device=attention.device)
    n_allowed = (sources.lengths - 1).clamp(min=1)
    is_allowed = positions < n_allowed[:, None]  # (S, Ls)
    best = attention.masked_fill(~is_allowed[:, None], -1.0).argmax(2).tolist()
    return [row[: len(ids)] for row, ids in zip(best, tgt, strict=True)]
