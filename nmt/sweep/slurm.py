"""A sweep as a job array of Slurm: one task for each run that is not finished.

A task does what `nmt-sweep --only INDEX` does. Before its time is up, or when it is pre-empted, it
gets a signal to save, and is queued again; other failures are left for `nmt-sweep` to report.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nmt.sweep.grid import Sweep
from nmt.system.files import make_folder, write_text

SLURM_FILE = "slurm.sh"
SCRIPT = """\
#!/bin/bash
# The runs of a sweep, one a task; made by nmt-sweep --slurm. Options of sbatch may follow it:
#     sbatch --gpus 1 --time 8:00:00 {script}
# Then nmt-sweep without --slurm makes the table, and does what is left to do.
#SBATCH --job-name=nmt-sweep
#SBATCH --array={array}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}
set -uo pipefail
cd {place} || exit 2

{command} --only "$SLURM_ARRAY_TASK_ID" &
run=$!
# bash hears a signal only between commands, and `wait` ends when one comes
trap 'kill -TERM "$run" 2>/dev/null' USR1 TERM
while true; do
    code=0
    wait "$run" || code=$?
    kill -0 "$run" 2>/dev/null || break
done

# 75: stopped, and saved. A job that was cancelled, or that Slurm queues again itself, is no longer RUNNING.
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
if [[ $code -eq 75 ]] && scontrol show job "$job" | grep -q 'JobState=RUNNING'; then
    scontrol requeue "$job"
fi
exit "$code"
"""


def write_slurm_script(
    sweep: Sweep, grid: str, overrides: Sequence[str], indexes: Sequence[int]
) -> Path:
    """Write FOLDER/slurm.sh and return its path."""
    path = sweep.folder / SLURM_FILE
    logs = make_folder(sweep.folder / "logs")
    words = [sys.executable, "-m", "nmt.commands.sweep", grid, "--out", str(sweep.folder)]
    text = SCRIPT.format(
        script=shlex.quote(str(path)),
        array=format_indexes(indexes),
        output=shlex.quote(f"{logs.absolute()}/slurm-%A_%a.log"),
        place=shlex.quote(str(Path.cwd())),
        command=shlex.join([*words, *overrides]),
    )
    write_text(path, text)
    path.chmod(0o755)
    return path


def format_indexes(indexes: Sequence[int]) -> str:
    """1, 2, 3, 5 -> 1-3,5."""
    ranges: list[list[int]] = []
    for index in sorted(indexes):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)
