"""A model made ready for decoding says what the model says, and leaves the model as it was: whole
and trainable.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.model import cpu_linear
from nmt.model.cpu_linear import CpuLinear, prepare_for_decoding
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure
from nmt.translate.search import search

V = 50
SHAPE = ModelConfig(d_model=32, d_ff=48, n_heads=4, n_layers=2, dropout=0.3)
SHAPES = {
    "post": SHAPE,
    "pre-untied": replace(SHAPE, norm="pre", tied=False),
    "learned": replace(SHAPE, positions="learned", max_positions=40),
    "small-heads": replace(SHAPE, d_k=3, d_v=5),
    "window": replace(SHAPE, window=2),
    "biased": replace(SHAPE, attention_bias=True),
    "gelu": replace(SHAPE, activation="gelu", embedding_norm="before_dropout"),
    "swish": replace(SHAPE, activation="swish", scale_embeddings="projection"),
}
SENTENCES = [[4, 9, 7, 3], [30, 3], [5, 6, 7, 8, 9, 10, 11, 12, 3]]
SRC = pack(SENTENCES)
NEEDS_PACKING = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
# Of outputs, which are norms' and of size 1: bf16 has 8 bits, some products follow another
FP32, BF16 = (1e-5, 0.05)


def model(shape: ModelConfig) -> Transformer:
    torch.manual_seed(1)
    made = Transformer(shape, V)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return made


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
    ready = prepare_for_decoding(ours, False)
    assert sum(isinstance(one, CpuLinear) for one in ready.modules()) == 1 + 2 * 4 + 2 * 7
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
    torch.testing.assert_close(CpuLinear(layer)(x), layer(x), atol=FP32, rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.inference_mode()
def test_bf16_comes_near(shape: ModelConfig) -> None:
    ours = model(shape).eval()
    ready = prepare_for_decoding(ours, True)
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
        ready = prepare_for_decoding(ours, is_bf16)
        assert not ready.training and ours.training
        search(ready, pack(SENTENCES), DecodingConfig(max_extra=3))
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
    ready, long = prepare_for_decoding(ours, False), pack([[*range(4, 34), 3]])
    torch.testing.assert_close(ready.encode(long), ours.encode(long), atol=FP32, rtol=0)


# ---- few hypotheses of a small model ------------------------------------------------------------


@pytest.fixture
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(cpu_linear, "STEPS_BEFORE_COMPILING", 0)


def uses_compiled_layers(ready: Transformer) -> bool:
    return "compiled_layers" in vars(ready)


@NEEDS_PACKING
@pytest.mark.timeout(300)  # numba compiles, unless it did so before
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.inference_mode()
def test_compiled_layers_compute_what_the_model_computes(
    shape: ModelConfig, compiled_at_once: None
) -> None:
    ours = model(shape).eval()
    ready = prepare_for_decoding(ours, False)
    for mine, expected in zip(steps(ready), steps(ours), strict=True):
        torch.testing.assert_close(mine, expected, atol=FP32, rtol=FP32)
    for sentence in SENTENCES:
        source = pack([sentence])
        torch.testing.assert_close(ready.encode(source), ours.encode(source), atol=FP32, rtol=0)
    assert uses_compiled_layers(ready)


@NEEDS_PACKING
@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("MAX_COMPILED_HYPOTHESES", 3),
        ("MAX_COMPILED_WEIGHTS", 1000),
        ("STEPS_BEFORE_COMPILING", 6),
        ("HAS_NUMBA", False),
    ],
)
@torch.inference_mode()
def test_when_layers_are_not_compiled(
    limit: str, value: int, compiled_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, limit, value)
    ready = prepare_for_decoding(model(SHAPE).eval(), False)
    steps(ready, n=6)
    assert not uses_compiled_layers(ready)


@NEEDS_PACKING
def test_compiled_layers_do_not_hide_nan(compiled_at_once: None) -> None:
    ours = model(SHAPE).eval()
    with torch.no_grad():
        ours.decoder[1].feed_forward.inner.weight[3, 4] = float("nan")
    ready = prepare_for_decoding(ours, False)
    with pytest.raises(Failure, match="NaN or infinite"):
        search(ready, SRC, DecodingConfig())
    assert uses_compiled_layers(ready)


@NEEDS_PACKING
@torch.inference_mode()
def test_where_numba_fails_torch_goes_on(
    compiled_at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged compiled code, found in the second layer: the first has written to the cache already."""
    from nmt.model import compiled_layers

    calls = []

    def fail_in_second_layer(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise EOFError("ran out of input")
        return real_layer(*args)

    real_layer = compiled_layers.apply_decoder_layer
    monkeypatch.setattr(compiled_layers, "apply_decoder_layer", fail_in_second_layer)
    ours = model(SHAPE).eval()
    ready = prepare_for_decoding(ours, False)
    for mine, expected in zip(steps(ready), steps(ours), strict=True):
        torch.testing.assert_close(mine, expected, atol=FP32, rtol=FP32)
    assert len(calls) == 2
    assert (
        capsys.readouterr().err.count("the layers cannot be compiled (EOFError: ran out of input)")
        == 1
    )


def test_each_version_of_the_file_keeps_its_own_compiled_code(tmp_path: Path) -> None:
    """An older version's code may name types that are gone."""
    pytest.importorskip("numba")
    code = "import numba, nmt.model.compiled_layers; print(numba.config.CACHE_DIR)"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    folder = Path(done.stdout.strip())
    source = Path(cpu_linear.__file__).with_name("compiled_layers.py").read_bytes()
    assert folder == tmp_path / hashlib.sha256(source).hexdigest()[:16]
