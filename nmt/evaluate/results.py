"""RUN/results.json: what was scored, when, and by which digests; the memory that numbers in a paper or a card are from.

A record names weights, vocabulary, test set and hypotheses by sha256 and the search by all its settings, so that it can
be told years later what a number is of. The file is replaced as a whole, under a lock: two evaluations at a time lose
nothing. Scoring the very same thing again replaces its record, except for scores that were not asked for again.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nmt.score.score import Score
from nmt.system.errors import UserError
from nmt.system.files import lock, read_file_size, read_json, write_json
from nmt.system.progress import clock
from nmt.system.records import RecordReader
from nmt.system.run_folder import RESULTS_FILE, RunFolder

PATIENCE_S = 20.0  # another writer is done in milliseconds
Setting = str | int | float | bool | None


@dataclass(frozen=True)
class TestSet:
    name: str
    lines: int
    src_sha256: str
    ref_sha256: str


@dataclass(frozen=True)
class Result:
    when: str  # ISO, UTC
    checkpoint: str  # its name inside the run
    step: int
    averaged: list[str]
    weights_sha256: str
    vocab_sha256: str
    test_set: TestSet
    pair: str  # en-de: a test set may be read in either direction
    hypotheses_sha256: str
    decoding: dict[str, Setting]  # all settings, resolved
    engine: str
    scores: list[Score]
    versions: dict[str, str]  # of nmt, torch, sacrebleu, python
    seconds: float

    @property
    def subject(self) -> tuple[object, ...]:
        """What was scored; the same twice is one record."""
        return (
            self.weights_sha256,
            self.vocab_sha256,
            self.test_set,
            self.pair,
            sorted(self.decoding.items()),
            self.engine,
        )

    def with_scores_of(self, older: "Result") -> "Result":
        """With those of the very same text that were counted in ways in which it was not counted again."""
        if older.hypotheses_sha256 != self.hypotheses_sha256:
            return self
        ours = {score.signature for score in self.scores}
        return replace(
            self,
            scores=[
                *self.scores,
                *(score for score in older.scores if score.signature not in ours),
            ],
        )


def add(run: Path, record: Result) -> None:
    """Write the record into the file of `run`, in place of one of the same subject."""
    _from_json(_to_json(record), f"{run / RESULTS_FILE}: the new record")  # or it could not be read
    with _held(run):
        records = []
        for known in read(run):
            if known.subject == record.subject:
                record = record.with_scores_of(known)
            else:
                records.append(known)
        write_json(run / RESULTS_FILE, [_to_json(known) for known in (*records, record)])


def read(run: Path) -> list[Result]:
    """The records of `run`, oldest first; none if nothing was scored yet."""
    path = run / RESULTS_FILE
    if not os.path.lexists(path):
        return []
    read_file_size(path)  # a pipe would never end
    found = read_json(path)
    if not isinstance(found, list):
        raise UserError(f"{path}: is no list of records; damaged, move it away")
    return [_from_json(entry, f"{path}: record {n}") for n, entry in enumerate(found, 1)]


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint or an average lies in, or that it is; None for a folder that stands alone."""
    place = checkpoint.resolve()
    for folder in (
        place,
        place.parent,
        *([place.parent.parent] if place.parent.name == "checkpoints" else []),
    ):
        if RunFolder(folder).checkpoints.is_dir() and RunFolder(folder).config.is_file():
            return folder
    return None


@contextlib.contextmanager
def _held(run: Path) -> Iterator[None]:
    """Alone with the file; training, which holds the run folder itself, is not in the way."""
    until = clock() + PATIENCE_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock(run / RESULTS_FILE, "nmt-eval", ".results.lock"))
                break
            except UserError:
                if clock() > until:
                    raise
                time.sleep(0.05)
        yield


def _to_json(record: Result) -> dict[str, Any]:
    """In the file the interval of a score is two keys beside its value; both are null where there is none."""
    plain = asdict(record)
    for score in plain["scores"]:
        score |= score.pop("interval") or {"low": None, "high": None}
    return plain


def _from_json(entry: Any, place: str) -> Result:
    if isinstance(entry, dict) and isinstance(entry.get("scores"), list):
        entry = entry | {"scores": [_with_interval(score) for score in entry["scores"]]}
    reader = RecordReader(
        lambda key: f"{place}: {key}" if key else place,
        needs_all_keys=True,
        remedy="damaged, or of another version of nmt: move the file away",
    )
    return reader.read(Result, entry)


def _with_interval(score: Any) -> Any:
    if not isinstance(score, dict) or not score.keys() >= {"low", "high"}:
        return score  # to be refused like any other damage
    others = {key: value for key, value in score.items() if key not in ("low", "high")}
    bounds = {"low": score["low"], "high": score["high"]}
    return others | {"interval": None if bounds == {"low": None, "high": None} else bounds}
