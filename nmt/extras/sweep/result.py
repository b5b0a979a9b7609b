"""RUN/sweep.json: what a finished run adds to the table of its sweep.

This file is written last. So a run is finished if the file exists and has the scores that the grid asks
for.
"""

from dataclasses import asdict, dataclass

from nmt.extras.sweep.grid import PlannedRun, Sweep
from nmt.system.errors import UserError
from nmt.system.files import has_plain_file, write_json
from nmt.system.records import read_record


@dataclass(frozen=True)
class SetScore:
    """The BLEU of a run on its dev or its test set."""

    bleu: float
    signature: str


@dataclass(frozen=True)
class RunResult:
    average: int | None  # as in the grid
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
    return result


def write_result(run: PlannedRun, result: RunResult) -> None:
    write_json(run.folder.sweep, asdict(result))
