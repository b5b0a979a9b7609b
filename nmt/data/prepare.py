"""From raw corpora to a sealed store, in stages: collect each corpus, learn the BPE, encode, seal.

A stage leaves its files in `STORE.work/` and then a marker that says what they were made with; a run killed at any
moment finds the finished stages and does the others again, and ends with the same bytes. The store appears by one
rename: complete or absent. Its ledger accounts for every line; nothing in it depends on the machine or the clock.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig, to_dict
from nmt.data.corpus import Pair, clean, describe, local_files, read_pairs
from nmt.data.store import LEDGER, VOCAB, SideWriter
from nmt.data.vocab import Vocab, learn
from nmt.errors import UserError
from nmt.files import MANIFEST, digest, lock, make_folder, read_json, seal, sync, write_json
from nmt.progress import Progress, say

SIDES = ("src", "tgt")
CHUNK = 16_384  # pairs in memory at a time
Json = dict[str, Any]


def prepare(data: DataConfig, vocab: VocabConfig, seed: int) -> bool:
    """Make `data.store` unless it is there: True if work was done, `UserError` if it was made with other settings."""
    store = Path(data.store).resolve()
    work = store.with_name(f"{store.name}.work")
    if (store / MANIFEST).is_file():
        _check_same(store, data, vocab)
        shutil.rmtree(work, ignore_errors=True)  # left by a run killed after its last rename
        return False
    if store.is_file() or (store.is_dir() and any(store.iterdir())):
        raise UserError(f"{store}: exists and is not a prepared store; give another data.store=DIR or remove it")
    parts = _parts(data)
    for part in parts:
        local_files(part.corpus, data)  # a missing file is told now, not after an hour
    with lock(make_folder(work), "preparing"):
        if (store / MANIFEST).is_file():  # another process was faster
            return prepare(data, vocab, seed)
        _build(store, work, parts, data, vocab, seed)
    return True


@dataclass(frozen=True)
class Part:
    """One corpus on its way, in `NAME.src.txt` and `NAME.tgt.txt`. The dev set is taken as it is."""

    name: str
    corpus: CorpusConfig
    rules: CleanConfig | None

    @property
    def split(self) -> str:
        return "valid" if self.rules is None else "train"

    def file(self, work: Path, side: str) -> Path:
        return work / f"{self.name}.{side}.txt"


def _parts(data: DataConfig) -> list[Part]:
    if not data.train:
        raise UserError("data.train: no corpus given; for example data.train=[{src: train.en, tgt: train.de}]")
    train = [Part(f"train-{i}", corpus, data.clean) for i, corpus in enumerate(data.train)]
    return train + ([Part("valid", replace(data.valid, repeat=1), None)] if data.valid else [])


def _build(store: Path, work: Path, parts: list[Part], data: DataConfig, vocab: VocabConfig, seed: int) -> None:
    corpora = [_stage(work / f"{part.name}.json", _origin(part, data), partial(_collect, part, work, data))
               for part in parts]
    n_lines = sum(2 * corpus["kept"] for corpus in corpora if corpus["split"] == "train")
    if not n_lines:
        raise UserError("data.train: no pair is left after cleaning; look at data.clean and at the corpora")
    texts = [corpus["text"] for corpus in corpora]
    bpe = _stage(work / "bpe.json", {"texts": texts, "vocab": to_dict(vocab), "seed": seed},
                 partial(_learn, parts, n_lines, work, vocab, seed))
    made_of = {"texts": texts, "bpe": bpe, "max_pieces": data.clean.max_pieces,
               "repeats": [part.corpus.repeat for part in parts]}
    counts = _stage(work / "encoded.json", made_of, partial(_encode, parts, work, data))
    for corpus, more in zip(corpora, counts, strict=True):
        corpus["dropped"] |= more.pop("dropped")
        corpus |= more
    ledger = {"settings": _settings(data, vocab), "corpora": corpora, "bpe": bpe,
              "versions": {name: version(name) for name in ("sentencepiece", "numpy")}}
    _finish(store, work / "store", ledger)
    shutil.rmtree(work, ignore_errors=True)
    say(ledger_table(ledger))


def _stage(marker: Path, made_with: Json, make: Callable[[], Any]) -> Any:
    """What `make` returns, or returned in an earlier run with the same inputs: files first, then the marker."""
    if marker.is_file():
        found = read_json(marker)
        if found["made_with"] == made_with:
            return found["result"]
        marker.unlink()
        sync(marker.parent)
    result = make()
    write_json(marker, {"made_with": made_with, "result": result})
    return result


# ---- collect ----------------------------------------------------------------------------------------------------

def _origin(part: Part, data: DataConfig) -> Json:
    """All that decides what collecting gives. Times of files are of this machine: they stay in the work folder."""
    stamps = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in local_files(part.corpus, data)]
    rules = part.rules and to_dict(replace(part.rules, max_pieces=None))
    return {"corpus": to_dict(replace(part.corpus, repeat=1)), "src": data.src, "tgt": data.tgt, "rules": rules,
            "files": stamps}


def _collect(part: Part, work: Path, data: DataConfig) -> Json:
    name = describe(part.corpus)
    dropped: Counter[str] = Counter()
    pairs = read_pairs(part.corpus, data)
    n_kept, hashes = 0, [hashlib.sha256(), hashlib.sha256()]
    with (open(part.file(work, "src"), "wb") as src, open(part.file(work, "tgt"), "wb") as tgt,
          closing(Progress(f"collect {name}", None, "pairs")) as progress):
        for chunk in _chunks(pairs if part.rules is None else clean(pairs, part.rules, dropped)):
            for file, text_hash, lines in zip((src, tgt), hashes, zip(*chunk, strict=True), strict=True):
                text = "".join(f"{line}\n" for line in lines).encode()
                file.write(text)
                text_hash.update(text)
            n_kept += len(chunk)
            progress.advance(len(chunk))
    for side in SIDES:
        sync(part.file(work, side))
    files = [{"name": _name(path, data.root), "size": path.stat().st_size, "sha256": digest(path)}
             for path in local_files(part.corpus, data)]
    return {"corpus": name, "split": part.split, "files": files, "lines": n_kept + dropped.total(), "kept": n_kept,
            "dropped": dict(sorted(dropped.items())), "repeat": part.corpus.repeat,
            "text": [text_hash.hexdigest() for text_hash in hashes]}


def _name(path: Path, root: str) -> str:
    """As in the config: relative to data.root, so that two machines write the same ledger."""
    path, folder = Path(os.path.abspath(path)), os.path.abspath(root)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _chunks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    pairs = iter(pairs)
    while chunk := list(islice(pairs, CHUNK)):
        yield chunk


def _lines(path: Path) -> Iterator[str]:
    """A file of ours, exactly: a line that begins with a byte order mark keeps it."""
    with open(path, "rb") as file:
        for line in file:
            yield line[:-1].decode()


# ---- learn and encode -------------------------------------------------------------------------------------------

def _learn(parts: list[Part], n_lines: int, work: Path, vocab: VocabConfig, seed: int) -> Json:
    """The joint BPE of both sides of all training corpora, each taken once whatever its `repeat`."""
    wanted = min(n_lines, vocab.sample_sentences)
    say(f"learning a joint BPE of {vocab.size:,} pieces from {wanted:,} of {n_lines:,} lines")
    files = [part.file(work, side) for part in parts if part.split == "train" for side in SIDES]
    lines = chain.from_iterable(map(_lines, files))
    model = learn(_sample(lines, n_lines, wanted, seed), vocab)
    (work / VOCAB).write_bytes(model)
    sync(work / VOCAB)
    return {"sha256": Vocab(model).digest, "pieces": vocab.size, "lines": wanted,
            "seed": seed if wanted < n_lines else None}


def _sample(lines: Iterable[str], n_lines: int, wanted: int, seed: int) -> Iterator[str]:
    """`wanted` of `n_lines` lines in their order, each choice equally likely, in no memory (Knuth's algorithm S)."""
    draw = Random(seed).random
    for left, line in zip(range(n_lines, 0, -1), lines, strict=True):
        if draw() * left < wanted:
            wanted -= 1
            yield line


def _encode(parts: list[Part], work: Path, data: DataConfig) -> list[Json]:
    folder = work / "store"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(work / VOCAB, folder / VOCAB)
    vocab = Vocab.load(folder / VOCAB)
    counts = []
    for split in dict.fromkeys(part.split for part in parts):
        with closing(SideWriter(folder, split, "src")) as src, closing(SideWriter(folder, split, "tgt")) as tgt:
            counts += [_encode_part(part, work, (src, tgt), vocab, data.workers)
                       for part in parts if part.split == split]
    for part in parts:
        if part.split == "valid":
            for side in SIDES:
                shutil.copyfile(part.file(work, side), folder / f"valid.{side}.txt")
    return counts


def _encode_part(part: Part, work: Path, writers: tuple[SideWriter, SideWriter], vocab: Vocab, workers: int) -> Json:
    limit = part.rules.max_pieces if part.rules else None
    n_kept, dropped, tokens = 0, 0, [writer.n_tokens for writer in writers]
    with closing(Progress(f"encode {part.name}", None, "pairs")) as progress:
        for chunk in _chunks(map(Pair, *(_lines(part.file(work, side)) for side in SIDES))):
            pairs = list(zip(*(vocab.encode(lines, workers) for lines in zip(*chunk, strict=True)), strict=True))
            kept = [pair for pair in pairs if limit is None or max(map(len, pair)) <= limit]
            for writer, ids in zip(writers, zip(*kept, strict=True), strict=True) if kept else ():
                for _ in range(part.corpus.repeat):
                    writer.append(ids)
            n_kept += len(kept)
            dropped += len(pairs) - len(kept)
            progress.advance(len(chunk))
    return {"kept": n_kept, "dropped": {f"more than {limit} pieces": dropped} if dropped else {},
            "tokens": [writer.n_tokens - before for writer, before in zip(writers, tokens, strict=True)]}


# ---- seal and recognise -----------------------------------------------------------------------------------------

def _finish(store: Path, folder: Path, ledger: Json) -> None:
    if not any(corpus["kept"] for corpus in ledger["corpora"] if corpus["split"] == "train"):
        raise UserError(f"data.clean.max_pieces={ledger['settings']['data']['clean']['max_pieces']}: no pair is left")
    for file in folder.iterdir():
        if file.name[0] == "." or file.name in (LEDGER, MANIFEST):  # of a run killed at this point
            file.unlink()
    ledger["data"] = {file.name: digest(file) for file in sorted(folder.iterdir())}
    write_json(folder / LEDGER, ledger)
    seal(folder)
    os.rename(folder, store)
    sync(store.parent)


def _settings(data: DataConfig, vocab: VocabConfig) -> Json:
    """What decides the content of a store. Not where it lies, nor how many workers made it, nor the run's seed, which
    only draws the BPE's sample: the ledger notes it, and the runs of several seeds share one store."""
    settings = to_dict(data)
    for name in ("root", "store", "workers", "test"):
        del settings[name]
    return {"data": settings, "vocab": to_dict(vocab)}


def _check_same(store: Path, data: DataConfig, vocab: VocabConfig) -> None:
    ledger = read_json(store / LEDGER)
    remedy = "give another data.store=DIR or remove that folder"
    old, new = _flat(ledger["settings"]), _flat(_settings(data, vocab))
    differing = [f"{key} {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]
    if differing:
        raise UserError(f"{store}: prepared with other settings: {', '.join(differing[:5])}; {remedy}")
    sealed = (store / MANIFEST).stat().st_mtime_ns
    for file in (file for corpus in ledger["corpora"] for file in corpus["files"]):
        path = Path(data.root) / file["name"]
        if not path.is_file():  # the store is all that training needs
            continue
        status = path.stat()
        is_newer = max(status.st_mtime_ns, status.st_ctime_ns) > sealed
        if status.st_size != file["size"] or (is_newer and digest(path) != file["sha256"]):
            raise UserError(f"{path}: not the file that {store} was prepared from; {remedy}")


def _flat(value: Any, key: str = "") -> Json:
    """{"data": {"train": [{"src": "x"}]}} -> {"data.train[0].src": "x"}"""
    inner = {}
    if isinstance(value, dict):
        inner = {f"{key}.{name}".removeprefix("."): item for name, item in value.items()}
    elif isinstance(value, list):
        inner = {f"{key}[{i}]": item for i, item in enumerate(value)}
    return {k: v for name, item in inner.items() for k, v in _flat(item, name).items()} if inner else {key: value}


def ledger_table(ledger: Json) -> str:
    """The ledger for people: what came in, what was kept, what was dropped and why."""
    src, tgt = ledger["settings"]["data"]["src"], ledger["settings"]["data"]["tgt"]
    rows = [("corpus", "lines", "kept", f"{src} tokens", f"{tgt} tokens", "dropped")]
    for corpus in ledger["corpora"]:
        name = corpus["corpus"] + (" (dev)" if corpus["split"] == "valid" else "")
        dropped = ", ".join(f"{n:,} {rule}" for rule, n in corpus["dropped"].items()) or "-"
        times = f" x {corpus['repeat']}" if corpus["repeat"] > 1 else ""
        rows.append((name, f"{corpus['lines']:,}", f"{corpus['kept']:,}{times}",
                     *(f"{n:,}" for n in corpus["tokens"]), dropped))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:5], widths[1:5]), row[5]]) for row in rows]
    lines += [f"{file['sha256']}  {file['name']} ({file['size']:,} bytes)"
              for corpus in ledger["corpora"] for file in corpus["files"]]
    lines.append(f"{ledger['bpe']['sha256']}  BPE of {ledger['bpe']['pieces']:,} pieces, "
                 f"learned from {ledger['bpe']['lines']:,} lines")
    return "\n".join(lines)
