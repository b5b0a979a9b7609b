"""The learning rate against the paper's formula, worked out by hand, and against torch's schedulers;
Adam's settings.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from pytest import approx, mark, raises
from support.capture import Capture, read_stderr
from support.in_process import refuse, succeed
from torch.optim import lr_scheduler

from nmt.commands.train import main
from nmt.config import OptimizerConfig, RunConfig, TrainingConfig
from nmt.config_files import list_differences, load_config
from nmt.system.errors import UserError
from nmt.system.strict_json import Fields
from nmt.train.optimizer import learning_rate, make_optimizer

PEAK, WARMUP, N_STEPS = 3e-3, 20, 100
Rates = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
TORCHS_SCHEDULERS: dict[str, Rates] = {
    "inverse_sqrt": lambda sgd: lr_scheduler.LambdaLR(
        sgd, lambda n: (WARMUP / (WARMUP + n)) ** 0.5
    ),
    "cosine": lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, N_STEPS - WARMUP, eta_min=1e-4),
    "constant": lambda sgd: lr_scheduler.ConstantLR(sgd, factor=1),
}


@mark.parametrize("schedule", ["inverse_sqrt", "cosine", "constant"])
def test_schedules_are_those_of_torch(schedule: str) -> None:
    final = ["optimizer.final_lr=1e-4"] if schedule == "cosine" else []
    settings = [f"optimizer.schedule={schedule}", f"optimizer.peak_lr={PEAK}", *final]
    settings += [f"optimizer.warmup_steps={WARMUP}", f"training.steps={N_STEPS}"]
    config = load_config("demo.yaml", settings).optimizer

    sgd = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    warmup = lr_scheduler.LinearLR(sgd, 1 / WARMUP, total_iters=WARMUP - 1)
    expected = []
    for _ in range(WARMUP - 1):  # updates 1, 2, ... of the warm-up
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        warmup.step()
    sgd.param_groups[0]["lr"] = PEAK
    scheduler = TORCHS_SCHEDULERS[schedule](sgd)
    for _ in range(WARMUP, N_STEPS + 1):
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()

    found = [learning_rate(step, 512, N_STEPS, config) for step in range(1, N_STEPS + 1)]
    assert found == approx(expected, rel=1e-9)


@mark.parametrize(
    "settings, expected",
    [
        (["schedule=cosine"], "schedule is cosine, which needs a peak_lr"),
        (["peak_lr=1e-3"], "peak_lr is 0.001, but schedule is paper"),
        (["schedule=constant", "peak_lr=1e-3", "scale=2"], "set scale to 1"),
        (["schedule=constant", "peak_lr=1e-3", "final_lr=1e-4"], "only cosine"),
        (["final_lr=1e-4"], "only cosine"),
        (["schedule=cosine", "peak_lr=1e-3", "final_lr=1e-2"], "more than the peak_lr"),
        (["schedule=cosine", "peak_lr=1e-3", "warmup_steps=100000"], "would never begin"),
        (["schedule=linear"], "is not one of paper, inverse_sqrt, cosine, constant"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: list[str], expected: str) -> None:
    with raises(UserError, match=expected):
        load_config("base.yaml", [f"optimizer.{setting}" for setting in settings])


def test_only_a_cosine_fixes_the_number_of_updates(toy: Path, capsys: Capture) -> None:
    def lengthen(optimizer: OptimizerConfig) -> list[str]:
        short = RunConfig(optimizer=optimizer, training=TrainingConfig(steps=9_000))
        return list_differences(short, RunConfig(optimizer=optimizer))

    assert lengthen(OptimizerConfig(schedule="constant", peak_lr=1e-3)) == []
    cosine = OptimizerConfig(schedule="cosine", peak_lr=1e-3)
    assert lengthen(cosine) == ["training.steps: 9000 -> 100000"]

    arguments = ["--config", str(toy), "optimizer.schedule=cosine", "optimizer.peak_lr=1e-3"]
    arguments += ["optimizer.warmup_steps=2", "evaluation.bleu=false"]
    succeed(main, *arguments, "training.steps=4")
    succeed(main, *arguments, "training.steps=4")
    assert "begin another run with training.init_from" in read_stderr(capsys)
    assert "training.steps: 4 -> 8" in refuse(capsys, main, *arguments, "training.steps=8")


def make_layers() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)
    )


def train_layers(layers: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Ten updates with gradients that do not depend on the weights, each of its own rate."""
    torch.manual_seed(2)
    for step in range(10):
        for parameter in layers.parameters():
            parameter.grad = torch.randn_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()


def assert_close(ours: torch.nn.Module, theirs: torch.nn.Module, tolerance: float) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_weight_decay_is_that_of_torchs_adamw() -> None:
    ours, theirs = make_layers(), make_layers()
    config = OptimizerConfig(weight_decay=0.3)
    optimizer = make_optimizer(ours, config)
    train_layers(ours, optimizer)

    embedding, linear, norm = theirs
    decaying = [embedding.weight, linear.weight]
    constant = [linear.bias, norm.weight, norm.bias]
    groups: list[Fields]
    groups = [{"params": decaying}, {"params": constant, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(
        groups, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.3, foreach=False
    )
    train_layers(theirs, reference)
    assert_close(ours, theirs, 1e-6)

    # an update whose gradients are NaN changes nothing
    before = [p.detach().clone() for p in ours.parameters()]
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))


def test_without_weight_decay_the_bits_are_those_of_torchs_adam() -> None:
    ours, theirs = make_layers(), make_layers()
    train_layers(ours, make_optimizer(ours, OptimizerConfig()))
    reference = torch.optim.Adam(theirs.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    train_layers(theirs, reference)
    assert_close(ours, theirs, 0.0)
