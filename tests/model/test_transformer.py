"""The model with a window against torch's own modules in float64, packed against alone, the cached
step against the full pass, and positions: where they end, and rotary ones against their formula.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pytest import approx, mark, raises
from support.torch_twin import make_torch_twin
from torch import Tensor

from nmt.config import ModelConfig
from nmt.data.batch import Packed, pack
from nmt.model.feed_forward import FeedForward
from nmt.model.packed_attention import rotate
from nmt.model.positions import Positions, sinusoids
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError

SMALL = ModelConfig(d_model=16, d_ff=24, n_heads=4, n_layers=2, dropout=0.0)
V = 23
SRC = [[5, 6, 7, 3], [8, 3], [9, 10, 11, 12, 13, 3]]
TGT = [[2, 14, 15], [2, 16, 17, 18, 19], [2]]


def make(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config, V).double()
    for p in model.parameters():  # biases and norms too must matter
        p.data += 0.05 * torch.randn_like(p)
    return model.eval()


def with_tail(packed: Packed, n: int) -> Packed:
    """The same sentences, then n dead tokens and two empty sentences."""
    tokens = torch.cat((packed.tokens, torch.full((n,), 4)))
    return Packed(
        tokens,
        torch.cat((packed.offsets, packed.offsets[-1:].repeat(2))),
        packed.longest,
        packed.n_live,
    )


@mark.parametrize("norm", ["post", "pre"])
def test_a_window_equals_torch_layers_in_float64(norm: Literal["post", "pre"]) -> None:
    """Without one, test_retellings.py holds all models to them."""
    model = make(replace(SMALL, norm=norm, window=1))
    encoder, decoder = make_torch_twin(model)
    packed = model(pack(SRC), pack(TGT))
    for src, tgt, ours in zip(SRC, TGT, packed.split([len(t) for t in TGT]), strict=True):

        def embed(ids: list[int]) -> Tensor:
            x = F.embedding(torch.tensor(ids), model.tgt_embedding.weight) * math.sqrt(16)
            return (x + sinusoids(len(ids), 16).double())[None]

        far = torch.ones(9, 9).tril(-2).bool()  # two places or more behind
        memory = encoder(embed(src), mask=(far | far.T)[: len(src), : len(src)])
        unseen = (far | torch.ones(9, 9).triu(1).bool())[: len(tgt), : len(tgt)]
        theirs = decoder(embed(tgt), memory, tgt_mask=unseen)[0]
        assert (ours - theirs).abs().max() < 1e-10


def test_biases_begin_at_zero_and_more_rows_than_pieces_are_kept() -> None:
    model = Transformer(replace(SMALL, attention_bias=True, vocab_rows=V + 6), V)
    biases = {name: p for name, p in model.named_parameters() if name.endswith(".bias")}
    attention = {name for name in biases if "attention." in name}
    assert len(attention) == 2 * (2 + 5)  # two layers: qkv, output; and q, kv, output of memory
    assert all(not bool(biases[name].any()) for name in attention)
    assert (model.n_pieces, model.n_vocab) == (V, V + 6)
    assert model.projection.weight.shape == (V + 6, 16)


@mark.parametrize(
    "tied, names",
    [
        (True, {"tgt_embedding"}),
        (False, {"src_embedding", "tgt_embedding", "projection"}),
        ("decoder", {"src_embedding", "tgt_embedding"}),
        ("embeddings", {"tgt_embedding", "projection"}),
    ],
)
def test_matrices_are_one_where_they_are_tied(
    tied: bool | Literal["decoder", "embeddings"], names: set[str]
) -> None:
    model = Transformer(replace(SMALL, tied=tied), V)
    stored = {name for name, _ in model.named_parameters() if "coder." not in name}
    assert stored == {f"{name}.weight" for name in names}
    source, target, projection = (
        part.weight for part in (model.src_embedding, model.tgt_embedding, model.projection)
    )
    assert (source is target) is (tied in (True, "embeddings"))
    assert (projection is target) is (tied in (True, "decoder"))
    for weight in (source, target, projection):  # all are drawn alike
        assert float(weight.std()) == approx(16**-0.5, rel=0.15)


OPTIONS = {
    "post": SMALL,
    "pre": replace(SMALL, norm="pre"),
    "window": replace(SMALL, window=1),
    "learned": replace(SMALL, positions="learned"),
    "rotary": replace(SMALL, norm="pre", positions="rotary"),
    "d_k": replace(SMALL, d_k=3, d_v=5),
    "untied": replace(SMALL, tied=False),
    "decoder": replace(SMALL, tied="decoder"),
    "embeddings": replace(SMALL, tied="embeddings"),
    "biased": replace(SMALL, attention_bias=True),
    "swish": replace(
        SMALL,
        scale_embeddings="projection",
        embedding_norm="after_dropout",
        activation="swish",
        encoder_layers=3,
        decoder_layers=1,
    ),
    "gelu": replace(
        SMALL, scale_embeddings="none", embedding_norm="before_dropout", activation="gelu"
    ),
}
each_option = mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)


@each_option
def test_packed_equals_each_sentence_alone(config: ModelConfig) -> None:
    model = make(config)
    together = model(with_tail(pack(SRC), 5), with_tail(pack(TGT), 7))
    assert together.shape == (sum(map(len, TGT)) + 7, 16) and together.isfinite().all()
    alone = torch.cat([model(pack([s]), pack([t])) for s, t in zip(SRC, TGT, strict=True)])
    assert (together[:-7] - alone).abs().max() < 1e-12


@each_option
def test_cached_step_equals_full_forward(config: ModelConfig) -> None:
    model = make(config)
    rows = [[2, 14, 15, 5, 6, 7], [2, 16, 17, 18, 19, 8], [2, 9, 9, 9, 9, 9]]
    with torch.no_grad():
        full = model.projection(model(pack(SRC), pack(rows))).view(3, 6, V)
        cache = model.make_cache(pack(SRC), beam=2)
        for t in range(6):
            tokens = torch.tensor([row[t] for row in rows]).repeat_interleave(2)
            logits = model.projection(model.step(tokens, cache)).view(len(rows), 2, V)
            assert (logits - full[:, None, t]).abs().max() < 1e-12
            # The hypotheses of each sentence change places, and the second sentence leaves
            if t == 2:
                cache.reorder(torch.tensor([[1, 0], [0, 1], [1, 0]]))
                cache.keep(2, torch.tensor([1]), torch.tensor([2]))
                rows, full = [rows[0], rows[2]], full[[0, 2]]


def test_dropout_of_the_feed_forward_follows_its_activation() -> None:
    forward = FeedForward(replace(SMALL, ffn_dropout=0.5, activation="gelu")).double().train()
    x = torch.randn(200, 16, dtype=torch.float64)
    seen: list[Tensor] = []
    forward.outer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    forward(x)
    expected = F.gelu(F.linear(x, forward.inner.weight, forward.inner.bias))
    kept = seen[0] != 0
    assert (seen[0] - 2 * expected * kept).abs().max() < 1e-12
    assert float(kept.double().mean()) == approx(0.5, abs=0.03)


def test_the_switches_draw_nothing_where_they_are_off() -> None:
    """Dropout that is off draws no random number, so a run keeps its bits."""

    def draws(model: Transformer) -> bool:
        state = torch.get_rng_state()
        model(pack(SRC), pack(TGT))
        return not torch.equal(torch.get_rng_state(), state)

    assert not draws(Transformer(SMALL, V).train())  # no dropout at all
    on = Transformer(replace(SMALL, attention_dropout=0.5), V)
    assert draws(on.train()) and not draws(on.eval())


# ---- positions; sinusoids are written out in tests/test_paper.py ---------------------------------------------------


def test_sinusoids_have_no_end_but_a_learned_table_has() -> None:
    long, shape = pack([[5] * 40]), replace(SMALL, max_positions=8)
    for config in (shape, replace(shape, positions="rotary")):
        assert make(config).encode(long).shape == (40, 16)
    with raises(UserError, match="model.max_positions 8"):
        make(replace(shape, positions="learned")).encode(long)


def test_rotary_positions_are_products_of_complex_numbers() -> None:
    rotary = Positions(ModelConfig(d_model=16, n_heads=2, positions="rotary"))
    torch.manual_seed(0)
    x, positions = torch.randn(3, 2, 8), torch.tensor([0, 7, 300])
    angles = positions[:, None] / 10_000 ** (torch.arange(4) / 4)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles)[:, None]
    rotated = rotate(x, rotary.find_rotation(positions, 301))
    expected = torch.cat((expected.real, expected.imag), -1)
    torch.testing.assert_close(rotated, expected, atol=1e-5, rtol=1e-5)
    embeddings = torch.randn(3, 16)
    assert torch.equal(rotary(embeddings, positions, 301), embeddings)
