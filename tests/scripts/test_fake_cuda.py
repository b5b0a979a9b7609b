"""A training micro-batch on fake CUDA tensors: types under CUDA's own autocast, devices, and
shapes, without a GPU.

Fake tensors have a device, a type and a shape but no numbers. They need the CUDA build of torch,
which has CUDA's rules but weighs gigabytes: `make gpu-dry` makes an environment with it and runs
this file there. The backward pass runs on the pretend device of tests/train/test_update_gpu.py:
autograd's threads want a real one.
"""

from typing import Any

import torch
from pytest import MonkeyPatch, mark
from torch import nn

from nmt.config import ModelConfig
from nmt.data.batch import Batch, Packed
from nmt.engines.cuda.backend import CudaBackend
from nmt.model.backend import use_backend
from nmt.model.feed_forward import FeedForward
from nmt.model.multi_head_attention import MemoryAttention, SelfAttention
from nmt.model.transformer import LayerNorm, Transformer
from nmt.train.loss import Objective

pytestmark = mark.skipif(
    torch.version.cuda is None, reason="needs the CUDA build of torch: make gpu-dry"
)
TOKENS, SENTENCES, N_VOCAB = 640, 64, 1_000
SHAPES = {
    "base": ModelConfig(),
    "big": ModelConfig(d_model=1024, d_ff=4096, n_heads=16),
    "pre": ModelConfig(norm="pre", n_layers=2),
    "window": ModelConfig(window=5, n_layers=1, tied=False),
}
ROUNDED = LayerNorm | FeedForward | SelfAttention | MemoryAttention | nn.Linear


class Switch:
    """`torch.autocast` warns and does nothing without a GPU; this is what it sets."""

    def __init__(self, device: str, dtype: object = None, enabled: bool = True) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        self.before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", self.enabled)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled("cuda", self.before)


@mark.parametrize("name", SHAPES)
def test_everything_between_embedding_and_loss_is_bf16(name: str, monkeypatch: MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._C._ensureCUDADeviceGuardSet()
    monkeypatch.setattr(torch, "autocast", Switch)
    found: list[tuple[nn.Module, torch.dtype]] = []

    def note(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        found.append((module, output.dtype))

    with FakeTensorMode(allow_non_fake_inputs=False), torch.device("cuda"), Switch("cuda"):
        # CUDA's autocast returns fp32 from torch's LayerNorm, which is why there is one of our own
        x = torch.zeros(4, 8, dtype=torch.bfloat16)
        assert nn.LayerNorm(8)(x).dtype == torch.float32
        model = Transformer(SHAPES[name], N_VOCAB)
        use_backend(model, CudaBackend())
        for module in model.modules():
            if isinstance(module, ROUNDED):
                module.register_forward_hook(note)
        rows = torch.zeros(TOKENS, dtype=torch.int64)
        side = Packed(rows, torch.zeros(SENTENCES + 1, dtype=torch.int64), 128, TOKENS)
        sums = Objective(model, 0.1)(Batch(side, side, rows, TOKENS))
    assert {dtype for _, dtype in found} == {torch.bfloat16}
    n_norms = sum(isinstance(module, LayerNorm) for module, _ in found)
    assert n_norms >= 5 * SHAPES[name].n_layers
    assert {(x.dtype, x.device.type) for x in sums} == {(torch.float32, "cuda")}
