"""The attention behind a finished translation: every layer and head, to look at.

The translation goes through encoder and decoder once more, as in `alignment.py`, with the tag of its
source if it has one. Row i of a map is what the model attends to when it predicts piece i of the
translation, so the rows end with the one that predicts `</s>`, and the decoder's columns are what it
has read by then: `<s>`, then the pieces before. All rows sum to one.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.data.batch import Sentences
from nmt.data.vocab import EOS, Vocabulary
from nmt.extras.maps.alignment import (
    encode_as_read,
    find_shown_model,
    link_pieces,
    split_pairs_by_cells,
)
from nmt.model.dropout import suspend_dropout
from nmt.model.transformer import Transformer
from nmt.system.strict_json import Fields
from nmt.translate.batching import pack_pairs
from nmt.translate.translator import TextToText, Translation

MAX_WEIGHTS = 1 << 24  # of a batch: 64 MB
WeightArray = NDArray[np.float32]


@dataclass(frozen=True)
class AttentionMap:
    source: list[str]  # pieces, "</s>" last
    target: list[str]  # pieces of the translation, "</s>" last
    alignment: list[int]  # for each piece of the translation, "</s>" apart, its source piece
    # (layers, heads, queries, keys), by kind: memory, of target and source; encoder, of the source; decoder,
    # of the target and what was read, "<s>" first
    kinds: dict[str, WeightArray]

    def to_json(self) -> Fields:
        """The map as `attention_view.js` draws it: a weight is a byte, and 255 is one."""
        attention = {}
        for kind, weights in self.kinds.items():
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


def map_attention(
    translator: TextToText, lines: Sequence[str], translations: Sequence[Translation]
) -> Iterator[AttentionMap | None]:
    """Yield the attention behind the translation of each line; None for an empty line."""
    model = find_shown_model(translator)
    n_tags = len(translator.tag_ids)
    encoded = encode_as_read(translator, lines)
    sources = []
    targets = []
    for ids, translation in zip(encoded, translations, strict=True):
        if len(ids) > n_tags:
            sources.append(ids)
            targets.append(translation.piece_ids)
    maps = compute_attention_maps(model, translator.vocab, sources, targets)
    for ids in encoded:
        yield next(maps) if len(ids) > n_tags else None


def compute_attention_maps(
    model: Transformer, vocab: Vocabulary, sources: Sentences, targets: Sentences
) -> Iterator[AttentionMap]:
    """Yield the map of each translation; sources and targets are ids without marks."""
    config = model.config
    n_heads = config.n_heads * (config.encoder_depth + 2 * config.decoder_depth)
    for batch in split_pairs_by_cells(sources, targets, MAX_WEIGHTS // n_heads):
        yield from _map_batch(model, vocab, sources[batch], targets[batch])


@torch.inference_mode()
def _map_batch(
    model: Transformer, vocab: Vocabulary, src: Sentences, tgt: Sentences
) -> list[AttentionMap]:
    sources, targets = pack_pairs(src, tgt, model.tgt_embedding.weight.device)
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
                kinds={
                    "memory": weights[0][:, :, :m, :n].copy(),
                    "encoder": weights[1][:, :, :n, :n].copy(),
                    "decoder": weights[2][:, :, :m, :m].copy(),
                },
            )
        )
    return maps
