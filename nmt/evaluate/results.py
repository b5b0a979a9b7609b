"""RUN/results.json: what was scored, when, and by which digests, so that any number in a paper or a
card can be traced.

A result names weights, vocabulary, test set and hypotheses by sha256, and the search by all its
settings. The file is replaced as a whole, under a lock, so that two evaluations at once lose
nothing. Scoring the very same thing again replaces its result, except for scores that were not
asked for again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nmt.config import SILENT_SETTINGS, RunConfig
from nmt.config_files import format_setting, to_plain_values
from nmt.corpus.test_sets import is_label_of
from nmt.score.score import Score
from nmt.system.errors import UserError
from nmt.system.files import has_plain_file, lock, read_json, write_json
from nmt.system.records import RecordReader, name_places_in
from nmt.system.run_folder import RESULTS_FILE, RunFolder

PATIENCE_S = 20.0  # another writer is done in milliseconds
SHOWN_SETTINGS = ("beam", "penalty", "length_penalty", "sample")
DecodingSetting = str | int | float | bool | None
Search = Mapping[str, DecodingSetting]


@dataclass(frozen=True)
class ScoredTestSet:
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
    test_set: ScoredTestSet
    pair: str  # en-de: a test set may be read in either direction
    hypotheses_sha256: str
    decoding: dict[str, DecodingSetting]  # all settings, resolved
    engine: str
    scores: list[Score]
    versions: dict[str, str]  # of nmt, torch, sacrebleu, python
    seconds: float

    @property
    def subject(self) -> tuple[object, ...]:
        """What was scored; there is one result for each subject."""
        return (
            self.weights_sha256,
            self.vocab_sha256,
            self.test_set,
            self.pair,
            sorted(self.decoding.items()),
            self.engine,
        )

    @property
    def search(self) -> str:
        """Describe for people what translated, and with which search."""
        shown = [f"{key} {self.decoding[key]}" for key in SHOWN_SETTINGS if key in self.decoding]
        return ", ".join([self.engine, *shown])

    def find_other_search(self, config: RunConfig) -> Search:
        return find_other_search(self.decoding, self.test_set.name, config)

    @property
    def scored_text(self) -> str:
        """Describe for people what was scored."""
        return f"{self.test_set.name} {self.pair}, {self.test_set.lines:,} lines"

    def with_scores_of(self, older: "Result") -> "Result":
        """Add the scores of the very same text that were not counted again."""
        if older.hypotheses_sha256 != self.hypotheses_sha256:
            return self
        ours = {score.signature for score in self.scores}
        kept = [score for score in older.scores if score.signature not in ours]
        return replace(self, scores=[*self.scores, *kept])


def add_result(run: Path, result: Result, patience_s: float = PATIENCE_S) -> None:
    """Write the result into the file of `run`, in place of one of the same subject."""
    # Refuse now what could not be read later.
    _from_json(asdict(result), f"{run / RESULTS_FILE}: the new record")
    # Training locks the run folder itself, so it is not in the way.
    with lock(run / RESULTS_FILE, "nmt-eval", ".results.lock", patience_s):
        others = []
        for known in read_results(run):
            if known.subject == result.subject:
                result = result.with_scores_of(known)
            else:
                others.append(known)
        write_json(run / RESULTS_FILE, [asdict(each) for each in (*others, result)])


def read_results(run: Path) -> list[Result]:
    """Return the results of `run`, oldest first; none if nothing was scored yet."""
    path = run / RESULTS_FILE
    if not has_plain_file(path):
        return []
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path}: is damaged (not a list of records); move it away")
    return [_from_json(entry, f"{path}: record {n}") for n, entry in enumerate(entries, 1)]


def find_other_search(decoding: Search, test_set: str, config: RunConfig) -> Search:
    """Return the settings of a search that are not as the config would have them for this test set."""
    own, test = to_plain_values(config.decoding), config.data.test
    if test is not None and test.tag is not None and is_label_of(test_set, test):
        own["tag"] = test.tag
    return {
        key: value
        for key, value in decoding.items()
        if key not in SILENT_SETTINGS and value != own.get(key)
    }


def describe_other_search(settings: Search) -> str:
    """Name them for people, after what was scored; nothing if there are none."""
    named = ", ".join(f"{key}={format_setting(value)}" for key, value in settings.items())
    return named and f", with {named}"


def choose_headline(results: Sequence[Result], config: RunConfig | None) -> Result | None:
    """Return what a run is known by: the last result on the config's test set, by the config's search
    if there is one, of the newest weights, and of these an average. Without any, the last result.
    """
    test = config.data.test if config else None

    def rank(result: Result) -> tuple[bool, bool, int, bool]:
        if config is None or test is None or not is_label_of(result.test_set.name, test):
            return False, False, 0, False
        return True, not result.find_other_search(config), result.step, bool(result.averaged)

    return max(reversed(results), key=rank, default=None)


def find_last_step(folder: Path) -> int:
    """Return the newest step of the run that a checkpoint or an average is in; 0 if it is in none."""
    from nmt.checkpoint.run_checkpoints import (
        list_steps,  # and so torch, which a report does without
    )

    run = find_run(folder)
    return max(list_steps(RunFolder(run)), default=0) if run else 0


def find_run(checkpoint: Path) -> Path | None:
    """Return the run folder that the path is, or that a checkpoint or an average is in; None if
    there is none.
    """
    path = checkpoint.resolve()
    candidates = [path, path.parent]
    if path.parent.name == "checkpoints":
        candidates.append(path.parent.parent)
    for folder in candidates:
        run = RunFolder(folder)
        if run.checkpoints.is_dir() and has_plain_file(run.config):
            return folder
    return None


def _from_json(entry: Any, record_name: str) -> Result:
    """Read one result; anything but what this version writes is refused."""
    reader = RecordReader(
        name_places_in(record_name),
        needs_all_keys=True,
        remedy="damaged, or of another version of nmt: move the file away",
    )
    return reader.read(Result, entry)
