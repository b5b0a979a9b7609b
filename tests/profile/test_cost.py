"""Costs against counts made otherwise: by hand, by torch's counter, pair by pair."""

import torch
from pytest import approx, mark
from torch.utils.flop_counter import FlopCounterMode

from nmt.config import ModelConfig
from nmt.data.batch import pack
from nmt.extras.profile.cost import CHECKPOINT_BYTES, count_flop
from nmt.model.size import count_weights
from nmt.model.transformer import Transformer


@mark.parametrize(
    "model",
    [
        ModelConfig(d_model=128, d_ff=256, n_heads=4, n_layers=2),
        ModelConfig(d_model=128, d_ff=512, n_heads=2, n_layers=3, d_k=32, d_v=96, norm="pre"),
        ModelConfig(d_model=64, d_ff=256, n_heads=4, n_layers=1, tied=False, dropout=0.0),
        ModelConfig(d_model=128, d_ff=256, n_heads=4, encoder_layers=3, decoder_layers=1),
    ],
)
def test_operations_are_those_that_torch_counts(model: ModelConfig) -> None:
    transformer = Transformer(model, 500)
    src, tgt = pack([[5] * 32] * 10), pack([[6] * 16] * 10)  # lengths that no grid pads
    with FlopCounterMode(display=False) as counter:
        (transformer(src, tgt) @ transformer.projection.weight.T).sum().backward()
    flop = count_flop(model, 500, 32, 16)
    assert flop.src * 320 + flop.tgt * 160 == approx(counter.get_total_flops(), rel=0.02)


@mark.parametrize("window", [None, 4, 100])
def test_operations_of_attention_follow_the_pieces_seen(window: int | None) -> None:
    model = ModelConfig(d_model=64, n_heads=4, n_layers=3, d_k=8, d_v=24, window=window)
    n, reach = 80, window or 80
    near = [(q, k) for q in range(n) for k in range(n) if abs(q - k) <= reach]
    behind = [(q, k) for q, k in near if k <= q]
    per_pair = 6 * 3 * 4 * (8 + 24)
    empty, full = count_flop(model, 100, 0, 0), count_flop(model, 100, n, n)
    assert (full.src - empty.src) * n == approx(per_pair * len(near), rel=0.04)
    assert (full.tgt - empty.tgt) * n == approx(per_pair * (len(behind) + n * n), rel=0.04)


@mark.parametrize("is_tied", [True, False])
def test_bytes_are_those_of_the_tensors(is_tied: bool) -> None:
    model = Transformer(ModelConfig(d_model=16, d_ff=32, n_heads=2, n_layers=1, tied=is_tied), 50)
    adam = torch.optim.Adam(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    adam.step()
    weights = sum(weight.numel() * 4 for weight in model.parameters())
    moments = 0
    for state in adam.state.values():
        moments += sum(4 * moment.numel() for name, moment in state.items() if name != "step")
    n = count_weights(model.config, model.sizes)
    assert CHECKPOINT_BYTES * n == weights + moments
