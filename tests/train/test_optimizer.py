"""The learning rate against the paper's formula, worked out by hand, and Adam's settings."""

import pytest
import torch

from nmt.config import OptimizerConfig
from nmt.train.optimizer import learning_rate, make_optimizer, set_learning_rate


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, 1.74692810742171e-07),  # 512^-0.5 * 4000^-1.5
        (4000, 6.98771242968684e-04),  # 512^-0.5 * 4000^-0.5, the peak
        (100_000, 1.39754248593737e-04),  # 512^-0.5 * 100000^-0.5
    ],
)
def test_schedule_of_the_base_model(step: int, expected: float) -> None:
    assert learning_rate(step, 512, OptimizerConfig()) == pytest.approx(expected, rel=1e-12)


def test_adam_is_torchs_with_the_papers_constants() -> None:
    optimizer = make_optimizer(torch.nn.Linear(2, 2), OptimizerConfig())
    set_learning_rate(optimizer, 0.25)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["lr"], group["weight_decay"]) == (
        (0.9, 0.98),
        1e-9,
        0.25,
        0,
    )
