"""A model made ready for decoding says what the model says, and leaves the model as it was: whole
and trainable. What a search of it finds, tests/translate/test_every_search.py compares.
"""

from dataclasses import replace

import pytest
import torch
from pytest import MonkeyPatch, mark
from support.prepared_models import prepare_for_torch
from support.untrained import list_shapes, make_random_model

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.engines.cpu.packed_linear import PackedEngine, PackedLinear, find_fault_of_packing
from nmt.model.feed_forward import ActivatedLinear
from nmt.model.transformer import Transformer
from nmt.translate.batching import Requests
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules

V = 50
SHAPE = ModelConfig(d_model=32, d_ff=48, n_heads=4, n_layers=2, dropout=0.3)
SHAPES = list_shapes(40, SHAPE)
SRC = pack([[4, 9, 7, 3], [30, 3], [5, 6, 7, 8, 9, 10, 11, 12, 3]])
TGT = pack([[2, 5, 6], [2, 7], [2, 8, 9, 10]])
NEEDS_PACKING = mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


def model(shape: ModelConfig) -> Transformer:
    return make_random_model(shape, V, spread=0.1).train().requires_grad_(True)


def find_places(ours: Transformer) -> dict[str, tuple[int, torch.dtype, bool]]:
    """Where all weights and tables lie."""
    tensors = [*ours.named_parameters(remove_duplicate=False), *ours.named_buffers()]
    return {name: (x.data_ptr(), x.dtype, x.requires_grad) for name, x in tensors}


@NEEDS_PACKING
@mark.parametrize("rows", [1, 2, 15, 16, 17, 300])
@mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_a_layer_serves_any_number_of_rows(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    layer, x = torch.nn.Linear(24, 37, has_bias), torch.randn(rows, 24)
    torch.testing.assert_close(PackedLinear(layer)(x), layer(x), atol=1e-5, rtol=0)


@NEEDS_PACKING
@mark.parametrize("activation", ["none", "relu", "gelu", "swish"])
@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_nan_stays_nan(activation: str, dtype: torch.dtype) -> None:
    """A broken model translates nothing; if NaN became 0, it would translate in silence."""
    if dtype == torch.bfloat16 and find_fault_of_packing(True) is not None:
        pytest.skip("this processor does not multiply bf16")
    layer = ActivatedLinear(24, 37, activation).to(dtype)
    x = torch.randn(5, 24, dtype=dtype)
    x[2, 3] = torch.nan
    y = PackedLinear(layer)(x)
    assert y[2].isnan().all() and y[[0, 1, 3, 4]].isfinite().all()


@NEEDS_PACKING
def test_an_activation_that_onednn_lacks_is_the_models_own(monkeypatch: MonkeyPatch) -> None:
    layer, x = ActivatedLinear(24, 37, "cube"), torch.randn(5, 24)
    monkeypatch.setattr("nmt.engines.cpu.packed_linear.apply_activation", lambda y, name: y**3)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias) ** 3
    torch.testing.assert_close(PackedLinear(layer)(x), expected, atol=1e-5, rtol=1e-5)


def test_many_sentences_are_one_batch() -> None:
    """Where bf16 is fast, smaller batches cost a third of the speed: each product reads all weights."""
    config, requests = DecodingConfig(beam=4), Requests(150 * [[5, 6, 3]])
    (batch,) = PackedEngine().split_into_batches(requests, config, make_rules(config))
    assert len(batch) == 150


@torch.inference_mode()
def test_bf16_comes_near() -> None:
    """Of outputs, which are norms' and of size 1: bf16 has 8 bits, some products follow another."""
    ours = model(SHAPES["switches"]).eval()
    ready = prepare_for_torch(ours, True)
    assert ready.tgt_embedding.weight.dtype == ready.encode(SRC).dtype == torch.bfloat16
    cache, exact_cache = ready.make_cache(SRC, 2), ours.make_cache(SRC, 2)
    for tokens in torch.randint(4, V, (4, 6)):
        hidden, exact = ready.step(tokens, cache), ours.step(tokens, exact_cache)
        for near, expected in (
            (hidden, exact),
            (ready.projection(hidden), ours.projection(exact)),
        ):
            error = (near - expected).norm(dim=1) / expected.norm(dim=1)
            assert 1e-5 < error.max() < 0.05


@mark.parametrize("is_bf16", [False, True])
@mark.parametrize("shape", [SHAPES["post"], SHAPES["pre"]])
def test_the_model_stays_as_it_was_and_trains_on(shape: ModelConfig, is_bf16: bool) -> None:
    """All its products are packed, in a copy."""
    ours, twin = model(shape), model(shape)
    places = find_places(ours)
    ready = prepare_for_torch(ours, is_bf16)
    if find_fault_of_packing(is_bf16) is None:
        n_packed = sum(isinstance(one, PackedLinear) for one in ready.modules())
        assert n_packed == 1 + 4 * len(ours.encoder) + 7 * len(ours.decoder)
    assert not ready.training and ours.training
    search(ready, SRC, make_rules(DecodingConfig(max_extra=3)))
    assert find_places(ours) == places
    assert (ours.projection.weight is ours.tgt_embedding.weight) is shape.tied
    for one in (ours, twin):  # the twin was never made ready
        torch.manual_seed(3)
        one.projection(one(SRC, TGT)).logsumexp(1).sum().backward()
    for mine, other in zip(ours.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine, other) and torch.equal(mine.grad, other.grad)


@torch.inference_mode()
def test_sinusoids_grow_here_and_there() -> None:
    """A sentence longer than the table: each makes its own larger one."""
    ours = model(replace(SHAPE, max_positions=8)).eval()
    ready, long = prepare_for_torch(ours, False), pack([[*range(4, 34), 3]])
    torch.testing.assert_close(ready.encode(long), ours.encode(long), atol=1e-5, rtol=0)
