"""Adam and the learning rate of section 5.3.

The rate is a pure function of the update's number, so it need not be saved. torch's own Adam does
the rest. If `found_inf` is 1, it changes nothing, not even its count; torch's GradScaler uses this
too.
"""

import torch
from torch import Tensor, nn

from nmt.config import OptimizerConfig


class Adam(torch.optim.Adam):
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None


def learning_rate(step: int, d_model: int, config: OptimizerConfig) -> float:
    """Compute scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5); steps count from 1."""
    return config.scale * d_model**-0.5 * min(step**-0.5, step * config.warmup_steps**-1.5)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Adam:
    return Adam(
        model.parameters(), lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Adam, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
