"""How many kernels a micro-batch launches on a GPU and how many bytes they move, by the compiler's
own scheduler, are those that kernels.json has.

A change that undoes a fusion or widens the residual stream to fp32 makes no result wrong, only
slow. Counting takes minutes: `make gpu-dry`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from count_kernels import Counts, load  # noqa: E402

STORED = load(BENCH / "kernels.json")


@pytest.mark.gpu_dry
@pytest.mark.parametrize("stored", STORED, ids=lambda counts: f"{counts.size}-{counts.n_ranks}")
def test_the_papers_models_launch_what_was_counted_last(stored: Counts, tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    what = ["--config", f"{stored.size}.yaml", "--ranks", str(stored.n_ranks), "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(BENCH / "count_kernels.py"), *what],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (counts,) = load(file)
    print(counts.size, counts.n_ranks, counts.launches(), counts.fused_bytes() / 1e9)
    assert counts == stored, "if it is meant, write kernels.json anew: the roofline is made of it"
