"""Reads all that a report can show of a run, from its folder and its store.

A run may be unfinished, old, damaged or a stranger's. So whatever cannot be read is left out with a
note that says why, and the report is still written. Only a folder without settings is refused, because
it is not a run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nmt.config import RunConfig, load_recorded_config
from nmt.corpus.inspection import CHUNK
from nmt.corpus.ledger import Ledger, read_ledger
from nmt.data.store import Side, open_store
from nmt.data.vocab import Vocabulary, load_vocab
from nmt.evaluate.results import Result, read_results
from nmt.evaluate.scored_texts import ScoredTexts, read_scored_texts
from nmt.model.size import count_weights
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import explain_unreadable, has_plain_file, read_bytes, read_json
from nmt.system.run_folder import RunFolder
from nmt.system.strict_yaml import parse_yaml
from nmt.train.events import Event, SampleEvent, read_events

Value = TypeVar("Value")
Place = TypeVar("Place")
LONGEST_NAME = 200  # characters of a machine
LONGEST = 1_000  # pieces; what is longer counts with these
Histogram = NDArray[np.int64]  # how many sentences have each length


@dataclass(frozen=True)
class LineAttention:
    """The attention behind the translation of a line, as attention_view.js draws it."""

    name: str
    source: str
    translation: str
    # Unchecked if training recorded it: the view refuses what it cannot draw.
    values: dict[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """A run, or, with fewer fields, anything that was scored."""

    name: str
    place: str  # as the user wrote it
    settings: dict[str, Any]
    config: RunConfig | None = None
    vocab: Vocabulary | None = None
    events: tuple[Event, ...] = ()
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

    @property
    def languages(self) -> tuple[str, str]:
        """The source and the target language, empty where they are not known."""
        return ("", "") if self.config is None else (self.config.data.src, self.config.data.tgt)

    @property
    def n_weights(self) -> int | None:
        if self.config is None or self.vocab is None:
            return None
        return count_weights(self.config.model, self.vocab.sizes)

    def list_figures(self, key: str) -> list[float]:
        """Return the number that each event has under this key, if it has one."""
        return [event.figures[key] for event in self.events if key in event.figures]


def read_run(path: Path) -> RunFacts:
    folder = RunFolder(path)
    settings = _read_settings(folder.config)
    notes: list[str] = []

    def attempt(read: Callable[[Place], Value], place: Place) -> Value | None:
        """Read something, or note why it cannot be read."""
        try:
            return read(place)
        except UserError as error:
            notes.append(str(error))
        except OSError as error:
            notes.append(f"{error.filename}: cannot be read ({error.strerror})")
        return None

    # the order in which notes are shown
    config = attempt(load_recorded_config, folder.config)
    events, n_damaged = attempt(read_events, folder.metrics) or ([], 0)
    vocab = None
    if any(file.exists() for file in folder.vocabs):
        vocab = attempt(load_vocab, path)
    results = attempt(read_results, path) or []
    texts = attempt(read_scored_texts, path)
    ledger = lengths = None
    if config is not None and Path(config.data.store).is_dir():
        store = Path(config.data.store)
        ledger = attempt(read_ledger, store)
        lengths = attempt(count_lengths, store)
    machine = attempt(read_machine, folder) or ""

    return RunFacts(
        name=escape_line(str(settings.get("name", "run"))),
        place=str(path),
        settings=settings,
        config=config,
        vocab=vocab,
        events=tuple(events),
        n_damaged=n_damaged,
        results=tuple(results),
        texts=texts,
        ledger=ledger,
        lengths=lengths,
        attention=tuple(list_sampled_attention(events)),
        machine=machine,
        notes=tuple(notes),
    )


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a run as they were written, even if this version would refuse them."""
    try:
        with explain_unreadable(path, "; give a run folder"):
            text = read_bytes(path).decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: cannot be read (not UTF-8); give a run folder") from None
    return parse_yaml(text, str(path)).values


def read_machine(run: RunFolder) -> str:
    """Return the machine that status.json names; runs of earlier versions have none."""
    if not has_plain_file(run.status):
        return ""
    status = read_json(run.status)
    machine = status.get("machine") if isinstance(status, dict) else None
    return machine[:LONGEST_NAME] if isinstance(machine, str) else ""


def list_sampled_attention(events: Iterable[Event]) -> list[LineAttention]:
    """Return the attention of the dev sentences at their last validation."""
    found: dict[int, LineAttention] = {}
    for event in events:
        if isinstance(event, SampleEvent) and event.attention is not None and event.line:
            name = f"dev line {event.line}, update {event.step:,}"
            found[event.line] = LineAttention(
                name, event.source, event.translation, event.attention
            )
    return list(found.values())


def count_lengths(store: Path) -> tuple[Histogram, Histogram]:
    """Count how many sentences of the training text have each length in pieces."""
    train = open_store(store, "train")
    return _count_side_lengths(train.src), _count_side_lengths(train.tgt)


def _count_side_lengths(side: Side) -> Histogram:
    counts = np.zeros(LONGEST + 1, np.int64)
    for first in range(0, len(side), CHUNK):
        lengths = side.count_pieces(first, min(first + CHUNK, len(side)))
        counts += np.bincount(np.minimum(lengths, LONGEST), minlength=len(counts))
    return np.trim_zeros(counts, "b")
