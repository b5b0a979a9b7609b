"""The core needs no annex: without exports, reports, the server and sweeps it trains, averages, translates
and scores, and their commands say in one line what is missing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.toy_corpus import write_toy_config, write_toy_corpus

ROOT = Path(__file__).parent.parent
ANNEXES = ("export", "report", "serve", "sweep")
# In one process, because importing torch takes longer than the rest.
PROGRAM = """
import sys
from pathlib import Path

# An editable installation finds in the checkout what the copy lacks.
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
sys.modules["numba"] = None  # which would compile anew for the copy
import nmt
from nmt.commands import average, eval, export, report, serve, sweep, train, translate

place, toy = Path(sys.argv[1]), sys.argv[2]
assert Path(nmt.__file__).is_relative_to(place), nmt.__file__
run = f"{Path(toy).parent}/run"
steps = ["training.steps=6", "training.checkpoint_every=2", "evaluation.bleu=false"]
print(train.main(["--config", toy, *steps]))
print(average.main([run, "--last", "2"]))
print(eval.main([f"{run}/average"]))
print(translate.main([f"{run}/average", "-i", f"{place}/text", "-o", f"{place}/out"]))
for command, words in (
    (export, [f"{run}/average", "--to", "safetensors", "-o", f"{place}/exported"]),
    (report, [run]),
    (serve, [f"{run}/average"]),
    (sweep, ["label-smoothing.yaml", "--out", f"{place}/sweep"]),
):
    print(command.main(words))
"""


def test_the_core_works_without_its_annexes(tmp_path: Path) -> None:
    place = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", *ANNEXES)
    shutil.copytree(ROOT / "nmt", place / "nmt", ignore=ignored)
    shutil.copytree(ROOT / "configs", place / "configs")
    (place / "text").write_text("red dog\n")
    toy = write_toy_config(write_toy_corpus(tmp_path), tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(place), str(toy)],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    codes = [int(line) for line in done.stdout.splitlines() if line in ("0", "1", "2")]
    assert codes == [0, 0, 0, 0, 2, 2, 2, 2], done.stderr
    assert (place / "out").read_text().count("\n") == 1
    assert "BLEU" in done.stdout
    assert "warning: no report: No module named 'nmt.report'" in done.stderr
    for annex in ANNEXES:
        (line,) = [
            line
            for line in done.stderr.splitlines()
            if line.startswith(f"nmt-{annex}: error: nmt.{annex}")
        ]
        assert line.endswith(" is missing; install nmt again")
