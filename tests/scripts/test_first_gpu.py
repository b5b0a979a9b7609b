"""What `make gpu` will say on a first GPU, tried where there is none: its rehearsal, and that each
check can fail.

A check that cannot fail proves nothing. So wrong results are put in the place of right ones, one
fault at a time, and the check that looks for it must name it. Nothing here depends on how long
anything takes. `make test` rehearses the quick checks; `make gpu-dry` rehearses all of them, and
interprets the kernels.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nmt.model.transformer import LayerNorm
from nmt.train import parallel, update
from nmt.train.parallel import Replica

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "first_gpu.py"
sys.path.insert(0, str(SCRIPT.parent))

import first_gpu  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_speed  # noqa: E402
from first_gpu import CHECKS, CRASHED, LEFT_OUT, NAMES, Check, Worker, WorkerGone  # noqa: E402
from gpu_checks import Bench, Sheet  # noqa: E402

IS_DRY_RUN = os.environ.get("NMT_GPU_DRY") == "1"
needs_dry_run = pytest.mark.skipif(not IS_DRY_RUN, reason="NMT_GPU_DRY=1 (make gpu-dry)")
QUICK = ("environment", "dtypes")
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
        timeout=280,
    )


class InThisProcess:
    """Carries out checks here, where faults can be put in."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.machine = gpu_checks.describe_machine(bench)
        self.functions = first_gpu.check_functions()

    def perform(self, check: Check) -> dict[str, Any]:
        return gpu_checks.perform(self.functions[check.name], self.bench)

    def close(self) -> None:
        pass


@pytest.fixture
def bench() -> Bench:
    return gpu_checks.make_bench(is_rehearsal=True)


def start_here(check: Check, is_rehearsal: bool) -> InThisProcess:
    return InThisProcess(gpu_checks.make_bench(is_rehearsal=True))


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_the_rehearsal_passes_and_its_page_and_json_agree(tmp_path: Path) -> None:
    chosen = [name for name in NAMES if IS_DRY_RUN or name in QUICK]
    done = run_script("--rehearse", "--only", *chosen, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.stdout == first_gpu.page(found)
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
    assert f"[1/{len(chosen)}] environment: passed in" in done.stderr


@needs_dry_run
def test_the_kernels_are_interpreted_where_that_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = run_script(
        "--rehearse", "--only", "attention", "loss", environment={"TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "| triton, causal, window 5, heads 2 x 16, fp32: values |" in done.stdout
    assert "| rows, 50 x 300, fp32: gradient |" in done.stdout


def test_every_check_has_a_function_and_a_budget() -> None:
    assert first_gpu.check_functions().keys() == set(NAMES)
    assert all(check.budget_s > 0 for check in CHECKS)
    first_of_speed = [check.is_speed for check in CHECKS].index(True)
    assert all(check.is_speed for check in CHECKS[first_of_speed:])


@pytest.mark.parametrize("asked", ["--help", "--list"])
def test_it_tells_about_itself_without_torch(asked: str) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import first_gpu
try:
    first_gpu.main([{asked!r}])
finally:
    assert not {{"torch", "numpy"}} & sys.modules.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "first_gpu.py --only attention" in done.stdout or all(
        name in done.stdout for name in NAMES
    )


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def start(check: Check, is_rehearsal: bool) -> InThisProcess:
        worker = start_here(check, is_rehearsal)
        worker.machine["n_gpus"] = 0
        return worker

    assert first_gpu.main([], start) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert told.out == "" and line.startswith("first_gpu: error: no GPU that torch can use")


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_check_that_raises_is_reported_and_others_still_run(
    monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Bench, sheet: Sheet) -> None:
        sheet.require("before the end", 1, 1)
        sheet.figures["odd"] = [NAN, {"inner": float("inf")}]
        raise ValueError("the wrong | number\nand more")

    monkeypatch.setitem(gpu_checks.FUNCTIONS, "dtypes", broken)
    file = tmp_path / "found.json"
    code = first_gpu.main(
        ["--rehearse", "--only", "environment", "dtypes", "loss", "--json", str(file)], start_here
    )
    page, found = capsys.readouterr().out, json.loads(file.read_text())
    assert code == 1 and not found["is_good"]
    assert [check["verdict"] for check in found["checks"]] == ["passed", "passed", "crashed"]
    assert found["checks"][2]["reason"] == "ValueError: the wrong | number"
    assert found["checks"][2]["figures"] == {"odd": ["nan", {"inner": "inf"}]}
    assert "| dtypes | **crashed** |" in page and "ValueError: the wrong / number |" in page
    assert "| before the end | 1 | 1 | yes |" in page


DIES = "import os, signal; print('{}', flush=True); input(); os.kill(os.getpid(), signal.SIGSEGV)"
LEAVES = "print('{}', flush=True); input(); raise SystemExit(3)"
HANGS = "print('{}', flush=True); import time; time.sleep(1000)"
ANSWERS = 'print(\'{}\', flush=True); input(); print(\'{"verdict": "passed", "reason": ""}\', flush=True); input()'


def test_a_process_that_dies_or_hangs_is_replaced() -> None:
    programs = iter([LEAVES, HANGS, ANSWERS])
    checks = [
        Check(name, name, 60 if name != "hangs" else 0.5)
        for name in ("dies", "leaves", "hangs", "answers")
    ]

    def start(check: Check, is_rehearsal: bool) -> Worker:
        return Worker([sys.executable, "-c", next(programs)], dict(os.environ))

    first = Worker([sys.executable, "-c", DIES], dict(os.environ))
    results = list(first_gpu.run_checks(checks, first, start, is_rehearsal=True))
    assert [result["verdict"] for result in results] == [CRASHED, CRASHED, CRASHED, "passed"]
    assert [result["reason"] for result in results] == [
        "its process ended by SIGSEGV",
        "its process ended with exit code 3",
        "no answer within 0 s",
        "",
    ]
    assert not first_gpu.is_good(results)


def test_a_process_that_cannot_start_costs_its_check_alone() -> None:
    def start(check: Check, is_rehearsal: bool) -> Worker:
        raise WorkerGone("its process ended with exit code 1")

    first = Worker([sys.executable, "-c", DIES], dict(os.environ))
    checks = [Check(name, name, 60) for name in ("one", "two", "three")]
    results = list(first_gpu.run_checks(checks, first, start, is_rehearsal=True))
    assert [result["verdict"] for result in results] == [CRASHED] * 3


def test_no_speed_check_begins_after_ten_minutes(bench: Bench, monkeypatch: Patch) -> None:
    functions = {name: (lambda bench, sheet: None) for name in NAMES}
    monkeypatch.setattr(first_gpu, "check_functions", lambda: functions)
    minutes = count(0.0, 25.0)  # each look at the clock is 25 s later
    results = list(
        first_gpu.run_checks(CHECKS, InThisProcess(bench), start_here, True, lambda: next(minutes))
    )
    verdicts = {result["name"]: result["verdict"] for result in results}
    assert verdicts["continuation"] == verdicts["base"] == "passed"
    assert verdicts["big-ranks"] == LEFT_OUT and "--only big-ranks" in results[-1]["reason"]
    assert first_gpu.is_good(results)


# ---- each check can fail -----------------------------------------------------------------------------------------


def failures(bench: Bench, name: str) -> list[str]:
    """What a check says does not hold."""
    answer = gpu_checks.perform(first_gpu.check_functions()[name], bench)
    assert answer["verdict"] in ("passed", "failed"), answer["reason"]
    bad = [row["what"] for row in answer["rows"] if not row["holds"]]
    assert bool(bad) == (answer["verdict"] == "failed")
    return bad


def scaled(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    """The function, with the result a little wrong, or NaN."""

    def wrong(*given: Any) -> Any:
        result = function(*given)
        return tuple(x * by for x in result) if isinstance(result, tuple) else result * by

    return wrong


@pytest.mark.parametrize("by", [1.02, NAN])
def test_wrong_attention_is_named(by: float, bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpu_checks, "attend", scaled(gpu_checks.attend, by))
    bad = failures(bench, "attention")
    assert "plain, causal, window 5, heads 2 x 16, fp32: values" in bad
    assert "plain, memory, values of 20, heads 1 x 12, bf16: worst gradient" in bad


def test_a_causal_mask_that_is_missing_is_named(bench: Bench, monkeypatch: Patch) -> None:
    mask = gpu_checks.AttentionMask
    monkeypatch.setattr(
        gpu_checks,
        "AttentionMask",
        lambda queries, keys, causal, window: mask(queries, keys, False, window),
    )
    assert "plain, causal, window 5, heads 2 x 16, fp32: values" in failures(bench, "attention")


def test_attention_whose_bits_change_is_named(bench: Bench, monkeypatch: Patch) -> None:
    calls, attend = count(1), gpu_checks.attend
    n_compared = 2 * len(gpu_checks.TINY_CASES)
    monkeypatch.setattr(
        gpu_checks, "attend", lambda *given: attend(*given) * max(1, next(calls) - n_compared)
    )
    assert failures(bench, "attention") == ["plain: three passes give the same bits"]


@pytest.mark.parametrize("by", [1.02, NAN])
def test_a_wrong_loss_is_named(by: float, bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        "nmt.train.loss.compute_loss_sums", scaled(gpu_checks.loss_module.compute_loss_sums, by)
    )
    bad = failures(bench, "loss")
    assert "loss, 50 x 300, fp32: sums" in bad and "loss, 50 x 300, bf16: gradient of weight" in bad


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.0005


def test_a_wrong_gradient_of_the_model_is_named(bench: Bench, monkeypatch: Patch) -> None:
    sums = parallel.CompiledObjective.compute_sums

    def wrong(self: parallel.CompiledObjective, *given: Tensor) -> tuple[Tensor, Tensor]:
        loss, nll = sums(self, *given)
        return WrongGradient.apply(loss), nll

    monkeypatch.setattr(parallel.CompiledObjective, "compute_sums", wrong)
    bad = failures(bench, "micro-batch")
    assert bad[0] == "compiled, fp32: all gradients" and all(
        name.startswith("compiled, fp32: ") for name in bad
    )


def test_a_gradient_that_is_nan_in_one_tensor_is_named(bench: Bench, monkeypatch: Patch) -> None:
    gradients = gpu_checks.gradients_of

    def wrong(replica: Replica) -> dict[str, Tensor]:
        found = gradients(replica)
        if replica.compiled is not None:
            found["model.encoder.0.feed_forward.inner.bias"][3] = NAN
        return found

    monkeypatch.setattr(gpu_checks, "gradients_of", wrong)
    bad = failures(bench, "micro-batch")
    assert "compiled, fp32: worst, model.encoder.0.feed_forward.inner.bias" in bad
    assert "compiled, bf16: all gradients" in bad


def test_norms_in_fp32_are_named(bench: Bench, monkeypatch: Patch) -> None:
    forward = LayerNorm.forward
    monkeypatch.setattr(LayerNorm, "forward", lambda self, x: forward(self, x).float())
    assert "what norms return" in failures(bench, "dtypes")


def test_updates_that_differ_from_the_cpu_are_named(bench: Bench, monkeypatch: Patch) -> None:
    run = Replica.run

    def forgetful(self: Replica, batch: Any, scale: float, seed: int) -> Tensor:
        sums = run(self, batch, scale, seed)
        if self.compiled is not None:
            self.clear_gradients()
        return sums

    monkeypatch.setattr(Replica, "run", forgetful)
    bad = failures(bench, "updates")
    assert bad[0] == "fp32: largest difference of a token's loss"
    assert bad[-1] == "bf16, dropout 0.1: last loss over first, the same pairs"


def test_dropout_that_ignores_its_seed_is_named(bench: Bench, monkeypatch: Patch) -> None:
    run = Replica.run
    monkeypatch.setattr(Replica, "run", lambda self, batch, scale, seed: run(self, batch, scale, 0))
    assert failures(bench, "graph") == ["dropout, another seed: the same sums"]


def test_dropout_that_does_not_follow_its_seed_is_named(bench: Bench, monkeypatch: Patch) -> None:
    run, others = Replica.run, count(5)
    monkeypatch.setattr(
        Replica, "run", lambda self, batch, scale, seed: run(self, batch, scale, next(others))
    )
    bad = failures(bench, "graph")
    assert "dropout, the same seed twice: the same sums" in bad
    assert "dropout, a graph recorded anew: error of gradients" in bad


@needs_dry_run
def test_compiling_anew_for_other_lengths_is_named(bench: Bench, monkeypatch: Patch) -> None:
    graphs = count()
    monkeypatch.setattr(gpu_checks, "n_graphs", lambda: next(graphs))
    bad = failures(bench, "compilations")
    assert bad == ["compilations after the first of 20 micro-batches"]


def test_micro_batches_of_many_shapes_are_named(bench: Bench, monkeypatch: Patch) -> None:
    make_batch = gpu_checks.make_batch
    monkeypatch.setattr(gpu_checks, "make_batch", lambda store, ids, shape: make_batch(store, ids))
    assert "sentences of 1 to 40 pieces: one shape" in failures(bench, "compilations")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("none", []),
        ("loss", ["losses of each, with dropout"]),
        ("gradient", ["gradients summed over ranks"]),
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
        by = 0.999 if fault == "gradient" else 1.0
        save_file({"gradients": alone.gradients * by}, folder / "gradients.safetensors")
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


def test_training_that_fails_is_named(bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpu_checks.train_command, "main", lambda argv: 2)
    answer = gpu_checks.perform(gpu_checks.check_continuation, bench)
    assert answer["verdict"] == CRASHED and "nmt-train left with exit code 2" in answer["reason"]


@pytest.fixture
def quick(monkeypatch: Patch) -> None:
    monkeypatch.setattr("nmt.profile.cost.MEASURED_S", 0.0)
    monkeypatch.setattr(gpu_speed, "measure_ceiling", lambda *given: 1e12)


def test_a_loss_that_is_nan_makes_a_speed_worthless(
    bench: Bench, monkeypatch: Patch, quick: None
) -> None:
    monkeypatch.setattr(Replica, "run", lambda self, batch, scale, seed: torch.full((2,), NAN))
    assert failures(bench, "base") == ["all losses are finite"]


def test_the_speed_of_ranks_is_what_the_main_rank_writes(
    bench: Bench, monkeypatch: Patch, quick: None
) -> None:
    """Instead of two processes, one that was told the same."""

    def run_ranks(bench: Bench, folder: Path, seconds: float) -> int:
        gpu_speed.work_as_rank(folder, is_rehearsal=True)
        return 0

    monkeypatch.setattr(gpu_speed, "run_ranks", run_ranks)
    answer = gpu_checks.perform(gpu_speed.FUNCTIONS["big-ranks"], bench)
    assert answer["verdict"] == "passed" and answer["tables"][0]["rows"][0][:2] == [
        "big",
        "2",
    ]
    monkeypatch.setattr(gpu_speed, "run_ranks", lambda *given: 7)
    answer = gpu_checks.perform(gpu_speed.FUNCTIONS["big-ranks"], bench)
    assert answer["verdict"] == CRASHED and "torchrun left with exit code 7" in answer["reason"]


def test_micro_batches_are_halved_until_they_fit(
    bench: Bench, monkeypatch: Patch, quick: None
) -> None:
    run = Replica.run

    def cramped(self: Replica, batch: Any, scale: float, seed: int) -> Tensor:
        if batch.n_tokens > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, batch, scale, seed)

    monkeypatch.setattr(Replica, "run", cramped)
    answer = gpu_checks.perform(gpu_speed.FUNCTIONS["base"], bench)
    assert answer["verdict"] == "passed" and answer["figures"]["micro_tokens"] == 64 + 32
    monkeypatch.setattr(Replica, "run", scaled(cramped, NAN))
    monkeypatch.setattr(gpu_speed, "MOST_ROUNDS", 2)
    answer = gpu_checks.perform(gpu_speed.FUNCTIONS["base"], bench)
    assert answer["verdict"] == "skipped" and "do not fit into memory" in answer["reason"]


@pytest.fixture
def roofline() -> Iterator[dict[str, Any]]:
    """A module in the place of the real one."""
    answers: dict[str, Any] = {}

    class Roofline:
        @staticmethod
        def predict(size: str, gpu_name: str, n_ranks: int) -> float | None:
            assert (size, n_ranks) == ("base", 1)
            answer: float | None = answers["answer"]
            if answer == 0:
                raise KeyError(gpu_name)
            return answer

    before = sys.modules.pop("roofline", None)
    sys.modules["roofline"] = Roofline  # type: ignore[assignment]
    yield answers
    del sys.modules["roofline"]
    if before is not None:
        sys.modules["roofline"] = before


@pytest.mark.parametrize(
    ("answer", "told"), [(1e9, "of 1,000,000,000"), (None, "no prediction"), (0, "no prediction")]
)
def test_a_prediction_stands_beside_the_speed(
    answer: float | None, told: str, bench: Bench, quick: None, roofline: dict[str, Any]
) -> None:
    roofline["answer"] = answer
    found = gpu_checks.perform(gpu_speed.FUNCTIONS["base"], bench)
    assert found["verdict"] == "passed" and told in found["tables"][0]["rows"][0][-1]


def test_translations_that_are_too_short_are_named(bench: Bench, monkeypatch: Patch) -> None:
    decode = gpu_speed.decode
    monkeypatch.setattr(gpu_speed, "decode", lambda *given: [ids[:4] for ids in decode(*given)])
    assert failures(bench, "decoding") == ["translations of 5 pieces"]
