"""Weights, gradients and moments in shares over the ranks (FSDP2) against whole ones: the same run,
the same folder.
"""

from pathlib import Path

import pytest
import torch
from support.finished_run import list_differing, read_tensors
from support.soaking import IS_SOAK, Ground, lines, make_ground
from support.two_ranks import run_on_two_ranks

from nmt.checkpoint import list_steps
from nmt.system.run_folder import RunFolder

SHARD = "training.shard=true"
# At a rate of 0.05 rounding alone grows to 1e-3 in 24 updates
CALM = ("training.log_every=1", "optimizer.scale=0.05")
EXTRAS = ("optimizer.weight_decay=0.5", "training.clip_norm=0.5", "training.ema=0.5")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return make_ground(tmp_path_factory.mktemp("shares"))


@pytest.fixture(scope="module")
def whole(ground: Ground) -> RunFolder:
    return ground.finish("whole", *CALM)


def tensors(run: RunFolder) -> dict[str, torch.Tensor]:
    return read_tensors(run.path, max(list_steps(run)))


def check_close(run: RunFolder, whole: RunFolder) -> None:
    ours, theirs = tensors(run), tensors(whole)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape
        assert (value - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name
    for line, other in zip(lines(run), lines(whole), strict=True):
        assert line["step"] == other["step"] and line["kind"] == other["kind"]
        for key, value in line.items():
            if key in ("loss", "nll"):
                assert value == pytest.approx(other[key], abs=3e-5)
            elif key.startswith(("grad_norm", "update_norm")):
                assert value == pytest.approx(other[key], rel=2e-3), key
        assert line.get("bleu") == other.get("bleu")  # the ranks decode with whole weights


def test_shares_train_like_one_process(ground: Ground, whole: RunFolder) -> None:
    check_close(ground.finish("shared", *CALM, SHARD, size=2), whole)


@pytest.mark.skipif(not IS_SOAK, reason="takes ten seconds: NMT_SOAK=1")
def test_a_run_continues_in_shares_and_without(ground: Ground, whole: RunFolder) -> None:
    ground.finish("mixed", *CALM, "training.steps=8")
    ground.finish("mixed", *CALM, SHARD, "training.steps=16", size=3)
    run = ground.finish("mixed", *CALM)
    ends = {8, 16} - {line["step"] for line in lines(whole) if line["kind"] == "valid"}
    assert not ends  # so that no extra validation is in the way of comparing all lines
    check_close(run, whole)


@pytest.mark.skipif(not IS_SOAK, reason="takes ten seconds: NMT_SOAK=1")
def test_shares_are_exact_when_continued(ground: Ground) -> None:
    settings = (*CALM, *EXTRAS, SHARD)
    straight = ground.finish("straight", *settings, "training.steps=12", size=2)
    ground.finish("stopped", *settings, "training.steps=4", size=2)
    stopped = ground.finish("stopped", *settings, "training.steps=12", size=2)
    assert list_differing(tensors(straight), tensors(stopped)) == []


def test_shares_are_not_compiled(ground: Ground) -> None:
    start = ground.start("both", SHARD, "training.compile=on")
    assert start.wait() == [2] and "training" in start.told() and "compile" in start.told()


@pytest.mark.skipif(not IS_SOAK, reason="takes ten seconds: NMT_SOAK=1")
def test_a_stop_and_a_validation_of_shares(ground: Ground, whole: RunFolder) -> None:
    """One micro-batch for each update and three ranks: two of them run blank ones, for all must
    take part.
    """
    settings = (*CALM, *EXTRAS, "training.micro_tokens=300", "training.steps=4")
    run = ground.finish("blank", *settings, SHARD, size=3)
    one = ground.finish("single", *settings)
    check_close(run, one)


BETWEEN_MICRO_BATCHES = """
    import sys
    sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]

    import torch
    from test_fast_paths import POST, batch_of, draw, make

    from nmt.system.ranks import join_world
    from nmt.train.loss import Objective
    from nmt.train.replica import Replica

    with join_world("cpu") as world:
        replica = Replica(Objective(make(POST), 0.1), world, False, None, is_sharded=True)
        replica.run(batch_of(draw(world.rank)), 0.01, 0)
        whole = shares = 0
        for module in replica.objective.modules():
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            groups = state._fsdp_param_groups if state else []
            for one in (p for group in groups for p in group.fsdp_params):
                shares += one.sharded_param.grad.to_local().numel()
                kept = [one.unsharded_accumulated_grad, getattr(getattr(one, "_unsharded_param", None), "grad", None)]
                whole += sum(grad.numel() for grad in kept if grad is not None)
        n_parameters = sum(p.numel() for p in make(POST).parameters())
        print(f"whole {whole}, shares {shares}, model {n_parameters}")
"""


def test_no_rank_holds_whole_gradients_between_micro_batches(tmp_path: Path) -> None:
    done = run_on_two_ranks(
        BETWEEN_MICRO_BATCHES, tmp_path / "shares.py", str(Path(__file__).parent)
    )
    assert done.codes == [0, 0], done.stderr[-3000:]
    found = [line for line in done.stdout.splitlines() if line.startswith("whole")]
    assert len(found) == 2
    for line in found:
        whole, shares, model = (int(part.split()[1]) for part in line.split(", "))
        assert whole == 0
        assert 0.4 * model < shares < 0.6 * model
