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


def steps(ours: Transformer, n: int = 6) -> list[Tensor]:
    """Logits of some steps, with hypotheses that change places and a sentence that leaves."""
    torch.manual_seed(2)
    cache, results = ours.make_cache(SRC, 2), []
    for step in range(n):
        n_sentences = 3 if step < 3 else 2
        hidden = ours.step(torch.randint(4, V, (n_sentences * 2,)), cache)
        results.append(torch.cat((hidden, ours.projection(hidden)), 1).float())
        cache.reorder(torch.randint(0, 2, (n_sentences, 2)))
        if step == 2:
            cache.keep(2, torch.tensor([0]), torch.tensor([2]))
    return results


def state(ours: Transformer) -> dict[str, tuple[Tensor, torch.dtype, bool, int]]:
    return {
        name: (p.detach().clone(), p.dtype, p.requires_grad, p.data_ptr())
        for name, p in ours.named_parameters(remove_duplicate=False)
    }


@NEEDS_PACKING
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.inference_mode()
def test_it_computes_what_the_model_computes(shape: ModelConfig) -> None:
    ours = model(shape).eval()
    ready = prepare_for_torch(ours, False)
    n_packed = sum(isinstance(one, PackedLinear) for one in ready.modules())
    assert n_packed == 1 + 4 * len(ours.encoder) + 7 * len(ours.decoder)
    torch.testing.assert_close(ready.encode(SRC), ours.encode(SRC), atol=FP32, rtol=0)
    for mine, expected in zip(steps(ready), steps(ours), strict=True):
        torch.testing.assert_close(mine, expected, atol=FP32, rtol=FP32)


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


@NEEDS_PACKING
def test_many_sentences_take_no_more_products_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bf16 is fast, smaller batches cost a third of the speed: each product reads all weights."""
    calls: list[int] = []
    forward = PackedLinear.forward

    def count(layer: PackedLinear, x: Tensor) -> Tensor:
        calls.append(len(x))
        return forward(layer, x)

    monkeypatch.setattr(PackedLinear, "forward", count)
    engine, device = PackedEngine(), torch.device("cpu")
    ready = engine.prepare(model(SHAPE).eval().requires_grad_(False), False)
    config = DecodingConfig(beam=4, max_ratio=0.0, max_extra=6, min_length=6)
    n_calls = []
    for n in (1, 150):
        calls.clear()
        assert (
            len(list(engine.search_batches(ready, Requests(n * [[5, 6, 3]]), config, device))) == 1
        )
        n_calls.append(len(calls))
    assert n_calls[0] == n_calls[1] > 0 and max(calls) == 150 * 4


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
    ours, twin = model(shape).train(), model(shape).train()
    optimizer, other = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (ours, twin))
    tgt = pack([[2, 5, 6], [2, 7], [2, 8, 9, 10]])
    for _ in range(2):
        before, buffers = state(ours), {name: b.clone() for name, b in ours.named_buffers()}
        ready = prepare_for_torch(ours, is_bf16)
        assert not ready.training and ours.training
        search(ready, pack(SENTENCES), make_rules(DecodingConfig(max_extra=3)))
        for name, (value, *facts) in state(ours).items():
            assert torch.equal(value, before[name][0]) and tuple(facts) == before[name][1:], name
        assert all(torch.equal(b, buffers[name]) for name, b in ours.named_buffers())
        assert (ours.projection.weight is ours.tgt_embedding.weight) is shape.tied
        for one, its in ((ours, optimizer), (twin, other)):  # the twin was never made ready
            torch.manual_seed(3)
            its.zero_grad()
            one.projection(one(pack(SENTENCES), tgt)).logsumexp(1).sum().backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in one.parameters())
            its.step()
    for mine, expected in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, expected)


@torch.inference_mode()
def test_sinusoids_grow_here_and_there() -> None:
    """A sentence longer than the table: each makes its own larger one."""
    ours = model(replace(SHAPE, max_positions=8)).eval()
    ready, long = prepare_for_torch(ours, False), pack([[*range(4, 34), 3]])
    torch.testing.assert_close(ready.encode(long), ours.encode(long), atol=FP32, rtol=0)
