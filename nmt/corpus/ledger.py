"""The ledger of a store: what went in, what was kept and dropped and why, and the digests another lab can compare.

`store` is one digest over all data files. It is the same wherever and however the same inputs were prepared; only
`command` and `versions` tell of the machine. A prepared store is recognised by its ledger, or refused with the first
difference.
"""

import hashlib
import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from nmt.config import DataConfig, VocabConfig, to_dict
from nmt.data.store import open_store
from nmt.system.errors import UserError
from nmt.system.files import digest, read_json, stamp
from nmt.system.run_folder import LEDGER_FILE, VOCAB_FILE

SOURCES = ".sources.json"  # how the files of the ledger were found on this machine, so that none is read again
Json = dict[str, Any]


def settings(data: DataConfig, vocab: VocabConfig) -> Json:
    """What decides the content of a store. Not where it lies, nor how many workers made it, nor the run's seed, which
    only draws the BPE's sample: the ledger notes it, and the runs of several seeds share one store."""
    values, pieces = to_dict(data), to_dict(vocab)
    for name in ("root", "store", "workers", *(["test"] if data.clean.held_out == "keep" else [])):
        del values[name]
    del values["clean"]["preset"], pieces["bpe_dropout"]
    if vocab.model is not None:  # then nothing is learned
        pieces = {"model": vocab.model}
    return {"data": values, "vocab": pieces}


def versions() -> dict[str, str]:
    names = ("nmt", "numpy", "sentencepiece", "pyarrow", "datasets")
    return {"python": python_version()} | {name: version(name) for name in names}


def command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def store_digest(files: dict[str, str]) -> str:
    """One digest of all data files, by name and sha256."""
    return hashlib.sha256(
        "".join(f"{sha}  {name}\n" for name, sha in sorted(files.items())).encode()
    ).hexdigest()


def listed(path: Path, root: str) -> str:
    """A file's name as in the config: relative to data.root, so that two machines write the same ledger."""
    path, folder = Path(os.path.abspath(path)), os.path.abspath(root)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def check_same(store: Path, data: DataConfig, vocab: VocabConfig) -> None:
    """`UserError` where the store was made with other settings, another BPE model or other files."""
    open_store(store, "train")
    ledger = read_json(store / LEDGER_FILE)
    if not isinstance(ledger, dict) or not ledger.keys() >= {
        "settings",
        "corpora",
        "test",
        "bpe",
        "store",
    }:
        raise UserError(
            f"{store / LEDGER_FILE}: damaged, or of another version; remove {store} and prepare again"
        )
    remedy = "give another data.store=DIR or remove that folder"
    wanted = settings(data, vocab)
    old, new = _flat(ledger["settings"]), _flat(wanted)
    differing = [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]
    if differing:
        raise UserError(
            f"{store}: prepared with other settings: {', '.join(differing[:5])}; {remedy}"
        )
    known = read_json(store / SOURCES) if (store / SOURCES).is_file() else {}
    corpora = [*ledger["corpora"], *([ledger["test"]] if "test" in wanted["data"] else [])]
    files = [
        (file["name"], file["size"], file["sha256"])
        for corpus in corpora
        for file in corpus["files"]
    ]
    if vocab.model is not None:
        files.append((vocab.model, (store / VOCAB_FILE).stat().st_size, ledger["bpe"]["sha256"]))
    for name, size, sha in files:
        path = Path(data.root) / name
        if not path.is_file():  # the store is all that training needs
            continue
        now = [str(path.resolve()), *stamp(path)]
        if path.stat().st_size != size or (known.get(name) != now and digest(path) != sha):
            raise UserError(f"{path}: not the file that {store} was prepared from; {remedy}")


def _flat(value: Any, key: str = "") -> Json:
    """{"data": {"train": [{"src": "x"}]}} -> {"data.train[0].src": "x"}"""
    inner = {}
    if isinstance(value, dict):
        inner = {f"{key}.{name}".removeprefix("."): item for name, item in value.items()}
    elif isinstance(value, list):
        inner = {f"{key}[{i}]": item for i, item in enumerate(value)}
    return (
        {k: v for name, item in inner.items() for k, v in _flat(item, name).items()}
        if inner
        else {key: value}
    )


def ledger_table(ledger: Json) -> str:
    """The ledger for people: what came in, what was kept, what was dropped and why."""
    src, tgt = ledger["settings"]["data"]["src"], ledger["settings"]["data"]["tgt"]
    rows = [("corpus", "lines", "kept", f"{src} tokens", f"{tgt} tokens", "dropped")]
    for corpus in ledger["corpora"]:
        name = corpus["corpus"] + (" (dev)" if corpus["split"] == "valid" else "")
        dropped = ", ".join(f"{n:,} {rule}" for rule, n in corpus["dropped"].items()) or "-"
        times = f" x {corpus['repeat']}" if corpus["repeat"] > 1 else ""
        rows.append(
            (
                name,
                f"{corpus['lines']:,}",
                f"{corpus['kept']:,}{times}",
                *(f"{n:,}" for n in corpus["tokens"]),
                dropped,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:5], widths[1:5]), row[5]])
        for row in rows
    ]
    lines += [note for corpus in ledger["corpora"] for note in _notes(corpus)]
    lines += [
        f"{file['sha256']}  {file['name']} ({file['size']:,} bytes, {file['lines']:,} lines)"
        for corpus in (*ledger["corpora"], ledger["test"] or {"files": []})
        for file in corpus["files"]
    ]
    bpe = ledger["bpe"]
    origin = (
        f"learned from {bpe['words']:,} words of {bpe['lines']:,} lines"
        if bpe["lines"]
        else "given"
    )
    lines.append(f"{bpe['sha256']}  BPE of {bpe['pieces']:,} pieces, {origin}")
    lines.append(f"{ledger['store']}  the store")
    return "\n".join(lines)


def _notes(corpus: Json) -> list[str]:
    """What a reader should know before training on it."""
    notes = (
        [f"{corpus['corpus']}: {corpus['duplicates']:,} pairs equal an earlier one"]
        if corpus.get("duplicates")
        else []
    )
    for name, (pairs, sources, targets) in corpus.get("held_out", {}).items():
        notes.append(
            f"{corpus['corpus']}: shares {pairs:,} pairs, {sources:,} sources and {targets:,} targets with "
            f"the {name} set"
        )
    return notes
