"""The linear layers of the feed-forward network, with a bias and an optional activation."""

import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.backend import BackendModule


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
