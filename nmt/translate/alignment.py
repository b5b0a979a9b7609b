"""Which source piece each target piece comes from, as far as attention tells.

A finished translation is fed to the decoder once more, and the memory attention of the layer before the last is read,
where it follows the source best; the last layer looks ahead. A piece is linked with what the heads together look at
most while they predict it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS
from nmt.model.transformer import Transformer

CELLS = 1 << 18  # target times source pieces looked at together, for each head of each layer


@torch.inference_mode()
def align(
    model: Transformer, src: Sequence[Sequence[int]], tgt: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each target piece the index of a source piece, both without marks. Without any source piece it is 0."""
    links: list[list[int]] = []
    while len(links) < len(src):
        first = last = len(links)
        longest_src = longest_tgt = 0
        while last < len(src):
            longest_src, longest_tgt = (
                max(longest_src, len(src[last]) + 1),
                max(longest_tgt, len(tgt[last]) + 1),
            )
            if last > first and (last + 1 - first) * longest_src * longest_tgt > CELLS:
                break
            last += 1
        links.extend(_aligned(model, src[first:last], tgt[first:last]))
    return links


def _aligned(
    model: Transformer, src: Sequence[Sequence[int]], tgt: Sequence[Sequence[int]]
) -> list[list[int]]:
    device = model.projection.weight.device
    sources = pack([[*ids, EOS] for ids in src]).to(device)
    targets = pack([[BOS, *ids] for ids in tgt]).to(
        device
    )  # at the place of each piece stands the one before
    layers: list[Tensor] = []
    model.decode(targets, model.encode(sources), sources, layers)
    seen = layers[max(0, len(layers) - 2)].mean(1)  # (S, Lt, Ls)
    places = torch.arange(seen.shape[2], device=device)
    allowed = places < (sources.lengths - 1).clamp(min=1)[:, None]  # not the closing eos
    best = seen.masked_fill(~allowed[:, None], -1.0).argmax(2).tolist()
    return [row[: len(ids)] for row, ids in zip(best, tgt, strict=True)]
