"""Weights, gradients and moments in shares over the ranks (FSDP2) against whole ones: the same run, the same folder."""


import pytest
import torch
from safetensors.torch import load_file
from soaking import Ground, lines, make_ground

from nmt.files import RunFolder

SHARD = "training.shard=true"
CALM = ("training.log_every=1", "optimizer.scale=0.05")  # at a rate of 0.05 rounding alone grows to 1e-3 in 24 updates


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return make_ground(tmp_path_factory.mktemp("shares"))


@pytest.fixture(scope="module")
def whole(ground: Ground) -> RunFolder:
    return ground.finish("whole", *CALM)


def tensors(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoints / "last/model.safetensors") | load_file(
        run.checkpoints / "last/optimizer.safetensors")


def check_close(run: RunFolder, whole: RunFolder) -> None:
    ours, theirs = tensors(run), tensors(whole)
    assert {name: value.shape for name, value in ours.items()} == {name: v.shape for name, v in theirs.items()}
    for name, value in ours.items():
        assert torch.linalg.vector_norm(value - theirs[name]) <= 1e-4 * torch.linalg.vector_norm(theirs[name]), name
    for line, other in zip(lines(run), lines(whole), strict=True):
        assert line["step"] == other["step"] and line["nll"] == pytest.approx(other["nll"], abs=3e-5)
        assert line.get("bleu") == other.get("bleu")  # the ranks decode with whole weights


def test_shares_train_like_one_process(ground: Ground, whole: RunFolder) -> None:
    check_close(ground.finish("shared", *CALM, SHARD, size=2), whole)


def test_a_run_continues_in_shares_and_without(ground: Ground, whole: RunFolder) -> None:
    ground.finish("mixed", *CALM, "training.steps=8")
    ground.finish("mixed", *CALM, SHARD, "training.steps=16", size=3)
    run = ground.finish("mixed", *CALM)
    ends = {8, 16} - {line["step"] for line in lines(whole) if line["kind"] == "valid"}
    assert not ends  # so that no extra validation is in the way of comparing all lines
    check_close(run, whole)


def test_shares_are_exact_when_continued(ground: Ground) -> None:
    straight = ground.finish("straight", *CALM, SHARD, "training.steps=12", size=2)
    ground.finish("stopped", *CALM, SHARD, "training.steps=4", size=2)
    stopped = ground.finish("stopped", *CALM, SHARD, "training.steps=12", size=2)
    a, b = tensors(straight), tensors(stopped)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_shares_are_not_compiled(ground: Ground) -> None:
    start = ground.start("both", SHARD, "training.compile=on")
    assert start.wait() == [2] and "training" in start.told() and "compile" in start.told()


def test_a_stop_and_a_validation_of_shares(ground: Ground, whole: RunFolder) -> None:
    """One micro-batch for each update and three ranks: two of them run blank ones, for all must take part."""
    run = ground.finish("blank", *CALM, SHARD, "training.micro_tokens=300", "training.steps=4", size=3)
    one = ground.finish("single", *CALM, "training.micro_tokens=300", "training.steps=4")
    check_close(run, one)
