"""How many kernels a micro-batch launches on a GPU and how many bytes they move, by the compiler's
own scheduler.

A change that undoes a fusion or widens the residual stream to fp32 makes no result wrong, only
slow: these are budgets. Counting takes minutes, so it is done with NMT_GPU_DRY=1 (`make gpu-dry`);
what was counted last is always checked.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

from count_kernels import Counts, load  # noqa: E402
from roofline import GPUS, predict, target_tokens_per_s  # noqa: E402

STORED = {
    (counts.size, counts.n_ranks): counts
    for counts in load(ROOT / "scripts" / "bench" / "kernels.json")
}
# launches and gigabytes of fused kernels, with 3 % of room: kernels.json has what they are
BUDGETS = {
    ("base", 1): (500, 20.3),
    ("base", 8): (467, 2.9),
    ("big", 1): (500, 40.6),
    ("big", 8): (467, 5.8),
}


def count_launches(tmp_path: Path, config: str, n_ranks: int) -> Counts:
    file = tmp_path / "counts.json"
    command = [
        sys.executable,
        str(ROOT / "scripts" / "bench" / "count_kernels.py"),
        "--config",
        config,
        "--ranks",
        str(n_ranks),
        "--json",
        str(file),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load(file)[0]


@pytest.mark.gpu_dry  # minutes
@pytest.mark.parametrize(("size", "n_ranks"), BUDGETS)
def test_the_papers_models_stay_within_their_budgets(
    size: str, n_ranks: int, tmp_path: Path
) -> None:
    counts = count_launches(tmp_path, f"{size}.yaml", n_ranks)
    print(size, n_ranks, counts.launches(), counts.fused_bytes() / 1e9)
    launches, gigabytes = BUDGETS[size, n_ranks]
    assert counts.launches() <= launches and counts.fused_bytes() <= 1e9 * gigabytes
    assert counts == STORED[size, n_ranks], "write kernels.json anew: the roofline is made of it"


def test_stored_counts_are_within_the_budgets_and_of_the_papers_sizes() -> None:
    assert STORED.keys() == BUDGETS.keys()
    for key, (launches, gigabytes) in BUDGETS.items():
        assert 0.9 * launches < STORED[key].launches() <= launches
        assert 0.9e9 * gigabytes < STORED[key].fused_bytes() <= 1e9 * gigabytes
    assert [round(STORED[size, 1].n_parameters / 1e6) for size in ("base", "big")] == [63, 214]


def test_a_gpu_or_a_number_of_ranks_that_was_not_counted_has_no_prediction() -> None:
    h200 = target_tokens_per_s(STORED["base", 1], GPUS["H200"])
    assert predict("base", "NVIDIA H200", 1) == h200
    assert predict("base", "NVIDIA GeForce RTX 4090", 1) is None
    assert predict("base", "NVIDIA H200", 5) is None
