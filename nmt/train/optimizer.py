"""Adam or AdamW, its learning rate, that of section 5.3 or one of the usual others, and what it keeps.

The rate is a pure function of the update's number, so it need not be saved. The update itself is that
of torch's Adam. To skip an update, set its `found_inf` to 1: then Adam changes nothing, and does not
count the step either. torch's GradScaler skips updates in the same way. What an optimizer keeps for each
weight is in nmt/model/moments.py.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmt.checkpoint.checkpoint import Checkpoint, Snapshot, TrainState
from nmt.checkpoint.tensors import copy_tensors, open_tensors
from nmt.config import OptimizerConfig
from nmt.model.moments import Moments, choose_moments
from nmt.system.ranks import OwnShares, share_nothing
from nmt.system.run_folder import OPTIMIZER_FILE
from nmt.system.tensor_files import Tensors
from nmt.train.moving_average import MovingAverage

# Makes whole tensors of the ranks' shares, on the main rank.
GatherShares = Callable[[Tensors], Tensors]


class Adam(torch.optim.Adam):
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    average: MovingAverage | None = None  # of the weights, if the run keeps one
    # of the parameters that it updates, by name
    shares: OwnShares
    moments: dict[str, Moments]

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
    shares: OwnShares | None = None,
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
    named = model.named_parameters()
    optimizer.moments = {name: choose_moments(config, name, p.shape) for name, p in named}
    if ema is not None:
        weights = {name: share.weight for name, share in shares.items()}
        optimizer.average = MovingAverage(weights, ema)
    return optimizer


def _group_by_decay(
    model: nn.Module, shares: OwnShares, frozen: Sequence[nn.Parameter], decay: float
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


# ---- what it keeps -----------------------------------------------------------------------------------


def take_snapshot(
    model: nn.Module, optimizer: Adam, has_moments: bool = True, gather: GatherShares = dict
) -> Snapshot:
    """Collect the weights, or their averages, and moments unless `has_moments` is false. No tensor is
    copied. With several ranks this is a collective operation: all must call it.
    """
    weights = {name: p.detach() for name, p in model.named_parameters()}
    moments = _gather_moments(optimizer, gather) if has_moments else {}
    if optimizer.average is None:
        return Snapshot(weights, moments)
    if has_moments:
        moments |= {f"weight.{name}": weight for name, weight in weights.items()}
    return Snapshot(gather(optimizer.average.averages), moments)


def _gather_moments(optimizer: Adam, gather: GatherShares) -> Tensors:
    moments: Tensors = {}
    states = {name: optimizer.state[share.weight] for name, share in optimizer.shares.items()}
    first: dict[str, Tensor] = next(iter(states.values()), {})
    for key in sorted({key for kept in optimizer.moments.values() for key in kept.names}):
        own = {name: state[key] for name, state in states.items() if key in state}
        for name, value in gather(own).items():
            moments[f"{key}.{name}"] = value
            # This rank has no state of other ranks' shares, but all have taken the same steps.
            moments[f"step.{name}"] = states.get(name, first)["step"]
    return moments


def find_idle_weights(optimizer: Adam, gather: GatherShares) -> list[str]:
    """Name the weights whose gradients were all zero. Means show it; the squares of gradients may all be
    too small for a float. All ranks must call this.
    """
    moments = _gather_moments(optimizer, gather)
    zeros = {key for key, moment in moments.items() if not moment.any()}
    return [name for name, kept in optimizer.moments.items() if f"{kept.names[0]}.{name}" in zeros]


@torch.no_grad()
def load_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: Adam) -> TrainState:
    """Copy the moments of a checkpoint into `optimizer`; return the state that training continues from.
    With `training.ema`, also copy the weights themselves into `model`.
    """
    assert isinstance(checkpoint.origin, TrainState), "an average has no optimizer"
    path = checkpoint.path / OPTIMIZER_FILE
    with open_tensors(path, "pt") as file:
        for name, share in optimizer.shares.items():
            device = share.weight.device
            state = {"step": file.get_tensor(f"step.{name}").to(device, copy=True)}
            for key in optimizer.moments[name].names:
                value = share.cut_from(file.get_tensor(f"{key}.{name}"))
                state[key] = value.to(device, copy=True)
            optimizer.state[share.weight] = state
    if optimizer.average is not None:
        copy_tensors(path, {f"weight.{name}": p for name, p in model.named_parameters()})
    return checkpoint.origin
