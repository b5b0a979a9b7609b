"""The ledger of a store: what went in, what was kept and dropped and why, and the digests another lab can compare.

`store` is one digest over all data files. It is the same wherever and however the same inputs were prepared; only
`command` and `versions` depend on the machine. A prepared store is recognised by its ledger, or refused with the first
difference.
"""

import hashlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import nmt
from nmt.config import DataConfig, VocabConfig
from nmt.config_files import flatten_settings, to_plain_values
from nmt.corpus.hub import HUB_ADDRESS, name_hub_file
from nmt.corpus.learn_bpe import list_bpe_parts
from nmt.corpus.reader import describe_corpus
from nmt.corpus.text_files import digest_source
from nmt.data.mixture import Mixture, make_mixture
from nmt.data.store import open_store
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.extras import is_installed
from nmt.system.files import has_plain_file, read_file_stamp, read_json
from nmt.system.records import leave_out_none, read_record
from nmt.system.run_folder import LEDGER_FILE
from nmt.system.strict_json import Fields
from nmt.system.tables import Table

# How the files of the ledger looked on this machine, so that none is read again.
SOURCES_FILE = ".sources.json"


@dataclass(frozen=True)
class SourceFile:
    """A file that a corpus was read from."""

    name: str  # as in the config
    size: int
    sha256: str
    lines: int | None  # where they are known


@dataclass(frozen=True)
class CorpusAccount:
    """One corpus: every line of it was kept, or dropped by one rule."""

    corpus: str
    split: str
    files: list[SourceFile]
    lines: int
    kept: int
    tokens: list[int]  # of the source, of the target
    dropped: dict[str, int]
    samples: dict[str, list[list[str]]]
    duplicates: int | None = None  # of training corpora, as is the next
    held_out: dict[str, list[int]] | None = None  # shared pairs, sources and targets by set
    tag: str | None = None
    weight: float | None = None  # of the run that prepared the store; others may have their own

    def check(self) -> str | None:
        if len(self.tokens) != 2:
            return f"tokens has {len(self.tokens)} values, not one for each language"
        if any(len(shared) != 3 for shared in (self.held_out or {}).values()):
            return "held_out must have three values for each set"
        if not self.samples.keys() <= self.dropped.keys():
            return "samples has a rule that dropped nothing"
        if any(len(sample) != 2 for samples in self.samples.values() for sample in samples):
            return "samples must be pairs"
        return None

    @property
    def name(self) -> str:
        name = self.corpus if self.tag is None else f"{self.tag} {self.corpus}"
        return f"{name} (dev)" if self.split == "valid" else name

    @property
    def dropped_by_rule(self) -> str:
        return ", ".join(f"{n:,} {rule}" for rule, n in self.dropped.items())


@dataclass(frozen=True)
class TestSetAccount:
    """The test set that the training text was searched for."""

    corpus: str
    lines: int
    files: list[SourceFile]


@dataclass(frozen=True)
class BpeAccount:
    """Where the BPE comes from; one that was given was learned from 0 lines here."""

    sha256: str
    pieces: int
    lines: int
    words: int
    seed: int | None  # None where no sample had to be drawn


@dataclass(frozen=True)
class Ledger:
    settings: Fields  # plain values, as `list_settings` has them
    corpora: list[CorpusAccount]
    test: TestSetAccount | None
    bpe: BpeAccount  # the joint one, or the source's
    versions: dict[str, str]
    command: str
    data: dict[str, str]  # sha256 of each data file
    store: str  # digest of them all
    tgt_bpe: BpeAccount | None = None

    @property
    def languages(self) -> tuple[str, str]:
        return self.settings["data"]["src"], self.settings["data"]["tgt"]

    @property
    def files(self) -> list[SourceFile]:
        """The files of all corpora and of the test set."""
        files = list_corpus_files(self.corpora)
        if self.test is not None:
            files += self.test.files
        return files

    @property
    def bpes(self) -> list[BpeAccount]:
        """The joint BPE, or those of the source and of the target."""
        return [self.bpe] if self.tgt_bpe is None else [self.bpe, self.tgt_bpe]

    def to_plain(self) -> Fields:
        """What ledger.json holds; a dev set has no entries that only training corpora have, and a
        corpus without a tag or a weight has none.
        """
        values = asdict(self)
        if self.tgt_bpe is None:
            del values["tgt_bpe"]
        values["corpora"] = list(map(leave_out_none, values["corpora"]))
        return values

    def check(self) -> str | None:
        data = self.settings.get("data")
        languages = [data.get("src"), data.get("tgt")] if isinstance(data, dict) else []
        if len(languages) != 2 or not all(isinstance(name, str) for name in languages):
            return "settings do not name the two languages"
        return None


def list_corpus_files(corpora: Sequence[CorpusAccount]) -> list[SourceFile]:
    return [file for corpus in corpora for file in corpus.files]


def read_ledger(store: Path) -> Ledger:
    remedy = (
        "damaged, or written by another version of nmt-prepare; "
        f"remove {store} and prepare it again"
    )
    return read_record(store / LEDGER_FILE, Ledger, remedy)


# ---- what it records --------------------------------------------------------------------------------------------


def list_settings(data: DataConfig, vocab: VocabConfig) -> Fields:
    """List the settings that decide the content of a store.

    These are left out: where the data and the store lie, the number of workers, and what counts only in training: the
    weights of corpora. The run's seed is left out too, although the BPE is learned from a sample
    drawn with it: runs with different seeds share one store, and the ledger notes which seed made it.
    """
    values = to_plain_values(data)
    for name in ("root", "store", "workers", "temperature"):
        del values[name]
    for corpus in values["train"]:
        corpus.pop("weight", None)
    if data.clean.held_out == "keep":
        del values["test"]  # it is counted, but drops nothing
    del values["clean"]["preset"]
    pieces = to_plain_values(vocab)
    del pieces["bpe_dropout"]
    if vocab.model is not None:  # then nothing is learned
        symbols = pieces["user_symbols"]
        pieces = {key: pieces[key] for key in ("joint", "model", "tgt_model")}
        if symbols is not None:
            pieces["user_symbols"] = symbols
    return {"data": values, "vocab": pieces}


def list_versions() -> dict[str, str]:
    """Return the versions of what may change a store."""
    names = ["numpy", "sentencepiece", *filter(is_installed, ("pyarrow", "datasets"))]
    ours = {"python": python_version(), "nmt": nmt.__version__}
    return ours | {name: version(name) for name in names}


def format_command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def digest_store(files: Mapping[str, str]) -> str:
    """Compute one digest over all data files, from their names and digests."""
    # as `sha256sum *` prints it, so that anyone can compute the digest without this code
    lines = "".join(f"{sha}  {name}\n" for name, sha in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def name_file(path: Path, root: str) -> str:
    """Return a file's name as in the config, relative to data.root, or its address on the hub, so that two
    machines write the same ledger.
    """
    path = Path(os.path.abspath(path))
    folder = os.path.abspath(root)
    if path.is_relative_to(folder):
        path = path.relative_to(folder)
    return name_hub_file(path) or str(path)


def stamp_sources(ledger: Ledger, root: str) -> dict[str, list[str | int]]:
    """What `SOURCES_FILE` holds. A file of the hub belongs to a commit, and never changes."""
    names = [file.name for file in ledger.files if not file.name.startswith(HUB_ADDRESS)]
    return {name: _stamp_source(Path(root) / name) for name in names}


def _stamp_source(path: Path) -> list[str | int]:
    return [str(path.resolve()), *read_file_stamp(path)]


# ---- is a store what is wanted? ---------------------------------------------------------------------------------


def check_same(
    store: Path,
    data: DataConfig,
    vocab: VocabConfig,
    trained_on: str | None = None,
    remedy: str = "",
) -> None:
    """Refuse a store that was made with other settings, another BPE model or other files, or whose digest
    is not that of the store that a model was trained on.
    """
    open_store(store, "train")
    ledger = read_ledger(store)
    remedy = remedy or f"give another data.store=DIR or remove {store}"
    if trained_on not in (None, ledger.store):
        raise UserError(f"{store}: holds other text than the model was trained on; {remedy}")

    # the settings
    wanted = list_settings(data, vocab)
    parts = list(zip(list_bpe_parts(vocab), ledger.bpes, strict=False))
    # A file may be gone, as corpora may.
    given = [
        part.load_given(data) if os.path.isfile(Path(data.root) / str(part.vocab.model)) else None
        for part, _ in parts
    ]
    is_same_bpe = [model and model.digest for model in given] == [bpe.sha256 for bpe in ledger.bpes]
    if is_same_bpe:  # wherever it was learned, such as in the run that training starts from
        wanted["vocab"] = ledger.settings["vocab"]
    old = flatten_settings(ledger.settings)
    new = flatten_settings(wanted)
    differences = [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in old | new
        if old.get(key) != new.get(key)
    ]
    if differences:
        shown = ", ".join(differences[:5])
        raise UserError(f"{store}: was prepared with other settings ({shown}); {remedy}")

    # the files
    files = list_corpus_files(ledger.corpora)
    if ledger.test is not None and "test" in wanted["data"]:  # else nothing depends on it
        files += ledger.test.files
    differs = f"differs from the file that {store} was prepared from; {remedy}"
    for (part, account), model in zip(parts, given, strict=True):
        if model is not None and model.digest != account.sha256:
            raise UserError(f"{Path(data.root) / str(part.vocab.model)}: {differs}")
    sources = store / SOURCES_FILE
    known = read_json(sources) if has_plain_file(sources) else {}
    if not isinstance(known, dict):
        raise UserError(f"{sources}: is damaged (not a JSON object); remove it")
    for file in files:
        path = Path(data.root) / file.name
        if not os.path.isfile(path):  # Path.is_file would raise if the name is none
            continue  # raw corpora may be gone: the store is all that training needs
        # A size and a time that have not changed save reading gigabytes; otherwise the digest
        # decides.
        is_same = path.stat().st_size == file.size
        if is_same and known.get(file.name) != _stamp_source(path):
            is_same = digest_source(path) == file.sha256
        if not is_same:
            raise UserError(f"{path}: {differs}")


def find_mixture(ledger: Ledger, data: DataConfig, n_pairs: int) -> Mixture | None:
    """Return how an epoch of the store's `n_pairs` mixes its corpora; None if it has each pair once."""
    if not data.is_mixed:
        return None
    sizes = [c.kept for c in ledger.corpora if c.split == "train"]
    if len(sizes) != len(data.train) or sum(sizes) != n_pairs:
        raise UserError(
            f"{Path(data.store) / LEDGER_FILE}: has corpora of {sum(sizes):,} pairs for the {len(data.train)} of "
            f"data.train, but the store has {n_pairs:,}; prepare another data.store"
        )
    return make_mixture(data, sizes)


def describe_mixture(mixture: Mixture, data: DataConfig) -> str:
    """Say how many pairs of each corpus an epoch has, and how many there are."""
    shares = (
        f"{share.drawn:,} of {describe_corpus(corpus)} ({share.stored:,})"
        for share, corpus in zip(mixture.shares, data.train, strict=True)
    )
    return "pairs of an epoch: " + ", ".join(shares)


# ---- for people -------------------------------------------------------------------------------------------------


def tabulate_corpora(ledger: Ledger) -> Table:
    src, tgt = ledger.languages
    rows = []
    for corpus in ledger.corpora:
        figures = [f"{n:,}" for n in (corpus.lines, corpus.kept, *corpus.tokens)]
        if corpus.weight is not None:
            figures[1] += f" x {corpus.weight:.4g}"
        rows.append([corpus.name, *figures, corpus.dropped_by_rule or "-"])
    return Table(("corpus", "lines", "kept", f"{src} tokens", f"{tgt} tokens", "dropped"), rows)


def format_ledger(ledger: Ledger) -> str:
    """Format what came in, what was kept, what was dropped and why; digests are in the file alone."""
    lines = tabulate_corpora(ledger).to_lines(numbers=range(1, 5))
    for corpus in ledger.corpora:
        lines += _describe_overlaps(corpus)
    return "\n".join(map(escape_line, lines))


def _describe_overlaps(corpus: CorpusAccount) -> list[str]:
    """Describe what a user should know before training on it."""
    notes = []
    if corpus.duplicates:
        notes.append(f"{corpus.corpus}: {corpus.duplicates:,} pairs equal an earlier one")
    for name, (pairs, sources, targets) in (corpus.held_out or {}).items():
        notes.append(
            f"{corpus.corpus}: shares {pairs:,} pairs, {sources:,} sources and {targets:,} targets "
            f"with the {name} set; dropped: {corpus.dropped_by_rule or 'none'}"
        )
    return notes
