"""What `make gpu` will say on a first GPU, tried where there is none: its rehearsal, and that each
check can fail.

A check that cannot fail proves nothing. So wrong results are put in the place of right ones, one
fault at a time, and the check that looks for it must name it. Nothing here depends on how long
anything takes. `make test` rehearses the quick checks; `make gpu-dry` rehearses all of them.
"""

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nmt.data.plan import plan_epoch
from nmt.engines.cuda.recorded_replica import RecordedReplica
from nmt.system.ranks import World
from nmt.train import update

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "first_gpu.py"
sys.path.insert(0, str(SCRIPT.parent))

import first_gpu  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_speed  # noqa: E402
from first_gpu import BY_NAME, CHECKS, CRASHED, LEFT_OUT, Check, ProcessFailure  # noqa: E402
from gpu_checks import Bench, Sheet  # noqa: E402

IS_DRY_RUN = os.environ.get("NMT_GPU_DRY") == "1"
QUICK = ("dtypes",)
NAN = float("nan")
Patch = pytest.MonkeyPatch


def run_script(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **paths, **(environment or {})},
    )


def perform_here(check: Check, is_rehearsal: bool) -> dict[str, Any]:
    """Carry out a check in this process, where faults can be put in."""
    bench = gpu_checks.make_bench(is_rehearsal=True)
    return gpu_checks.perform(pkgutil.resolve_name(check.function), bench)


@pytest.fixture
def bench() -> Bench:
    return gpu_checks.make_bench(is_rehearsal=True)


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_rehearsal_passes_and_its_page_and_json_agree(tmp_path: Path) -> None:
    chosen = [name for name in BY_NAME if IS_DRY_RUN or name in QUICK]
    done = run_script("--rehearse", "--only", *chosen, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [check["name"] for check in found["checks"]] == chosen
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert set(verdicts.values()) == {"passed"}
    assert found["is_good"] and found["is_rehearsal"]
    assert first_gpu.REHEARSED in done.stdout and done.stdout.startswith("## Rehearsal on a CPU\n")
    for check in found["checks"]:
        assert (
            f"| {check['name']} | {check['verdict']} | {check['seconds']:.1f} | {check['reason']} |"
            in done.stdout
        )
        for row in check["rows"]:
            assert f"| {row['what']} | {row['found']} | {row['asked']} | yes |" in done.stdout
        for one in check["tables"]:
            assert all(f"| {' | '.join(cells)} |" in done.stdout for cells in one["rows"])
    assert f"[1/{len(chosen)}] {chosen[0]}: passed in" in done.stderr


def test_every_check_has_a_function_and_a_budget() -> None:
    for check in CHECKS:
        assert callable(pkgutil.resolve_name(check.function)) and check.budget_s > 0
    first_of_speed = [check.is_speed for check in CHECKS].index(True)
    assert all(check.is_speed for check in CHECKS[first_of_speed:])


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = gpu_checks.describe_machine(gpu_checks.make_bench(is_rehearsal=True))
    monkeypatch.setattr(first_gpu, "ask_worker", lambda *given: machine | {"n_gpus": 0})
    assert first_gpu.main([]) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert told.out == "" and line.startswith("first_gpu: error: no GPU that torch can use")


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_check_that_raises_is_reported_and_others_still_run(
    monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Bench, sheet: Sheet) -> None:
        sheet.require("before the end", 1, 1)
        so_far = json.loads(file.read_text())  # what a run leaves that is cut short now
        assert [check["name"] for check in so_far["checks"]] == ["environment", "micro-batch"]
        raise ValueError("the wrong | number\nand more")

    file = tmp_path / "found.json"
    monkeypatch.setattr(gpu_checks, "check_dtypes", broken)
    code = first_gpu.main(
        ["--rehearse", "--only", "environment", "micro-batch", "dtypes", "--json", str(file)],
        perform_here,
    )
    page, found = capsys.readouterr().out, json.loads(file.read_text())
    assert page.index("| before the end |") < page.index("### Verdicts")
    assert code == 1 and not found["is_good"]
    assert [check["verdict"] for check in found["checks"]] == ["passed", "passed", "crashed"]
    assert found["checks"][2]["reason"] == "ValueError: the wrong | number"
    assert "| dtypes | crashed |" in page and r"ValueError: the wrong \| number |" in page
    assert "| before the end | 1 | 1 | yes |" in page


@pytest.mark.parametrize(
    ("program", "seconds", "reason"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            60.0,
            "its process ended by SIGSEGV",
        ),
        ("raise SystemExit(3)", 60.0, "its process ended with exit code 3"),
        ("import time; time.sleep(1000)", 0.5, "no answer within 0 s"),
    ],
)
def test_a_process_that_dies_or_hangs_is_named(program: str, seconds: float, reason: str) -> None:
    with pytest.raises(ProcessFailure, match=reason):
        first_gpu.ask([sys.executable, "-c", program], dict(os.environ), seconds)


def test_a_process_that_fails_costs_its_check_alone(monkeypatch: Patch) -> None:
    def fail(name: str, *given: Any) -> dict[str, Any]:
        if name == "micro-batch":
            raise ProcessFailure("no answer within 60 s")
        return {"verdict": "passed", "reason": ""}

    monkeypatch.setattr(first_gpu, "ask_worker", fail)
    results = list(first_gpu.run_checks(CHECKS[:4], first_gpu.perform_apart, is_rehearsal=True))
    assert [result["verdict"] for result in results] == ["passed", "passed", CRASHED, "passed"]


def test_no_speed_check_begins_after_ten_minutes() -> None:
    minutes = count(0.0, 25.0)  # each look at the clock is 25 s later
    results = list(
        first_gpu.run_checks(
            CHECKS, lambda *given: {"verdict": "passed", "reason": ""}, True, lambda: next(minutes)
        )
    )
    verdicts = {result["name"]: result["verdict"] for result in results}
    assert verdicts["continuation"] == verdicts["base"] == "passed"
    assert verdicts["big-ranks"] == LEFT_OUT and "--only big-ranks" in results[-1]["reason"]


@pytest.mark.parametrize("size", ["base", "big"])
def test_updates_that_are_timed_are_one_full_micro_batch_as_in_training(size: str) -> None:
    """With the shape for random updates, those of short sentences would be cut into two halves."""
    recipe = gpu_speed.make_recipe(gpu_checks.make_bench(is_rehearsal=False), size)
    store = gpu_checks.make_store(recipe.n_pairs, recipe.n_vocab, recipe.longest)
    training, seed = recipe.config.training, recipe.config.seed
    gpu = World(0, 1, torch.device("cuda", 0))
    shape = gpu_speed.shape_of(recipe, training.tgt_tokens, store, gpu)
    assert shape is not None
    lengths = store.src.lengths, store.tgt.lengths
    for epoch in range(2):
        plan = plan_epoch(*lengths, seed, epoch, training, training.tgt_tokens, shape)
        assert {len(plan.micros(number)) for number in range(len(plan))} == {1}


# ---- each check can fail -----------------------------------------------------------------------------------------


def failures(bench: Bench, name: str) -> list[str]:
    """What a check says does not hold."""
    answer = gpu_checks.perform(pkgutil.resolve_name(BY_NAME[name].function), bench)
    assert answer["verdict"] in ("passed", "failed"), answer["reason"]
    bad = [row["what"] for row in answer["rows"] if not row["holds"]]
    assert bool(bad) == (answer["verdict"] == "failed")
    return bad


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.0005


def wrong_gradient(compute_sums: Any) -> Any:
    def wrong(self: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        loss, nll = compute_sums(self, *given)
        return WrongGradient.apply(loss), nll

    return wrong


def one_nan(gradients_of: Any) -> Any:
    def wrong(replica: RecordedReplica) -> dict[str, Tensor]:
        found: dict[str, Tensor] = gradients_of(replica)
        if replica.compiled is not None:
            found["model.encoder.0.feed_forward.inner.bias"][3] = NAN
        return found

    return wrong


def forgetful(run: Any) -> Any:
    def wrong(self: RecordedReplica, *given: Any) -> Any:
        sums = run(self, *given)
        if self.compiled is not None:
            self.clear_gradients()
        return sums

    return wrong


def seeded(run: Any, seeds: Iterator[int]) -> Any:
    return lambda self, batch, scale, seed, *parts: run(self, batch, scale, next(seeds), *parts)


class Fault(NamedTuple):
    check: str
    place: str  # of a function, which is replaced
    make_wrong: Callable[[Any], Any]
    named: list[str]  # by the check
    is_all: bool = False  # and nothing else


RUN = "nmt.engines.cuda.recorded_replica.RecordedReplica.run"
FAULTS = {
    "gradient of the model": Fault(
        "micro-batch",
        "nmt.engines.cuda.recorded_replica._compute_sums",
        wrong_gradient,
        ["compiled, fp32: all gradients"],
    ),
    "one gradient is NaN": Fault(
        "micro-batch",
        "gpu_checks.gradients_of",
        one_nan,
        [
            "compiled, fp32: worst, model.encoder.0.feed_forward.inner.bias",
            "compiled, bf16: all gradients",
        ],
    ),
    "norms in fp32": Fault(
        "dtypes",
        "nmt.model.transformer.LayerNorm.forward",
        lambda forward: lambda self, x: forward(self, x).float(),
        ["what norms return"],
    ),
    "updates": Fault(
        "updates",
        RUN,
        forgetful,
        [
            "fp32: largest difference of a token's loss",
            "bf16, dropout 0.1: last loss over first, the same pairs",
        ],
    ),
    "dropout ignores its seed": Fault(
        "graph",
        RUN,
        lambda run: seeded(run, repeat(0)),
        ["dropout, another seed: the same sums"],
        is_all=True,
    ),
    "dropout does not follow its seed": Fault(
        "graph",
        RUN,
        lambda run: seeded(run, count(5)),
        [
            "dropout, the same seed twice: the same sums",
            "dropout, a graph recorded anew: error of gradients",
        ],
    ),
    "many shapes": Fault(
        "compilations",
        "gpu_checks.make_batch",
        lambda make_batch: lambda store, ids, shape: make_batch(store, ids),
        ["sentences of 1 to 40 pieces: one shape"],
    ),
    "losses are NaN": Fault(
        "base",
        RUN,
        lambda run: lambda *given: torch.full((2,), NAN),
        ["all losses are finite"],
        is_all=True,
    ),
}
SLOW_FAULTS = {
    "compiled anew for other lengths": Fault(
        "compilations",
        "gpu_checks.n_graphs",
        lambda n_graphs: count().__next__,
        ["compilations after the first of 20 micro-batches"],
        is_all=True,
    ),
    "short translations": Fault(
        "decoding",
        "gpu_speed.decode",
        lambda decode: lambda *given: [ids[:4] for ids in decode(*given)],
        ["translations of 5 pieces"],
        is_all=True,
    ),
}


@pytest.mark.parametrize("fault", FAULTS | SLOW_FAULTS if IS_DRY_RUN else FAULTS)
def test_a_fault_is_named(fault: str, bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("nmt.extras.profile.cost.MEASURED_S", 0.0)
    monkeypatch.setattr(gpu_speed, "measure_ceiling", lambda *given: 1e12)
    check, place, make_wrong, named, is_all = (FAULTS | SLOW_FAULTS)[fault]
    right = pkgutil.resolve_name(place)
    monkeypatch.setattr(place, make_wrong(right))
    bad = failures(bench, check)
    assert set(named) <= set(bad)
    assert not is_all or bad == named


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("none", []),
        ("loss", ["losses of each, with dropout"]),
        ("gradient", ["gradients summed over ranks"]),
        ("bits", ["they repeat bit by bit"]),
        ("weight", ["weights after a step of Adam on shares"]),
        ("models", ["models that the ranks then have"]),
        ("missing", ["micro-batches"]),
        ("slow", ["a rank fails: seconds until all have ended"]),
        ("deaf", ["a rank fails: the exit code tells"]),
        ("survivor", ["a rank fails: ranks that went on"]),
    ],
)
def test_what_ranks_do_wrong_is_named(
    fault: str, named: list[str], bench: Bench, monkeypatch: Patch
) -> None:
    """Instead of two processes: what two would write."""

    def run_ranks(bench: Bench, folder: Path, seconds: float) -> int:
        alone = gpu_checks.run_one_update(bench, bench.world)
        sums = alone.sums
        if fault == "loss":
            sums["0"][0] *= 1.001
        tensors = {"gradients": alone.gradients, "weights": alone.weights}
        if fault in ("gradient", "weight"):
            tensors[f"{fault}s"] = tensors[f"{fault}s"] * 0.999
        save_file(tensors, folder / "found.safetensors")
        for rank in range(2):
            (folder / f"weights-{rank}").write_text(str(rank if fault == "models" else 0))
            facts = {"repeats": fault != "bits", "is_recorded": True}
            (folder / f"facts-{rank}.json").write_text(json.dumps(facts))
        if fault == "missing":
            sums["7"] = sums["0"]
        (folder / "sums-0.json").write_text(json.dumps(sums))
        (folder / "sums-1.json").write_text("{}")
        (folder / "failed").write_text("0" if fault == "slow" else "1e12")
        if fault == "survivor":
            (folder / "survived-0").touch()
        return 0 if fault == "deaf" else 1

    monkeypatch.setattr(gpu_checks, "run_ranks", run_ranks)
    assert failures(bench, "ranks")[:1] == named


def test_ranks_that_never_finish_are_named(bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpu_checks, "run_ranks", lambda bench, folder, seconds: 1)
    answer = gpu_checks.perform(gpu_checks.check_ranks, bench)
    assert (
        answer["verdict"] == CRASHED
        and "did not finish an update (exit code 1)" in answer["reason"]
    )


def test_a_run_that_does_not_continue_to_the_bit_is_named(bench: Bench, monkeypatch: Patch) -> None:
    seeds = count()
    monkeypatch.setattr(update, "dropout_seed", lambda *given: next(seeds))
    bad = failures(bench, "continuation")
    assert len(bad) == 1 and bad[0].startswith("tensors with other bits, of ")
