"""Reads all that a report can show of a run, from its folder and its store.

A run may be unfinished, old, damaged or a stranger's. So whatever cannot be read is left out with a
note that says why, and never fails the report; only a folder without settings is refused, because
it is no run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nmt.config import RunConfig, load_recorded_config
from nmt.corpus.inspection import CHUNK
from nmt.corpus.ledger import Ledger, read_ledger
from nmt.data.store import Side, open_store
from nmt.data.vocab import Vocabulary, load_vocab
from nmt.evaluate.results import Result, read_results
from nmt.evaluate.scored_texts import ScoredTexts, read_scored_texts
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import has_plain_file, read_bytes, read_json
from nmt.system.run_folder import RunFolder
from nmt.system.strict_yaml import parse_yaml
from nmt.train.metrics_log import MetricsLine, read_metrics

Value = TypeVar("Value")
LONGEST_NAME = 200  # characters of a machine
LONGEST = 1_000  # pieces; what is longer counts with these
Histogram = list[tuple[int, int]]  # (length, how many), ascending


@dataclass(frozen=True)
class LineAttention:
    """The attention behind the translation of a line, as attention_view.js draws it."""

    name: str
    source: str
    translation: str
    values: dict[
        str, Any
    ]  # unchecked if training recorded it: the view refuses what it cannot draw


@dataclass(frozen=True)
class RunFacts:
    """A run, or with less in it anything that was scored."""

    name: str
    place: str  # as the user wrote it
    settings: dict[str, Any]
    config: RunConfig | None = None
    vocab: Vocabulary | None = None
    metrics: tuple[MetricsLine, ...] = ()
    n_damaged: int = 0  # lines of metrics.jsonl
    results: tuple[Result, ...] = ()
    texts: ScoredTexts | None = None
    ledger: Ledger | None = None
    lengths: tuple[Histogram, Histogram] | None = None  # of source and target in training
    attention: tuple[LineAttention, ...] = ()
    machine: str = ""  # on which training ran last
    notes: tuple[str, ...] = ()  # what could not be read, and why

    @property
    def headline(self) -> Result | None:
        """The result of the last evaluation."""
        return self.results[-1] if self.results else None


def read_run(path: Path) -> RunFacts:
    folder = RunFolder(path)
    try:
        settings = parse_yaml(read_bytes(folder.config).decode(), str(folder.config)).values
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{folder.config}: cannot be read ({reason}); give a run folder") from None
    notes: list[str] = []

    def attempt(read: Callable[[], Value]) -> Value | None:
        try:
            return read()
        except UserError as error:
            notes.append(str(error))
        except OSError as error:
            notes.append(f"{error.filename}: cannot be read ({error.strerror})")
        return None

    config = attempt(lambda: load_recorded_config(folder.config))
    metrics, n_damaged = attempt(lambda: read_metrics(folder.metrics)) or ([], 0)
    store = Path(config.data.store) if config is not None else None
    has_store = store is not None and store.is_dir()
    return RunFacts(
        name=escape_line(str(settings.get("name", "run"))),
        place=str(path),
        settings=settings,
        config=config,
        vocab=attempt(lambda: load_vocab(path)) if any(map(Path.exists, folder.vocabs)) else None,
        metrics=tuple(metrics),
        n_damaged=n_damaged,
        results=tuple(attempt(lambda: read_results(path)) or ()),
        texts=attempt(lambda: read_scored_texts(path)),
        ledger=attempt(lambda: read_ledger(store)) if store and has_store else None,
        lengths=attempt(lambda: count_lengths(store)) if store and has_store else None,
        attention=tuple(list_sampled_attention(metrics)),
        machine=attempt(lambda: read_machine(folder)) or "",
        notes=tuple(notes),
    )


def read_machine(run: RunFolder) -> str:
    """Return the machine that status.json names; runs of earlier versions have none."""
    if not has_plain_file(run.status):
        return ""
    status = read_json(run.status)
    machine = status.get("machine") if isinstance(status, dict) else None
    return machine[:LONGEST_NAME] if isinstance(machine, str) else ""


def list_sampled_attention(metrics: Iterable[MetricsLine]) -> list[LineAttention]:
    """Return the attention of the dev sentences at their last validation."""
    found: dict[float, LineAttention] = {}
    for line in metrics:
        if line.kind == "sample" and line.attention is not None and "line" in line.numbers:
            number = line.numbers["line"]
            name = f"dev line {number:.0f}, update {line.step:,}"
            source, translation = line.texts.get("source", ""), line.texts.get("translation", "")
            found[number] = LineAttention(name, source, translation, line.attention)
    return list(found.values())


def count_lengths(store: Path) -> tuple[Histogram, Histogram]:
    """Count how many sentences of the training text have each length in pieces."""
    train = open_store(store, "train")
    return _count_side_lengths(train.src), _count_side_lengths(train.tgt)


def _count_side_lengths(side: Side) -> Histogram:
    counts: dict[int, int] = {}
    for first in range(0, len(side), CHUNK):
        lengths = side.count_pieces(first, min(first + CHUNK, len(side)))
        n_by_length = np.bincount(np.minimum(lengths, LONGEST))
        for length in np.flatnonzero(n_by_length).tolist():
            counts[length] = counts.get(length, 0) + int(n_by_length[length])
    return sorted(counts.items())
