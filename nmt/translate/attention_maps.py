"""The attention behind a finished translation: every layer and head, as one can look at it.

The translation goes through encoder and decoder once more, as in `alignment.py`, with the tag of its
source if it has one. Row i of a map is what the model attends to when it predicts piece i of the
translation, so the rows end with the one that predicts `</s>`, and the decoder's columns are what it
has read by then: `<s>`, then the pieces before. All rows sum to one.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS, Vocabulary
from nmt.model.dropout import suspend_dropout
from nmt.model.transformer import Transformer
from nmt.translate.alignment import find_alignment_layer, link_pieces

MAX_WEIGHTS = 1 << 24  # of a batch: 64 MB
WeightArray = NDArray[np.float32]


@dataclass(frozen=True)
class AttentionMap:
    source: list[str]  # pieces, "</s>" last
    target: list[str]  # pieces of the translation, "</s>" last
    alignment: list[int]  # for each piece of the translation, "</s>" apart, its source piece
    memory: WeightArray  # (layers, heads, target, source)
    encoder: WeightArray | None = None  # (layers, heads, source, source)
    decoder: WeightArray | None = None  # (layers, heads, target, what was read: "<s>" first)

    def average_alignment_layer(self) -> "AttentionMap":
        """Keep what the alignment is made from: one layer of the memory attention, its heads averaged."""
        layer = self.memory[find_alignment_layer(len(self.memory))]
        return replace(self, memory=layer.mean(0)[None, None], encoder=None, decoder=None)

    def list_kinds(self) -> dict[str, WeightArray]:
        """The kinds of attention that are there, by name."""
        kinds = {"memory": self.memory, "encoder": self.encoder, "decoder": self.decoder}
        return {name: weights for name, weights in kinds.items() if weights is not None}

    def to_json(self) -> dict[str, Any]:
        """The map as `attention_view.js` draws it: a weight is a byte, and 255 is one."""
        attention = {}
        for kind, weights in self.list_kinds().items():
            attention[kind] = [[_encode_weights(head) for head in layer] for layer in weights]
        return {
            "source": self.source,
            "target": self.target,
            "alignment": self.alignment,
            "attention": attention,
        }


def _encode_weights(head: WeightArray) -> str:
    levels = np.rint(head * 255).astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()


def compute_attention_maps(
    model: Transformer,
    vocab: Vocabulary,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> list[AttentionMap]:
    """Compute the map of each translation; sources and targets are ids without marks."""
    return list(generate_attention_maps(model, vocab, sources, targets))


def generate_attention_maps(
    model: Transformer,
    vocab: Vocabulary,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> Iterator[AttentionMap]:
    """Do the same batch by batch, each of as many neighbours as MAX_WEIGHTS allows and at least one."""
    config = model.config
    n_heads = config.n_heads * (config.encoder_depth + 2 * config.decoder_depth)
    first = longest = 0
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        longest = max(longest, len(source) + 1, len(target) + 1)
        if i > first and (i + 1 - first) * longest**2 * n_heads > MAX_WEIGHTS:
            yield from _map_batch(model, vocab, sources[first:i], targets[first:i])
            first, longest = i, max(len(source) + 1, len(target) + 1)
    if first < len(sources):
        yield from _map_batch(model, vocab, sources[first:], targets[first:])


@torch.inference_mode()
def _map_batch(
    model: Transformer,
    vocab: Vocabulary,
    src: Sequence[Sequence[int]],
    tgt: Sequence[Sequence[int]],
) -> list[AttentionMap]:
    device = model.projection.weight.device
    sources = pack([[*ids, EOS] for ids in src]).to(device)
    targets = pack([[BOS, *ids] for ids in tgt]).to(device)  # each position predicts the next piece
    encoder: list[Tensor] = []
    memory: list[Tensor] = []
    decoder: list[Tensor] = []
    with suspend_dropout(model):
        encoded = model.encode(sources, encoder)
        model.decode(targets, encoded, sources, memory, decoder)
    alignments = link_pieces(memory, sources, tgt)

    # (S, layers, heads, queries, keys)
    kinds = [torch.stack(layers, 1).float().cpu().numpy() for layers in (memory, encoder, decoder)]
    maps = []
    for ids, out, links, *weights in zip(src, tgt, alignments, *kinds, strict=True):
        n, m = len(ids) + 1, len(out) + 1
        maps.append(
            AttentionMap(
                source=vocab.src.pieces([*ids, EOS]),
                target=vocab.tgt.pieces([*out, EOS]),
                alignment=links,
                # copies, so that a map does not keep its whole batch in memory
                memory=weights[0][:, :, :m, :n].copy(),
                encoder=weights[1][:, :, :n, :n].copy(),
                decoder=weights[2][:, :, :m, :m].copy(),
            )
        )
    return maps
