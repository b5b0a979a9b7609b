"""How large the gradients and the steps of each layer are, which shows where a run goes wrong.

They are measured on the device, at the updates that are logged. A step is not found by comparing
weights, which would take a copy of them: Adam's moments after the step show what it added. Ranks
that hold shares of the weights add up what each found, so the norms are those of whole layers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nmt.system.ranks import World
from nmt.train.optimizer import Adam

STEP_CHUNK = 1 << 22  # elements at a time, so that the largest matrix takes no memory of its size


def name_layer(parameter: str) -> str:
    """Name the layer of a parameter: encoder.0, decoder_norm, or embeddings, which are all else."""
    part, _, rest = parameter.partition(".")
    if part in ("encoder", "decoder"):
        return f"{part}.{rest.partition('.')[0]}"
    return part if part in ("encoder_norm", "decoder_norm") else "embeddings"


class NormsByLayer:
    """Measures an update: first its gradients, then what Adam's step made of them."""

    def __init__(self, model: nn.Module, optimizer: Adam) -> None:
        self.optimizer = optimizer
        # All ranks list all layers, although one may have no share of some.
        self.layers: dict[str, list[nn.Parameter]] = {}
        for name, _ in model.named_parameters():
            own = self.layers.setdefault(name_layer(name), [])
            if name in optimizer.shares:
                own.append(optimizer.shares[name].weight)
        self.groups: dict[nn.Parameter, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            self.groups |= dict.fromkeys(group["params"], group)

    @torch.no_grad()
    def measure_gradients(self) -> Tensor:
        """Return the sum of squares of each layer's gradients, (layers,). Adam's step may clip them,
        so this comes before it.
        """
        sums = [
            self._add_squares(p.grad for p in parameters if p.grad is not None)
            for parameters in self.layers.values()
        ]
        return torch.stack(sums)

    @torch.no_grad()
    def measure_steps(self) -> Tensor:
        """Return the sum of squares of what the last step added to each layer's weights, (layers,)."""
        sums = [
            self._add_squares(step for p in parameters for step in self._find_steps(p))
            for parameters in self.layers.values()
        ]
        return torch.stack(sums)

    def _find_steps(self, parameter: nn.Parameter) -> Iterable[Tensor]:
        """Yield what the last step added to a parameter, chunk by chunk and without its sign."""
        group, state = self.groups[parameter], self.optimizer.state[parameter]
        if not state:
            return  # it has no gradient
        beta1, beta2 = group["betas"]
        n_steps = state["step"].double()
        rate = group["lr"] / (1 - beta1**n_steps)
        scale = (1 - beta2**n_steps).sqrt()
        decay = group["lr"] * group["weight_decay"]
        tensors = (parameter, state["exp_avg"], state["exp_avg_sq"])
        chunks = [tensor.flatten().split(STEP_CHUNK) for tensor in tensors]
        for weights, mean, square in zip(*chunks, strict=True):
            step = mean / (square.sqrt() / scale + group["eps"]) * rate
            if decay:  # The weights before the step lost this share: w' = (1 - decay) w - step.
                step = (step + decay * weights) / (1 - decay)
            yield step

    def _add_squares(self, tensors: Iterable[Tensor]) -> Tensor:
        # in fp64, because a sum of millions of squares loses digits in fp32
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
        if not norms:  # this rank has no share of the layer
            return next(iter(self.groups)).new_zeros((), dtype=torch.float64)
        return torch.stack(norms).square().sum()

    def combine(self, squares: list[Tensor], world: World) -> Tensor:
        """Turn sums of squares into norms of whole layers, (figures, layers)."""
        return world.sum(torch.stack(squares)).sqrt()
