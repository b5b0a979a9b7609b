"""Alignments against plain attention, one sentence at a time."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.untrained import DECODING, SHAPE, make_model, make_vocab
from torch import Tensor

from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS, Vocab
from nmt.extras.maps.alignment import add_alignments, align
from nmt.model.multi_head_attention import MemoryAttention, SelfAttention
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.translate.translator import Translator


def memory_attention(model: Transformer, src: list[int], tgt: list[int]) -> list[list[list[float]]]:
    """The memory attention of each layer, heads averaged, one sentence at a time and with plain
    products.
    """
    source = pack([[*src, EOS]])
    memory, target = model.encode(source), pack([[BOS, *tgt]])
    x = model.embed(model.tgt_embedding, model.tgt_positions, model.tgt_embedding_norm, target)
    layers = []

    def attended(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
        weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1), weights

    for layer in model.decoder:
        own, cross = layer.attention, layer.memory_attention
        keys, values = cross.keys_values(memory)

        def attend_past(y: Tensor, own: SelfAttention = own) -> Tensor:
            q, k, v = own.project_qkv(y)
            mixed, _ = attended(q, k, v, True)
            return own.output(mixed)

        def attend_memory(
            y: Tensor, cross: MemoryAttention = cross, keys: Tensor = keys, values: Tensor = values
        ) -> Tensor:
            mixed, weights = attended(cross.split_heads(cross.q(y)), keys, values, False)
            layers.append(weights.mean(0).tolist())
            return cross.output(mixed)

        x = layer.attention_residual(x, attend_past)
        x = layer.memory_residual(x, attend_memory)
        x = layer.feed_forward_residual(x, layer.feed_forward)
    return layers


@pytest.mark.parametrize("n_layers", [1, 2, 3])
@torch.no_grad()
def test_alignments_are_the_places_of_most_attention(
    n_layers: int, vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.extras.maps.alignment.MAX_CELLS", 200)  # several groups
    model = make_model(vocab, replace(SHAPE, n_layers=n_layers))
    rng = random.Random(1)
    src, tgt = (
        [[rng.randrange(4, vocab.size) for _ in range(rng.randint(shortest, 9))] for _ in range(12)]
        for shortest in (1, 0)
    )
    src[4] = []
    found = align(model, src, tgt)
    for source, target, links in zip(src, tgt, found, strict=True):
        rows = memory_attention(model, source, target)[max(0, n_layers - 2)][: len(target)]
        assert links == [max(range(max(1, len(source))), key=row.__getitem__) for row in rows]
    assert found[4] == [0] * len(tgt[4])


def test_candidates_of_lines(tmp_path: Path) -> None:
    """A link to the tag is one to the first piece; a line in capitals is read in small letters."""
    vocab = make_vocab(tmp_path, tags=["<2de>"])
    config = replace(DECODING, tag="<2de>", lower_capitals=True)
    translator = Translator(make_model(vocab), vocab, config, torch.device("cpu"))
    lines = ["Red dog likes, the house.", "", "RED DOG LIKES, THE HOUSE."]
    plain = translator.find_candidates(lines, 2)
    small, empty, capitals = found = add_alignments(translator, lines, plain)
    assert empty == plain[1]
    source = [vocab.find_symbol("<2de>"), *vocab.encode(lines[:1])[0]]
    for candidate in small:
        (links,) = align(translator.model, [source], [list(candidate.piece_ids)])
        assert candidate.alignment == tuple(max(0, place - 1) for place in links)
    assert [each.alignment for each in capitals] == [each.alignment for each in small]
    for given, own in zip(plain, found, strict=True):
        assert given == [replace(each, alignment=()) for each in own]


def test_another_engine_has_none() -> None:
    with pytest.raises(UserError, match="other 1.0 does not show its attention"):
        add_alignments(SimpleNamespace(engine="other 1.0"), [], [])  # type: ignore[arg-type]
