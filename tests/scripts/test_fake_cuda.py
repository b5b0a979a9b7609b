"""A training micro-batch on fake CUDA tensors: types under CUDA's own autocast, devices, and
shapes, without a GPU.

Fake tensors have a device, a type and a shape but no numbers. They need the CUDA build of torch,
which has CUDA's rules but weighs gigabytes: `make gpu-dry` makes an environment with it and runs
this file there.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nmt.config import ModelConfig
from nmt.data.batch import Batch, Packed
from nmt.engines.cuda.backend import CudaBackend
from nmt.model.backend import use_backend
from nmt.model.feed_forward import FeedForward
from nmt.model.multi_head_attention import MemoryAttention, SelfAttention
from nmt.model.transformer import LayerNorm, Transformer
from nmt.train.loss import Objective

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs the CUDA build of torch: make gpu-dry"
)
TOKENS, SENTENCES, N_VOCAB = 640, 64, 1_000
SHAPES = {
    "base": ModelConfig(),
    "big": ModelConfig(d_model=1024, d_ff=4096, n_heads=16),
    "pre": ModelConfig(norm="pre", n_layers=2),
    "window": ModelConfig(window=5, n_layers=1, tied=False),
}


@pytest.fixture
def fake() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._C._ensureCUDADeviceGuardSet()
    with FakeTensorMode(allow_non_fake_inputs=False), torch.device("cuda"):
        # torch.autocast refuses without a GPU; these are what it sets
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)


def make_batch() -> Batch:
    rows = torch.zeros(TOKENS, dtype=torch.int64)
    side = Packed(rows, torch.zeros(SENTENCES + 1, dtype=torch.int64), 128, TOKENS)
    return Batch(side, side, rows, TOKENS)


def make_model(name: str) -> Transformer:
    model = Transformer(SHAPES[name], N_VOCAB)
    use_backend(model, CudaBackend())
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_everything_between_embedding_and_loss_is_bf16(
    name: str, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_autocast_of_its_own(monkeypatch)
    model = make_model(name)
    types: dict[str, torch.dtype] = {}

    def note(module_name: str) -> object:
        return lambda module, inputs, output: types.update({module_name: output.dtype})

    for module_name, module in model.named_modules():
        if isinstance(
            module, LayerNorm | FeedForward | SelfAttention | MemoryAttention | nn.Linear
        ):
            module.register_forward_hook(note(module_name))  # type: ignore[arg-type]
    batch = make_batch()
    hidden = model(batch.src, batch.tgt)
    assert {name: found for name, found in types.items() if found != torch.bfloat16} == {}
    assert len([one for one in types if one.endswith("norm")]) >= 5 * model.config.n_layers
    assert hidden.dtype == torch.bfloat16 and hidden.device.type == "cuda"


def without_autocast_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerNorm switches autocast off for itself by `torch.autocast`, which warns and does nothing
    without a GPU.
    """

    class Switch:
        def __init__(
            self, device: str, dtype: torch.dtype | None = None, enabled: bool = True
        ) -> None:
            self.enabled = enabled

        def __enter__(self) -> None:
            self.before = torch.is_autocast_enabled("cuda")
            torch.set_autocast_enabled("cuda", self.enabled)

        def __exit__(self, *_: object) -> None:
            torch.set_autocast_enabled("cuda", self.before)

    monkeypatch.setattr(torch, "autocast", Switch)


@pytest.mark.parametrize("name", SHAPES)
def test_a_forward_pass_keeps_to_the_device(
    name: str, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass runs on the pretend device of tests/train/test_update_gpu.py: autograd's
    threads want a real one.
    """
    without_autocast_of_its_own(monkeypatch)
    loss, nll = Objective(make_model(name), 0.1)(make_batch())
    assert loss.dtype == nll.dtype == torch.float32
    assert loss.device.type == nll.device.type == "cuda"


def test_the_fixture_sees_what_it_must(fake: None) -> None:
    """CUDA's autocast returns fp32 from torch's LayerNorm, which is why there is one of our own."""
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert nn.LayerNorm(8)(x).dtype == torch.float32
