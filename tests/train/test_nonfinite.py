"""NaN and infinite losses, gradients and weights, really injected: no update is applied, all ranks
agree, and the sentences are named. After a skipped update the weights are those before it, bit for
bit.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch, approx, fixture, mark
from support.capture import Capture, read_errors
from support.finished_run import list_differing, read_lines, read_losses, read_tensors
from support.forks import run_on_ranks
from support.in_process import succeed
from support.text_lines import read_text_lines

import nmt.train.update
from nmt.commands.train import main
from nmt.system.files import read_json
from nmt.train.replica import Replica, forward_backward

Poison = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
Inject = Callable[[Poison, set[int]], None]


def poison_loss(_: torch.nn.Module, sums: torch.Tensor) -> torch.Tensor:
    return sums * math.nan


def poison_gradient(objective: torch.nn.Module, sums: torch.Tensor) -> torch.Tensor:
    grad = list(objective.parameters())[-1].grad
    assert grad is not None
    grad.view(-1)[0] = math.inf
    return sums


def poison_weight(objective: torch.nn.Module, sums: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        list(objective.parameters())[0].view(-1)[-1] = math.nan
    return sums * math.nan  # as it is once the weight is used


@fixture
def inject(monkeypatch: MonkeyPatch) -> Inject:
    """Poison the first micro-batch of those updates, counted from the start of the process."""

    def arm(poison: Poison, at: set[int]) -> None:
        run_update, run, step = nmt.train.update.run_update, Replica.run, [0, 0]

        def counted(*args: Any) -> Any:
            step[0], step[1] = args[3], 0
            return run_update(*args)

        def poisoned(replica: Replica, *args: Any) -> torch.Tensor:
            sums = run(replica, *args)
            step[1] += 1
            return poison(replica.objective, sums) if step[0] in at and step[1] == 1 else sums

        monkeypatch.setattr("nmt.train.loop.run_update", counted)
        monkeypatch.setattr(Replica, "run", poisoned)

    return arm


@mark.parametrize(
    "settings, at, advice",
    [
        ((), 3, "no checkpoint yet: start over in another out=DIR with a lower optimizer.scale"),
        (("training.checkpoint_every=2",), 4, "the last checkpoint is intact: continue from it"),
        # nothing was computed yet with the weights of update 2
        (("training.checkpoint_every=2",), 3, "the last checkpoint may be no better"),
        # finite weights, but worse than any guess
        (
            ("training.checkpoint_every=2", "optimizer.scale=100", "optimizer.warmup_steps=1"),
            5,
            "the last checkpoint may be no better",
        ),
    ],
)
def test_only_a_checkpoint_that_is_seen_to_work_is_called_intact(
    settings: tuple[str, ...],
    at: int,
    advice: str,
    toy: Path,
    inject: Inject,
    capsys: Capture,
) -> None:
    inject(poison_loss, {at})
    assert main(["--config", str(toy), *settings]) == 1
    assert f"update {at} was not applied" in (last := read_errors(capsys)[-1])
    assert advice in last


@mark.parametrize("size", [1, 2])
def test_a_gradient_of_zero_ends_a_new_run_and_is_named(
    size: int, toy: Path, tmp_path: Path
) -> None:
    """One weight's, on all ranks; those of frozen weights, and of updates of few tokens, may be zero."""
    program = """
        import sys
        import torch
        from nmt.commands.train import main
        from nmt.train.replica import Replica
        run = Replica.run
        def poisoned(self, *args):
            sums = run(self, *args)
            parameters = dict(self.objective.model.named_parameters())
            for name in sys.argv[1].split(","):
                parameters[name].grad.zero_()
            return sums
        Replica.run = poisoned
        sys.exit(main(sys.argv[2:]))
    """
    weight = "encoder.0.feed_forward.outer.weight"
    options = ["--config", str(toy), "training.steps=2"]
    ended = run_on_ranks(size, program, tmp_path / "poisoned.py", weight, *options)
    assert ended.codes == [1] * size
    assert f"the gradients of {weight} are zero, so it learns nothing" in ended.told()
    small = ("training.src_tokens=60", "training.tgt_tokens=60")
    frozen = ("training.freeze=[encoder]",)
    for number, settings in enumerate((small, frozen)):
        out = f"out={tmp_path}/{number}"
        ended = run_on_ranks(size, program, tmp_path / "ends.py", weight, *options, *settings, out)
        assert ended.codes == [0] * size, ended.told()


@mark.parametrize("poison", [poison_loss, poison_gradient])
def test_a_poisoned_update_stops_the_run_and_is_named(
    poison: Poison,
    toy: Path,
    tmp_path: Path,
    inject: Inject,
    capsys: Capture,
) -> None:
    options = ["--config", str(toy), "training.checkpoint_every=1", "training.steps=10"]
    inject(poison, at := {7})
    assert main(options) == 1
    last = read_errors(capsys)[-1]
    dump = tmp_path / "run" / "nonfinite-0000007.json"
    assert "update 7 was not applied" in last and str(dump) in last and "on_nonfinite=skip" in last
    assert read_json(tmp_path / "run" / "status.json")["state"] == "failed"
    assert not (tmp_path / "run" / "checkpoints" / "step-0000007").exists()

    # only the text of the poisoned micro-batch is written
    first, *others = read_json(dump)["micro_batches"]
    assert others and not any("texts" in micro for micro in others)
    assert ("texts" in first) == isinstance(first["loss"], str) == (poison is poison_loss)
    if poison is poison_loss:
        corpus = tmp_path / "corpus"
        lines = [read_text_lines(corpus / f"train.{side}") for side in ("en", "de")]
        pairs = set(zip(*lines, strict=True))
        assert len(first["texts"]) == len(first["pairs"])
        assert {tuple(texts) for texts in first["texts"]} <= pairs

    at.clear()  # it was a fault of the machine: the same command ends in the undisturbed bits
    assert main(options) == 0
    succeed(main, *options, f"out={tmp_path}/straight")
    runs = [read_tensors(tmp_path / name, 10) for name in ("run", "straight")]
    assert list_differing(*runs) == []


def test_gradients_of_zero_end_the_run(
    toy: Path, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    """As code did that torch 2.11 compiled, while its losses were right."""
    monkeypatch.setattr(
        "nmt.train.replica.forward_backward",
        lambda objective, batch, _, is_bf16: forward_backward(objective, batch, 0.0, is_bf16),
    )
    assert main(["--config", str(toy)]) == 1
    assert "all gradients are zero" in read_errors(capsys)[-1]


@mark.parametrize("poison", [poison_loss, poison_gradient])
def test_a_skipped_update_changes_no_bit(
    poison: Poison, toy: Path, tmp_path: Path, inject: Inject
) -> None:
    inject(poison, {5, 6, 7})
    settings = ["training.steps=9", "training.checkpoint_every=1", "training.on_nonfinite=skip"]
    succeed(main, "--config", toy, *settings)
    run = tmp_path / "run"
    before = read_tensors(run, 4)
    for step in (5, 6, 7):
        assert list_differing(before, read_tensors(run, step)) == []
    assert list_differing(before, read_tensors(run, 8))
    assert [line["step"] for line in read_lines(run, "skipped")] == [5, 6, 7]
    # A line for each update, but for those that were not applied
    logged = [line["step"] for line in read_lines(run, "train")]
    assert logged == [1, 2, 3, 4, 8, 9]
    assert sorted(path.name for path in run.glob("nonfinite-*")) == [
        f"nonfinite-000000{k}.json" for k in (5, 6, 7)
    ]


def test_the_fourth_in_a_row_stops(
    toy: Path,
    inject: Inject,
    capsys: Capture,
) -> None:
    inject(poison_gradient, {3, 4, 5, 6, 9})
    assert (
        main(["--config", str(toy), "training.on_nonfinite=skip", "training.checkpoint_every=5"])
        == 1
    )
    assert "update 6 was not applied" in read_errors(capsys)[-1]
    # The count goes on after update 5
    assert main(["--config", str(toy), "training.on_nonfinite=skip"]) == 1
    assert "update 6 was not applied" in read_errors(capsys)[-1]


def test_a_nan_weight_never_reaches_a_checkpoint(
    toy: Path,
    tmp_path: Path,
    inject: Inject,
    capsys: Capture,
) -> None:
    inject(poison_weight, {6})
    options = ["--config", str(toy), "training.checkpoint_every=1", "training.on_nonfinite=skip"]
    assert main(options) == 1
    last = read_errors(capsys)[-1]
    assert "update 9 was not applied" in last and "src_embedding" in last or "tgt_embedding" in last
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert steps[-1] == 5
    assert all(value.isfinite().all() for value in read_tensors(tmp_path / "run", 5).values())


SCRIPT = """
    import math, os, sys
    from nmt.commands.train import main
    from nmt.train.replica import Replica

    run, sum_gradients, rank, updates = Replica.run, Replica.sum_gradients, int(os.environ["RANK"]), [0]

    def poisoned_run(replica, *args):
        sums = run(replica, *args)
        is_poisoned = rank == 1 and updates[0] == 3 and sys.argv[1] == "loss"
        return sums * math.inf if is_poisoned else sums

    def poisoned_sum(replica):
        updates[0] += 1
        if rank == 1 and updates[0] == 4 and sys.argv[1] == "gradient":
            list(replica.own.values())[0].weight.grad.view(-1)[3] = math.nan
        sum_gradients(replica)

    Replica.run, Replica.sum_gradients = poisoned_run, poisoned_sum
    sys.exit(main(sys.argv[2:]))
"""


@mark.parametrize("where, rule", [("loss", "stop"), ("gradient", "skip")])
def test_all_ranks_reject_what_one_rank_finds(
    where: str,
    rule: str,
    toy: Path,
    tmp_path: Path,
    inject: Inject,
) -> None:
    run_five_updates = [
        "--config",
        str(toy),
        "training.steps=5",
        "training.checkpoint_every=1",
        f"training.on_nonfinite={rule}",
    ]
    done = run_on_ranks(2, SCRIPT, tmp_path / "poisoned.py", where, *run_five_updates)
    run = tmp_path / "run"
    assert "nmt/train/" not in done.told(), done.told()  # no traceback of ours
    assert done.told().count("update 4 was not applied") == 1
    found = read_json(run / "nonfinite-0000004.json")
    assert any(isinstance(micro["loss"], str) for micro in found["micro_batches"]) == (
        where == "loss"
    )
    if rule == "stop":
        assert done.codes == [1, 1] and not (run / "checkpoints" / "step-0000004").exists()
        return
    assert done.codes == [0, 0], done.told()
    assert list_differing(read_tensors(run, 3), read_tensors(run, 4)) == []
    assert list_differing(read_tensors(run, 4), read_tensors(run, 5))
    # had one rank gone on with other weights than the other, the losses would not be those of one
    # process that skips
    both = read_losses(run)
    assert sorted(both) == [1, 2, 3, 5]
    inject(poison_gradient, {4})
    succeed(main, *run_five_updates, f"out={tmp_path}/one")
    assert read_losses(tmp_path / "one") == approx(both, abs=3e-5)
