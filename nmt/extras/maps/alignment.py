"""Which source piece each target piece comes from, as far as attention shows it.

A finished translation goes through the decoder once more, and the memory attention of the last
layer but one is read, because it follows the source best; the last layer looks ahead. A target
piece is linked to the source piece that gets the most attention, averaged over the heads, when the
target piece is predicted. An ensemble shows the attention of its first model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nmt.data.batch import Packed, Sentences
from nmt.data.vocab import EncodedLines
from nmt.model.dropout import suspend_dropout
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.translate.batching import pack_pairs
from nmt.translate.translator import Candidates, TextToText, Translator

MAX_CELLS = 1 << 18  # of a batch, for each head of each layer
Links = list[list[int]]  # of each sentence: for each target piece its source piece


def add_alignments(
    translator: TextToText, lines: Sequence[str], candidates: Sequence[Candidates]
) -> list[Candidates]:
    """Return the candidates of each line with their alignments."""
    model = find_shown_model(translator)
    encoded = encode_as_read(translator, lines)
    sources = [ids for ids, of_line in zip(encoded, candidates, strict=True) for _ in of_line]
    targets = [candidate.piece_ids for of_line in candidates for candidate in of_line]
    links = iter(align(model, sources, targets))

    # What follows the tag most is said to follow the first piece of the line.
    n_before = len(translator.tag_ids)
    results = []
    for of_line in candidates:
        aligned = []
        for candidate in of_line:
            alignment = tuple(max(0, position - n_before) for position in next(links))
            aligned.append(replace(candidate, alignment=alignment))
        results.append(aligned)
    return results


def find_shown_model(translator: TextToText) -> Transformer:
    """Return the model whose attention is shown."""
    if not isinstance(translator, Translator):
        raise UserError(f"{translator.engine} does not show its attention; leave out --engine")
    return translator.model


def encode_as_read(translator: TextToText, lines: Sequence[str]) -> EncodedLines:
    """Return what the model reads of each line: its tag, and no more pieces than it accepts."""
    longest = translator.longest
    return [[*translator.tag_ids, *ids[:longest]] for ids in translator.encode_source(lines)]


@torch.inference_mode()
def align(model: Transformer, src: Sentences, tgt: Sentences) -> Links:
    """Find for each target piece its source piece, both without marks; 0 if there is no source
    piece.
    """
    links: Links = []
    device = model.tgt_embedding.weight.device
    with suspend_dropout(model):
        for batch in split_pairs_by_cells(src, tgt, MAX_CELLS):
            sources, targets = pack_pairs(src[batch], tgt[batch], device)
            layers: list[Tensor] = []
            model.decode(targets, model.encode(sources), sources, layers)
            links += link_pieces(layers, sources, tgt[batch])
    return links


def split_pairs_by_cells(sources: Sentences, targets: Sentences, max_cells: int) -> Iterator[slice]:
    """Group neighbours: as many as have at most `max_cells` pairs of positions when they are padded to
    one length, and at least one.
    """
    first = longest = 0
    for i, (src, tgt) in enumerate(zip(sources, targets, strict=True)):
        length = max(len(src), len(tgt)) + 1  # with eos or bos
        longest = max(longest, length)
        n = i + 1 - first
        if n > 1 and n * longest**2 > max_cells:
            yield slice(first, i)
            first, longest = i, length
    if first < len(sources):
        yield slice(first, len(sources))


def link_pieces(layers: Sequence[Tensor], sources: Packed, tgt: Sentences) -> Links:
    """Link pieces by the memory attention of all layers, each (S, H, Lt, Ls)."""
    follows_best = max(0, len(layers) - 2)
    attention = layers[follows_best].mean(1)  # (S, Lt, Ls)

    # the closing eos gets much attention and means nothing
    positions = torch.arange(attention.shape[2], device=attention.device)
    n_allowed = (sources.lengths - 1).clamp(min=1)
    is_allowed = positions < n_allowed[:, None]  # (S, Ls)
    best = attention.masked_fill(~is_allowed[:, None], -1.0).argmax(2).tolist()
    return [row[: len(ids)] for row, ids in zip(best, tgt, strict=True)]
