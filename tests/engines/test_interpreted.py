"""Starts the tests of GPU kernels in a process that interprets them, where there is no GPU."""

import subprocess
import sys
from pathlib import Path

from support.interpreted import needs_interpreter, run_interpreted
from support.rings import amount

TESTS = Path(__file__).parents[1]


@needs_interpreter
def test_kernels_compute_what_they_should() -> None:
    """In `make soak`, the graphs that a GPU runs too."""
    file = f"{TESTS}/train/test_fast_paths.py"
    graphs = [
        f"{file}::test_what_a_gpu_runs_is_one_graph",
        f"{file}::test_a_graph_drops_other_attention_weights_at_each_call",
    ]
    run_interpreted(f"{TESTS}/kernels", *amount([], graphs))


def test_without_triton_the_modules_load_and_say_so() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\nimport torch\nfrom nmt.engines.cuda import attention_triton as a\n"
        "from nmt.engines.cuda import loss_triton as b\nx = torch.zeros(3, 1, 16)\n"
        "assert a.triton is None and not a.supports_triton(x, x) and not b.supports_fused_loss(x)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=TESTS.parent, check=True)
