"""Adam or AdamW, and its learning rate: that of section 5.3, or one of the usual others.

The rate is a pure function of the update's number, so it need not be saved. The update itself is that
of torch's Adam. To skip an update, set its `found_inf` to 1: then Adam changes nothing, and does not
count the step either. torch's GradScaler skips updates in the same way.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmt.config import OptimizerConfig
from nmt.system.ranks import Share, share_nothing
from nmt.train.moving_average import MovingAverage


class Adam(torch.optim.Adam):
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    average: MovingAverage | None = None  # of the weights, if the run keeps one
    shares: dict[str, Share]  # of the parameters that it updates, by name

    # To keep its methods from being traced, torch imports what takes a second. Nothing traces them here.
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


def learning_rate(step: int, d_model: int, n_steps: int, config: OptimizerConfig) -> float:
    """Compute the rate of an update; steps count from 1 to `n_steps`."""
    warmup, peak = config.warmup_steps, config.peak_lr
    if peak is None:  # the paper's schedule
        return config.scale * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    if step <= warmup:
        return peak * step / warmup
    if config.schedule == "inverse_sqrt":
        return peak * (warmup / step) ** 0.5
    if config.schedule == "cosine":
        progress = (step - warmup) / (n_steps - warmup)
        return config.final_lr + (peak - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2
    return peak


def make_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    frozen: Sequence[nn.Parameter] = (),
    ema: float | None = None,
    shares: dict[str, Share] | None = None,
) -> Adam:
    """Make the optimizer of a model, or of this rank's `shares` of it. Weight decay leaves `frozen`
    parameters as they are.
    """
    shares = share_nothing(model) if shares is None else shares
    groups: list[dict[str, Any]] = [{"params": [share.weight for share in shares.values()]}]
    if config.weight_decay:
        groups = _group_by_decay(model, shares, frozen, config.weight_decay)
    optimizer = Adam(
        groups,
        lr=0.0,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
        decoupled_weight_decay=config.weight_decay > 0,
    )
    optimizer.shares = shares
    if ema is not None:
        weights = {name: share.weight for name, share in shares.items()}
        optimizer.average = MovingAverage(weights, ema)
    return optimizer


def _group_by_decay(
    model: nn.Module, shares: dict[str, Share], frozen: Sequence[nn.Parameter], decay: float
) -> list[dict[str, Any]]:
    """Divide the parameters: matrices decay, but vectors do not, which are biases and LayerNorms."""
    frozen_ids = {id(parameter) for parameter in frozen}
    decaying: list[nn.Parameter] = []
    constant: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_constant = parameter.dim() < 2 or id(parameter) in frozen_ids
        if name in shares:
            (constant if is_constant else decaying).append(shares[name].weight)
    return [{"params": decaying, "weight_decay": decay}, {"params": constant}]


def set_learning_rate(optimizer: torch.optim.Adam, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
