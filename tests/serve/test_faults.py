"""Thousands of clients that do everything wrong, beside a few healthy ones: scripts/bench/serve_faults.py.

The small cases of it are in test_server.py. What it measures needs a machine without other work.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from support.serve_process import start_server
from support.soaking import IS_SOAK
from support.untrained import make_checkpoint, make_vocab

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "serve_faults.py"


@pytest.mark.skipif(not IS_SOAK, reason="takes four minutes; NMT_SOAK=1 runs it")
@pytest.mark.timeout(900)
def test_the_healthy_are_answered_beside_all_others(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "average", make_vocab(tmp_path))
    with start_server(tmp_path, str(checkpoint)) as (process, port):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), f"127.0.0.1:{port}", "--pid", str(process.pid)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in (tmp_path / "stderr").read_text()
