"""Starts the tests of GPU kernels in a process that interprets them, where there is no GPU."""

import hashlib
from pathlib import Path

import pytest
from support.checkout import TESTS
from support.forks import run_on_ranks
from support.interpreted import needs_interpreter, run_interpreted
from support.rings import amount

INTERPRETED = "nmt/interpreted"  # in pytest's cache, a digest of what was
# What decides what they compute here
SOURCES = (
    "constraints.txt",
    "nmt/engines/cuda/*",
    "nmt/model/*",
    "tests/kernels/*",
    "tests/support/*",
)


def digest_sources() -> str:
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(TESTS.parent.glob(pattern)):
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@needs_interpreter
def test_kernels_compute_what_they_should(pytestconfig: pytest.Config) -> None:
    """Once for each state of their files. In `make soak`, the graphs that a GPU runs too."""
    cache, digest = pytestconfig.cache, digest_sources()
    assert cache is not None
    if amount(True, False) and cache.get(INTERPRETED, "") == digest:
        pytest.skip("the kernels are those that were interpreted last")
    file = f"{TESTS}/train/test_fast_paths.py"
    graphs = [
        f"{file}::test_what_a_gpu_runs_is_one_graph",
        f"{file}::test_a_graph_drops_other_attention_weights_at_each_call",
    ]
    run_interpreted(f"{TESTS}/kernels", *amount([], graphs))
    cache.set(INTERPRETED, digest)


WITHOUT_TRITON = """
import sys
for name in [name for name in sys.modules if name.startswith(("triton", "nmt.engines.cuda"))]:
    del sys.modules[name]
sys.modules["triton"] = None
import torch
from nmt.engines.cuda import attention_triton as a, loss_triton as b
x = torch.zeros(3, 1, 16)
assert a.triton is None and not a.supports_triton(x, x) and not b.supports_fused_loss(x)
"""


def test_without_triton_the_modules_load_and_say_so(tmp_path: Path) -> None:
    ended = run_on_ranks(1, WITHOUT_TRITON, tmp_path / "program.py")
    assert ended.codes == [0], ended.told()
