"""RUN/sweep.json: what a finished run adds to the table of its sweep.

This file is written last. So a run is finished if the file exists and has the scores that the grid asks
for. The scores are those that nmt-eval recorded in results.json, with all their digests. The file has a
digest of itself, and that of the weights: if it was edited, or if the weights were replaced, the run is
scored again.
"""

from dataclasses import asdict, dataclass, replace

from nmt.sweep.grid import PlannedRun, Sweep
from nmt.system.errors import UserError
from nmt.system.files import digest_values, has_plain_file, read_manifest, write_json
from nmt.system.progress import say_once
from nmt.system.records import read_record
from nmt.system.run_folder import MODEL_FILE


@dataclass(frozen=True)
class SetScore:
    """The BLEU of a run on its dev or its test set, and how far its probabilities can be trusted."""

    set: str  # dev or test
    bleu: float
    chrf: float
    calibration_error: float | None  # in percent; None if no line can be scored piece by piece
    signature: str
    ref_sha256: str


@dataclass(frozen=True)
class RunResult:
    average: int | None  # as in the grid
    averaged: list[str]  # the checkpoints
    weights_sha256: str
    vocab_sha256: str
    parameters: int
    updates: int
    minutes: float  # of training
    nll: float | None  # per piece of the dev set, of the weights that were scored
    scores: list[SetScore]
    sha256: str = ""  # of all the above

    def compute_digest(self) -> str:
        return digest_values(asdict(replace(self, sha256="")))


def read_result(sweep: Sweep, run: PlannedRun) -> RunResult | None:
    """Return the result of a run, or None if it is not finished."""
    path = run.folder.sweep
    if not has_plain_file(path):
        return None
    try:
        result = read_record(path, RunResult, remedy="")
    except UserError:  # damaged, or of another version: the run is scored again
        return None
    scored = {score.set for score in result.scores}
    if result.average != sweep.average or not scored.issuperset(sweep.score):
        return None  # the grid asks for something else now
    if result.sha256 != result.compute_digest():
        say_once(f"warning: {path}: was edited, or is of an older version; the run is scored again")
        return None
    folder = run.folder.checkpoint(result.updates) if result.average is None else run.folder.average
    # Weights that were removed to save space are no longer needed.
    if folder.is_dir() and read_manifest(folder)[MODEL_FILE]["sha256"] != result.weights_sha256:
        say_once(
            f"warning: {folder}: these are not the weights that were scored; the run is scored again"
        )
        return None
    return result


def list_unfinished(sweep: Sweep) -> list[PlannedRun]:
    return [run for run in sweep.runs if read_result(sweep, run) is None]


def write_result(run: PlannedRun, result: RunResult) -> None:
    sealed = replace(result, sha256=result.compute_digest())
    write_json(run.folder.sweep, asdict(sealed))
