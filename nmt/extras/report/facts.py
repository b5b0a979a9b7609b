"""Reads all that a report can show of a run, from its folder and its store.

A run may be unfinished, old, damaged or a stranger's. So whatever cannot be read is left out with a
note that says why, and the report is still written. Only a folder without settings is refused, because
it is not a run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nmt.config import RunConfig
from nmt.config_files import load_recorded_config
from nmt.corpus.ledger import Ledger, read_ledger
from nmt.data.vocab import Vocabulary, load_vocab
from nmt.evaluate.results import Result, choose_headline, read_results
from nmt.evaluate.scored_texts import ScoredTexts, read_scored_texts
from nmt.model.size import count_weights
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import read_bytes
from nmt.system.run_folder import RunFolder
from nmt.system.strict_json import Fields
from nmt.system.strict_yaml import parse_yaml
from nmt.train.events import Event, read_events

Value = TypeVar("Value")
Place = TypeVar("Place")


@dataclass(frozen=True)
class RunFacts:
    """A run, or, with fewer fields, anything that was scored."""

    name: str
    settings: Fields
    config: RunConfig | None = None
    vocab: Vocabulary | None = None
    events: tuple[Event, ...] = ()
    n_damaged: int = 0  # lines of metrics.jsonl
    results: tuple[Result, ...] = ()
    texts: ScoredTexts | None = None
    ledger: Ledger | None = None
    notes: tuple[str, ...] = ()  # what could not be read, and why

    @property
    def headline(self) -> Result | None:
        """The result that a run is known by."""
        return choose_headline(self.results, self.config)

    @property
    def n_updates(self) -> int:
        return self.events[-1].step if self.events else 0

    @property
    def languages(self) -> tuple[str, str]:
        """The source and the target language, empty where they are not known."""
        return ("", "") if self.config is None else (self.config.data.src, self.config.data.tgt)

    @property
    def n_weights(self) -> int | None:
        if self.config is None or self.vocab is None:
            return None
        return count_weights(self.config.model, self.vocab.sizes)


def read_run(path: Path) -> RunFacts:
    folder = RunFolder(path)
    settings = _read_settings(folder.config)
    notes: list[str] = []

    def attempt(read: Callable[[Place], Value], source: Place) -> Value | None:
        """Read something, or note why it cannot be read."""
        try:
            return read(source)
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
    ledger = None
    if config is not None and Path(config.data.store).is_dir():
        ledger = attempt(read_ledger, Path(config.data.store))

    return RunFacts(
        name=escape_line(str(settings.get("name", "run"))),
        settings=settings,
        config=config,
        vocab=vocab,
        events=tuple(events),
        n_damaged=n_damaged,
        results=tuple(results),
        texts=texts,
        ledger=ledger,
        notes=tuple(notes),
    )


def _read_settings(path: Path) -> Fields:
    """Read the settings of a run as they were written, even if this version would refuse them."""
    try:
        text = read_bytes(path, remedy="; give a run folder").decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: cannot be read (not UTF-8); give a run folder") from None
    return parse_yaml(text, str(path)).values
