"""The feed-forward network of section 3.3, its linear layers with a bias, and the activations."""

import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.model.backend import BackendModule
from nmt.model.dropout import Dropout


class FeedForward(nn.Module):
    """The feed-forward network of section 3.3: max(0, x W1 + b1) W2 + b2, or another function."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = ActivatedLinear(config.d_model, config.d_ff, config.activation)
        self.dropout = Dropout(config.ffn_dropout)
        self.outer = BiasedLinear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(self.inner(x)))


class BiasedLinear(nn.Linear, BackendModule):
    """nn.Linear, whose product the backend computes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.multiply(x, self.weight, self.bias)


class ActivatedLinear(BiasedLinear):
    def __init__(self, n_inputs: int, n_outputs: int, activation: str) -> None:
        super().__init__(n_inputs, n_outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return apply_activation(super().forward(x), self.activation)


def apply_activation(y: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return F.relu_(y)
    if activation == "gelu":
        return F.gelu(y)
    if activation == "swish":
        return F.silu(y)
    return y
