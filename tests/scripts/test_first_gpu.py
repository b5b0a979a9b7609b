"""The checks of `make gpu` can fail: a check that cannot proves nothing.

One wrong result after the other is put in the place of a right one, on a CPU, and the check that looks for
it must name it. `make gpu-dry` runs this, and all checks with `--dry`; every test run lists them.
"""

import pkgutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from pytest import MonkeyPatch, mark
from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import first_gpu  # noqa: E402
import gpu_checks  # noqa: E402


def slightly_more(compute_sums: Any) -> Any:
    """The loss is 1, its gradient 1.0005 times what it was."""

    def wrong(*given: Any) -> Any:
        loss, nll = compute_sums(*given)
        return 1.0005 * loss - 0.0005 * loss.detach(), nll

    return wrong


def one_nan(gradients_of: Any) -> Any:
    def wrong(replica: Any) -> Any:
        found = gradients_of(replica)
        found["model.encoder.0.feed_forward.inner.bias"][3] = float("nan")
        return found

    return wrong


def other_seeds(dropout_seed: Any) -> Any:
    seeds = count()
    return lambda *given: next(seeds)


# The check, what is replaced, by what, and what it then says.
FAULTS = {
    "gradient of the model": (
        "micro-batch",
        "nmt.engines.cuda.recorded_replica._compute_sums",
        slightly_more,
        "compiled, fp32: all gradients",
    ),
    "one gradient is NaN": (
        "graph",
        "gpu_checks.gradients_of",
        one_nan,
        "no dropout, a replay and a call: error of gradients",
    ),
    "other masks after a stop": (
        "continuation",
        "nmt.train.update.dropout_seed",
        other_seeds,
        "optimizer.safetensors: error of the worst tensor",
    ),
}


@mark.gpu_dry
@mark.parametrize("name, place, make_wrong, named", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named(
    name: str,
    place: str,
    make_wrong: Callable[[Any], Any],
    named: str,
    monkeypatch: MonkeyPatch,
) -> None:
    check = pkgutil.resolve_name(first_gpu.BY_NAME[name].function)
    monkeypatch.setattr(place, make_wrong(pkgutil.resolve_name(place)))
    answer = gpu_checks.perform(check, gpu_checks.make_bench(is_rehearsal=True))
    bad = [row["what"] for row in answer["rows"] if not row["holds"]]
    assert answer["verdict"] == "failed" and named in bad


def test_the_checks_are_listed() -> None:
    command = [sys.executable, first_gpu.__file__, "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(first_gpu.BY_NAME)
    assert all(pkgutil.resolve_name(check.function) for check in first_gpu.CHECKS)
