"""RUN/sweep.json: what a finished run adds to the table of its sweep.

This file is written last. So a run is finished if the file exists and has the scores that the grid asks
for. It has the digest of the weights: if they were replaced, the run is scored again.
"""

from dataclasses import asdict, dataclass

from nmt.extras.sweep.grid import PlannedRun, Sweep
from nmt.system.errors import UserError
from nmt.system.files import has_plain_file, read_manifest, write_json
from nmt.system.progress import say_once
from nmt.system.records import read_record
from nmt.system.run_folder import MODEL_FILE


@dataclass(frozen=True)
class SetScore:
    """The BLEU of a run on its dev or its test set."""

    bleu: float
    signature: str


@dataclass(frozen=True)
class RunResult:
    average: int | None  # as in the grid
    weights_sha256: str
    parameters: int
    updates: int
    minutes: float  # of training
    nll: float | None  # per piece of the dev set, of the weights that were scored
    scores: dict[str, SetScore]  # of dev and test, as the grid asks


def read_result(sweep: Sweep, run: PlannedRun) -> RunResult | None:
    """Return the result of a run, or None if it is not finished."""
    path = run.folder.sweep
    if not has_plain_file(path):
        return None
    try:
        result = read_record(path, RunResult, remedy="")
    except UserError:  # damaged, or of another version: the run is scored again
        return None
    if result.average != sweep.average or not result.scores.keys() >= set(sweep.score):
        return None  # the grid asks for something else now
    folder = run.folder.checkpoint(result.updates) if result.average is None else run.folder.average
    # Weights that were removed to save space are no longer needed.
    if folder.is_dir() and read_manifest(folder)[MODEL_FILE]["sha256"] != result.weights_sha256:
        say_once(
            f"warning: {folder}: these are not the weights that were scored; the run is scored again"
        )
        return None
    return result


def write_result(run: PlannedRun, result: RunResult) -> None:
    write_json(run.folder.sweep, asdict(result))
