"""Norms of each layer's gradients and steps, against weights before and after the step."""

from pathlib import Path

import pytest
import torch
from support.finished_run import read_lines, train_toy
from torch import Tensor, nn

from nmt.config import OptimizerConfig
from nmt.train.norms_by_layer import NormsByLayer, name_layer
from nmt.train.optimizer import make_optimizer, set_learning_rate


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.embedding = nn.Embedding(5, 3)


@pytest.mark.parametrize("decay", [0.0, 0.7])
def test_steps_are_the_differences_of_weights(
    decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.train.norms_by_layer.STEP_CHUNK", 4)
    torch.manual_seed(0)
    model = Small().double()
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=decay))
    norms = NormsByLayer(model, optimizer)
    assert list(norms.layers) == ["encoder.0", "encoder.1", "embeddings"]
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        model.encoder[1].weight.grad = torch.zeros(3, 3).double()  # as if it were frozen
        set_learning_rate(optimizer, 0.01 / (step + 1))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = norms.measure_gradients()
        optimizer.step()
        steps = norms.measure_steps()
        moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
        torch.testing.assert_close(steps, squares(moved))
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(gradients, squares(found))


def squares(tensors: dict[str, Tensor]) -> Tensor:
    """Of the three layers, by plain sums."""
    sums = dict.fromkeys(("encoder.0", "encoder.1", "embeddings"), 0.0)
    for name, tensor in tensors.items():
        sums[name_layer(name)] += float((tensor**2).sum())
    return torch.tensor(list(sums.values())).double()


def test_layers_are_logged_with_each_line(toy: Path) -> None:
    settings = ["training.steps=8", "training.log_every=3", "training.clip_norm=0.01"]
    settings += ["evaluation.bleu=false", "training.freeze=[encoder]", "model.norm=pre"]
    config = train_toy(toy, *settings)
    lines = read_lines(config.folder, "layers")
    assert [line["step"] for line in lines] == [1, 3, 6, 8]
    parts = ("embeddings", "encoder.0", "encoder.1", "decoder.0", "decoder.1")
    for line, train in zip(lines, read_lines(config.folder, "train"), strict=True):
        for figure in ("grad_norm", "update_norm"):
            names = {f"{figure}/{part}" for part in (*parts, "encoder_norm", "decoder_norm")}
            assert names == {key for key in line if key.startswith(figure)}
            assert line[f"{figure}/encoder.1"] == line[f"{figure}/encoder_norm"] == 0
            assert line[f"{figure}/decoder.1"] > 0
        total = sum(line[key] ** 2 for key in line if key.startswith("grad_norm/")) ** 0.5
        assert total == pytest.approx(train["grad_norm"], rel=1e-4)  # before it is clipped
        assert train["memory_bytes"] > 1e6
