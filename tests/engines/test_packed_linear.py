"""A model made ready for decoding says what the model says, and leaves the model as it was: whole
and trainable.
"""

from dataclasses import replace

import pytest
import torch
from support.prepared_models import prepare_for_torch
from support.untrained import list_shapes, make_random_model
from torch import Tensor

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
SENTENCES = [[4, 9, 7, 3], [30, 3], [5, 6, 7, 8, 9, 10, 11, 12, 3]]
SRC = pack(SENTENCES)
NEEDS_PACKING = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
# Of outputs, which are norms' and of size 1: bf16 has 8 bits, some products follow another
FP32, BF16 = (1e-5, 0.05)


def model(shape: ModelConfig) -> Transformer:
    return make_random_model(shape, V, spread=0.1).train().requires_grad_(True)


def steps(ours: Transformer) -> list[Tensor]:
    """Hidden states and logits of some steps of decoding."""
    torch.manual_seed(2)
    cache, results = ours.make_cache(SRC, 2), []
    for _ in range(4):
        hidden = ours.step(torch.randint(4, V, (6,)), cache)
        results.append(torch.cat((hidden, ours.projection(hidden)), 1).float())
    return results


def state(ours: Transformer) -> dict[str, tuple[Tensor, torch.dtype, bool, int]]:
    """All weights and tables, and where they lie."""
    tensors = {**dict(ours.named_parameters(remove_duplicate=False)), **dict(ours.named_buffers())}
    return {
        name: (x.detach().clone(), x.dtype, x.requires_grad, x.data_ptr())
        for name, x in tensors.items()
    }


@NEEDS_PACKING
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_products_are_packed(shape: ModelConfig) -> None:
    """What they find, tests/translate/test_every_search.py compares."""
    ours = model(shape)
    n_packed = sum(isinstance(one, PackedLinear) for one in prepare_for_torch(ours).modules())
    assert n_packed == 1 + 4 * len(ours.encoder) + 7 * len(ours.decoder)


@NEEDS_PACKING
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 300])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_a_layer_serves_any_number_of_rows(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    layer, x = torch.nn.Linear(24, 37, has_bias), torch.randn(rows, 24)
    torch.testing.assert_close(PackedLinear(layer)(x), layer(x), atol=FP32, rtol=0)


@NEEDS_PACKING
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "swish"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
def test_an_activation_that_onednn_lacks_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = ActivatedLinear(24, 37, "cube"), torch.randn(5, 24)
    monkeypatch.setattr("nmt.engines.cpu.packed_linear.apply_activation", lambda y, name: y**3)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias) ** 3
    torch.testing.assert_close(PackedLinear(layer)(x), expected, atol=FP32, rtol=FP32)


def test_many_sentences_are_one_batch() -> None:
    """Where bf16 is fast, smaller batches cost a third of the speed: each product reads all weights."""
    config, requests = DecodingConfig(beam=4), Requests(150 * [[5, 6, 3]])
    (batch,) = PackedEngine().split_into_batches(requests, config, make_rules(config))
    assert len(batch) == 150


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.inference_mode()
def test_bf16_comes_near(shape: ModelConfig) -> None:
    ours = model(shape).eval()
    ready = prepare_for_torch(ours, True)
    assert ready.tgt_embedding.weight.dtype == ready.encode(SRC).dtype == torch.bfloat16
    largest = 0.0
    for mine, expected in zip(steps(ready), steps(ours), strict=True):
        error = (mine - expected).norm(dim=1) / expected.norm(dim=1)
        largest = max(largest, float(error.max()))
    assert 1e-5 < largest < BF16


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_model_stays_as_it_was_and_trains_on(shape: ModelConfig, is_bf16: bool) -> None:
    ours, twin = model(shape), model(shape)
    before = state(ours)
    ready = prepare_for_torch(ours, is_bf16)
    assert not ready.training and ours.training
    search(ready, pack(SENTENCES), make_rules(DecodingConfig(max_extra=3)))
    for name, (value, *facts) in state(ours).items():
        assert torch.equal(value, before[name][0]) and facts == list(before[name][1:]), name
    assert (ours.projection.weight is ours.tgt_embedding.weight) is shape.tied
    tgt = pack([[2, 5, 6], [2, 7], [2, 8, 9, 10]])
    for one in (ours, twin):  # the twin was never made ready
        torch.manual_seed(3)
        one.projection(one(pack(SENTENCES), tgt)).logsumexp(1).sum().backward()
    for mine, expected in zip(ours.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and expected.grad is not None
        assert torch.equal(mine.grad, expected.grad)


@torch.inference_mode()
def test_sinusoids_grow_here_and_there() -> None:
    """A sentence longer than the table: each makes its own larger one."""
    ours = model(replace(SHAPE, max_positions=8)).eval()
    ready, long = prepare_for_torch(ours, False), pack([[*range(4, 34), 3]])
    torch.testing.assert_close(ready.encode(long), ours.encode(long), atol=FP32, rtol=0)
