"""The checks of `make gpu` can fail: a check that cannot proves nothing.

Wrong results are put in the place of right ones, one fault at a time, on a CPU, and the check that
looks for it must name it. `make gpu-dry` runs this, and all checks with `--dry`.
"""

import pkgutil
import sys
from collections.abc import Callable, Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nmt.engines.cuda.recorded_replica import RecordedReplica
from nmt.train import update
from nmt.train.replica import Replica

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import gpu_checks  # noqa: E402
import gpu_speed  # noqa: E402
from first_gpu import BY_NAME  # noqa: E402
from gpu_checks import Bench  # noqa: E402

pytestmark = pytest.mark.gpu_dry
NAN = float("nan")
Patch = pytest.MonkeyPatch


@pytest.fixture
def bench() -> Bench:
    return gpu_checks.make_bench(is_rehearsal=True)


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
    def wrong(replica: Replica) -> dict[str, Tensor]:
        found: dict[str, Tensor] = gradients_of(replica)
        if isinstance(replica, RecordedReplica) and replica.compiled is not None:
            found["model.encoder.0.feed_forward.inner.bias"][3] = NAN
        return found

    return wrong


def forgetful(run: Any) -> Any:
    def wrong(self: RecordedReplica, *given: Any) -> Any:
        sums = run(self, *given)
        for bucket in self.shares.buckets:
            bucket.gradients.zero_()
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
        [f"{tokens} tokens: translations of 5 pieces" for tokens in ("65,536", "131,072")],
        is_all=True,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("nmt.extras.profile.cost.MEASURED_S", 0.0)
    monkeypatch.setattr(gpu_speed, "measure_ceiling", lambda *given: 1e12)
    check, place, make_wrong, named, is_all = FAULTS[fault]
    right = pkgutil.resolve_name(place)
    monkeypatch.setattr(place, make_wrong(right))
    bad = failures(bench, check)
    assert set(named) <= set(bad)
    assert not is_all or bad == named


def test_a_run_that_does_not_continue_to_the_bit_is_named(bench: Bench, monkeypatch: Patch) -> None:
    seeds = count()
    monkeypatch.setattr(update, "dropout_seed", lambda *given: next(seeds))
    bad = failures(bench, "continuation")
    assert bad == [
        f"{kind}.safetensors: error of the worst tensor" for kind in ("model", "optimizer")
    ]
