"""Maps of attention against torch's own multi-head attention, one sentence at a time."""

import base64
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from pytest import MonkeyPatch, mark
from support.processor import CPU
from support.untrained import DECODING, SHAPE, list_shapes, make_model, make_vocab
from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS, Vocab
from nmt.extras.maps.alignment import add_alignments, align
from nmt.extras.maps.attention_maps import AttentionMap, compute_attention_maps, map_attention
from nmt.model.multi_head_attention import Attention, MemoryAttention, SelfAttention
from nmt.model.transformer import Transformer
from nmt.translate.translator import Translator


def draw_pairs(vocab: Vocab, n: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = Random(3)

    def draw(shortest: int) -> list[int]:
        return [rng.randrange(4, vocab.size) for _ in range(rng.randint(shortest, 9))]

    return [draw(1) for _ in range(n)], [draw(0) for _ in range(n)]


def torch_weights(attention: Attention, x: Tensor, memory: Tensor | None = None) -> np.ndarray:
    """The weights that torch's module of the same matrices returns, (heads, queries, keys)."""
    module = nn.MultiheadAttention(x.shape[1], attention.n_heads, bias=False)
    if isinstance(attention, MemoryAttention):
        matrices = torch.cat((attention.q.weight, attention.kv.weight))
    else:
        assert isinstance(attention, SelfAttention)
        matrices = attention.qkv.weight
    module.in_proj_weight = nn.Parameter(matrices, requires_grad=False)
    keys = x if memory is None else memory
    return module(x, keys, keys, average_attn_weights=False)[1].numpy()


def torch_decoder_weights(attention: Attention, x: Tensor) -> np.ndarray:
    """The same, where a query sees only what is before it: row by row, so without any mask."""
    n = len(x)
    weights = np.zeros((attention.n_heads, n, n), np.float32)
    for row in range(n):
        weights[:, row, : row + 1] = torch_weights(attention, x[: row + 1])[:, row]
    return weights


def record_inputs(model: Transformer, src: list[int], tgt: list[int]) -> dict[Attention, list]:
    """What each attention of the model is given for one sentence, from a pass that collects nothing."""
    inputs: dict[Attention, list] = {}
    hooks = []
    for module in model.modules():
        if isinstance(module, Attention):
            keep = lambda module, args: inputs.update({module: list(args)})  # noqa: E731
            hooks.append(module.register_forward_pre_hook(keep))
    source = pack([[*src, EOS]])
    model.decode(pack([[BOS, *tgt]]), model.encode(source), source)
    for hook in hooks:
        hook.remove()
    return inputs


@torch.no_grad()
def test_weights_are_those_of_torch(vocab: Vocab, monkeypatch: MonkeyPatch) -> None:
    """And links are the places of most attention in the layer next to the last."""
    monkeypatch.setattr("nmt.extras.maps.attention_maps.MAX_WEIGHTS", 4_000)  # several batches
    monkeypatch.setattr("nmt.extras.maps.alignment.MAX_CELLS", 200)
    model = make_model(vocab, replace(SHAPE, n_layers=3))
    src, tgt = draw_pairs(vocab, 8)
    src[4] = []
    found = list(compute_attention_maps(model, vocab, src, tgt))
    assert [one.alignment for one in found] == align(model, src, tgt)
    for source, target, one in zip(src, tgt, found, strict=True):
        inputs = record_inputs(model, source, target)
        for index, layer in enumerate(model.encoder):
            expected = torch_weights(layer.attention, inputs[layer.attention][0])
            np.testing.assert_allclose(one.kinds["encoder"][index], expected, atol=2e-5)
        for index, block in enumerate(model.decoder):
            expected = torch_decoder_weights(block.attention, inputs[block.attention][0])
            np.testing.assert_allclose(one.kinds["decoder"][index], expected, atol=2e-5)
            x, memory = inputs[block.memory_attention][:2]
            expected = torch_weights(block.memory_attention, x, memory)
            np.testing.assert_allclose(one.kinds["memory"][index], expected, atol=2e-5)
        places = one.kinds["memory"][1].mean(0)[: len(target), : max(1, len(source))]
        assert one.alignment == places.argmax(1).tolist()


@mark.parametrize("shape", list_shapes(20).values(), ids=list_shapes(20).keys())
def test_shapes_sums_and_links(shape: ModelConfig, vocab: Vocab) -> None:
    model = make_model(vocab, shape).train()  # as in a validation; dropout must not show
    src, tgt = draw_pairs(vocab, 6)
    found = list(compute_attention_maps(model, vocab, src, tgt))
    assert model.training
    model.eval()
    assert [one.alignment for one in found] == align(model, src, tgt)
    for source, target, one in zip(src, tgt, found, strict=True):
        n, m, heads = len(source) + 1, len(target) + 1, shape.n_heads
        assert one.source == vocab.pieces([*source, EOS]) and one.source[-1] == "</s>"
        assert one.target == vocab.pieces([*target, EOS])
        assert one.kinds["memory"].shape == (shape.decoder_depth, heads, m, n)
        assert one.kinds["encoder"].shape == (shape.encoder_depth, heads, n, n)
        assert one.kinds["decoder"].shape == (shape.decoder_depth, heads, m, m)
        for weights in one.kinds.values():
            assert weights.dtype == np.float32
            np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
        assert not np.triu(one.kinds["decoder"], 1).any()


def decode(text: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape) / 255


def test_json_round_trip(vocab: Vocab) -> None:
    src, tgt = draw_pairs(vocab, 1)
    (one,) = compute_attention_maps(make_model(vocab), vocab, src, tgt)
    fields = one.to_json()
    assert (fields["source"], fields["target"]) == (one.source, one.target)
    assert fields["alignment"] == one.alignment
    assert list(fields["attention"]) == ["memory", "encoder", "decoder"]
    for kind, layers in fields["attention"].items():
        weights = one.kinds[kind]
        read = np.array([[decode(head, weights.shape[2:]) for head in layer] for layer in layers])
        np.testing.assert_allclose(read, weights, atol=0.5 / 255 + 1e-6)
    # one layer of two, its heads averaged, without the end marks
    assert one.kinds["memory"][0].mean(0)[:-1, :-1].argmax(1).tolist() == one.alignment


def test_translations_of_lines(tmp_path: Path) -> None:
    """With its tag, cut as it was translated, by the first model of an ensemble, in any batch."""
    vocab = make_vocab(tmp_path, tags=["<2de>"])
    models = [make_model(vocab, seed=seed) for seed in (2, 3)]
    config = replace(DECODING, tag="<2de>", max_source=9)
    translator = Translator(models[0], vocab, config, CPU, models[1:])
    lines = ["the dog", "", "a b c d e f g h i j k l m n o p"]
    found = add_alignments(translator, lines, translator.find_candidates(lines, 1))
    best = [few[0] for few in found]
    short, empty, cut = map_attention(translator, lines, best)
    assert empty is None
    assert short is not None and cut is not None
    assert short.source == ["<2de>", *vocab.pieces(vocab.encode(lines)[0]), "</s>"]
    assert len(cut.source) == 9 + 1
    for one, translation in ((short, best[0]), (cut, best[2])):
        assert one.target == [*vocab.pieces(translation.piece_ids), "</s>"]
        assert [max(0, place - 1) for place in one.alignment] == list(translation.alignment)
    assert_equal_maps(short, next(map_attention(translator, lines[:1], best[:1])))


def assert_equal_maps(one: AttentionMap, other: AttentionMap | None) -> None:
    assert other is not None
    assert (one.source, one.target, one.alignment) == (other.source, other.target, other.alignment)
    np.testing.assert_allclose(one.kinds["memory"], other.kinds["memory"], atol=1e-6)
