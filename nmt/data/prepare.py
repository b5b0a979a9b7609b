"""From raw corpora to a sealed store, in stages: collect each corpus, find its repeats, learn the BPE, encode, seal.

A stage works in a folder of `STORE.work/` that is named after all that decides its result, shard by shard; a run killed
at any moment passes over what is finished and ends with the same bytes. The store appears by one rename: complete or
absent. Its ledger accounts for every line, and its digest depends neither on the machine nor on the number of workers.
"""

import errno
import hashlib
import io
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig, to_dict
from nmt.data import shard
from nmt.data.clean import duplicates
from nmt.data.corpus import describe, local_files, n_rows, read_blocks, read_pairs
from nmt.data.ledger import check_same, command, ledger_table, listed, settings, store_digest, versions
from nmt.data.shard import SHARD, WORDS, Text, add_up, finished, shard_file
from nmt.data.store import LEDGER, VOCAB, SideWriter
from nmt.data.vocab import Vocab, learn, write_words
from nmt.errors import UserError
from nmt.files import MANIFEST, digest, lock, make_folder, read_json, seal, sync, write_bytes, write_json
from nmt.progress import Progress, clock, say
from nmt.workers import apart, ordered

FEW_LINES = 200_000  # whose words need not be counted in a process of their own
PACKED = (".gz", ".xz", ".zst", ".tgz", ".parquet")
Json = dict[str, Any]
Stage = tuple[Path, Json]  # its folder, and what its `done.json` says


def prepare(data: DataConfig, vocab: VocabConfig, seed: int) -> bool:
    """Make `data.store` unless it is there: True if work was done, `UserError` if it was made with other settings."""
    store = Path(data.store).resolve()
    work = store.with_name(f"{store.name}.work")
    with lock(make_folder(store.parent), "preparing", f".{store.name}.lock"):
        if (store / MANIFEST).is_file():
            check_same(store, data, vocab)
            shutil.rmtree(work, ignore_errors=True)  # left by a run killed after its last rename
            return False
        if store.is_file() or (store.is_dir() and any(store.iterdir())):
            raise UserError(f"{store}: exists and is not a prepared store; give another data.store=DIR or remove it")
        parts = _parts(data)
        files = [file for part in parts for file in local_files(part.corpus, data)]  # a missing one is told now
        if shutil.disk_usage(store.parent).free + _used(work) < _needed(files) // 2:  # not even room for the text
            raise UserError(_full(work, files))
        try:
            _build(store, make_folder(work), parts, data, vocab, seed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(_full(work, files)) from None
        finally:
            if work.is_dir() and not any(work.rglob("?????.json")):  # nothing to go on from
                shutil.rmtree(work)
    return True


def _needed(files: Iterable[Path]) -> int:
    """About how many bytes the work takes: the text, and its ids twice, which are half as large."""
    return 2 * sum(file.stat().st_size * (3 if file.suffix in PACKED else 1) for file in files)


def _used(work: Path) -> int:
    return sum(file.stat().st_size for file in work.rglob("*.*"))


def _full(work: Path, files: list[Path]) -> str:
    return (f"{work.parent}: the disk is full: about {_needed(files):,} bytes are needed, {_used(work):,} of them are "
            f"written and {shutil.disk_usage(work.parent).free:,} are free; make room or give another data.store=DIR, "
            "and run it again: what is finished is kept")


# ---- the course -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Part:
    """One corpus on its way. The dev set has no rules: it is taken as it is."""

    name: str
    corpus: CorpusConfig
    rules: CleanConfig | None

    @property
    def split(self) -> str:
        return "valid" if self.rules is None else "train"


def _parts(data: DataConfig) -> list[Part]:
    """The dev set comes first: the training text is held against it."""
    if not data.train:
        raise UserError("data.train: no corpus given; for example data.train=[{src: train.en, tgt: train.de}]")
    train = [Part(f"train-{i}", corpus, data.clean) for i, corpus in enumerate(data.train)]
    return ([Part("valid", replace(data.valid, repeat=1), None)] if data.valid else []) + train


def _build(store: Path, work: Path, parts: list[Part], data: DataConfig, vocab: VocabConfig, seed: int) -> None:
    meter = _Meter()
    collected = {part.name: _collect(part, work, data, None, meter) for part in parts if not part.rules}
    sets = _hold_out(work, collected.get("valid"), data)
    collected |= {part.name: _collect(part, work, data, sets, meter) for part in parts if part.rules}
    meter.tell("collect")
    texts = _texts(parts, collected)
    repeats, counts = _find_repeats(work, parts, collected)
    meter.n_lines = sum(2 * text.n_pairs for part in parts if part.rules for text in texts[part.name])
    meter.tell("repeats")
    marks = repeats / "repeats.npy" if data.clean.duplicates else None
    bpe_folder, bpe = _learn(work, [text for part in parts if part.rules for text in texts[part.name]], marks,
                             [collected[part.name][1]["text"] for part in parts if part.rules], data, vocab, seed,
                             meter)
    meter.tell("learn")
    encoded = {part.name: _encode(part, work, texts[part.name], collected[part.name], bpe_folder,
                                  marks if part.rules else None, data, meter) for part in parts}
    meter.tell("encode")
    corpora = [_account(part, collected[part.name][1], encoded[part.name][1], counts)
               for part in sorted(parts, key=lambda part: part.rules is None)]
    if not any(corpus["kept"] for corpus in corpora if corpus["split"] == "train"):
        raise UserError("data.train: no pair is left after cleaning; look at data.clean and at the corpora")
    ledger = {"settings": settings(data, vocab), "corpora": corpora, "bpe": bpe, "versions": versions(),
              "command": command()}
    _seal(store, work / "store", parts, texts, encoded, bpe_folder / VOCAB, ledger, meter)
    shutil.rmtree(work, ignore_errors=True)
    meter.tell("seal")
    say(ledger_table(ledger))


def _stage(work: Path, name: str, made_with: Json, make: Callable[[Path], Json]) -> Stage:
    """What `make` leaves in its folder and returns; done once for all that decides it, `made_with`."""
    key = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()
    folder = work / f"{name}.{key[:16]}"
    if not (folder / "done.json").is_file():
        for other in work.glob(f"{name}.*"):
            if other != folder:  # of other settings
                shutil.rmtree(other)
        folder.mkdir(exist_ok=True)
        write_json(folder / "done.json", make(folder))
    return folder, read_json(folder / "done.json")


class _Meter:
    """How long the stages take, and how many lines pass in them."""

    def __init__(self) -> None:
        self.began, self.n_lines = clock(), 0

    def tell(self, stage: str) -> None:
        seconds = clock() - self.began
        say(f"stage {stage}: {seconds:.1f} s, {self.n_lines:,} lines, {self.n_lines / seconds:,.0f}/s")
        self.began, self.n_lines = clock(), 0


# ---- collect ----------------------------------------------------------------------------------------------------

def _collect(part: Part, work: Path, data: DataConfig, sets: Path | None, meter: _Meter) -> Stage:
    """The cleaned text of a corpus, and the account of its lines."""
    files = local_files(part.corpus, data)
    stamps = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    rules = part.rules and to_dict(replace(part.rules, preset=None, duplicates=False, max_pieces=None))
    made_with = {"corpus": to_dict(replace(part.corpus, repeat=1)), "src": data.src, "tgt": data.tgt, "files": stamps,
                 "rules": rules, "on_bad_line": data.on_bad_line, "shard": SHARD, "held_out": sets and digest(sets)}

    def make(folder: Path) -> Json:
        done = finished(folder)
        first = next(n for n in itertools.count() if n not in done)
        n_shards = first
        with closing(Progress(f"collect {describe(part.corpus)}", None, "lines")) as progress:
            def todo() -> Iterator[tuple[int, Any]]:
                nonlocal n_shards
                for block in read_blocks(part.corpus, data, SHARD, skip=first):
                    n_shards += 1
                    progress.expect(int(2 * (n_shards - first) * SHARD / max(block.share, 1e-9)))
                    if n_shards - 1 not in done:
                        yield n_shards - 1, block
            for report in ordered(partial(shard.collect, folder, part.rules, sets), todo(), data.workers):
                progress.advance(2 * report["lines"])
                meter.n_lines += 2 * report["lines"]
        account = add_up([read_json(shard_file(folder, n, "json")) for n in range(n_shards)])
        with ThreadPoolExecutor(data.workers) as threads:
            digests = list(threads.map(digest, files))
        account["files"] = [{"name": listed(path, data.root), "size": path.stat().st_size, "sha256": sha,
                             "lines": account["lines"] if (n := n_rows(path)) is None else n}
                            for path, sha in zip(files, digests, strict=True)]
        return account

    return _stage(work, part.name, made_with, make)


def _hold_out(work: Path, valid: Stage | None, data: DataConfig) -> Path:
    """The dev and test sets in one file. A test set that cannot be had is an error only if it decides what is kept."""
    sets: dict[str, list[Any]] = {}
    if valid:
        lines = [line.decode() for text in _shard_texts(valid[0], 0) for line in text.lines()]
        sets["dev"] = list(zip(lines[0::2], lines[1::2], strict=True))
    if data.test:
        try:
            sets["test"] = list(read_pairs(data.test, data))
        except UserError as error:
            if data.clean.held_out != "keep":
                raise
            say(f"note: the training text is not searched for sentences of the test set: {error}")
    text = json.dumps(sets).encode()
    path = work / f"held-out.{hashlib.sha256(text).hexdigest()[:16]}.json"
    write_bytes(path, text)
    return path


def _shard_texts(folder: Path, first: int) -> list[Text]:
    texts = []
    for number in sorted(finished(folder)):
        texts.append(Text(shard_file(folder, number, "txt"), read_json(shard_file(folder, number, "json"))["kept"],
                          first))
        first += texts[-1].n_pairs
    return texts


def _texts(parts: list[Part], collected: dict[str, Stage]) -> dict[str, list[Text]]:
    """The shards of each part; those of training know their place in the whole."""
    texts, first = {}, 0
    for part in parts:
        folder, account = collected[part.name]
        texts[part.name] = _shard_texts(folder, first if part.rules else 0)
        first += account["kept"] if part.rules else 0
    return texts


def _find_repeats(work: Path, parts: list[Part], collected: dict[str, Stage]) -> tuple[Path, dict[str, int]]:
    """Which training pairs equal an earlier one, in `repeats.npy`, and how many of each part."""
    train = [part.name for part in parts if part.rules]

    def make(folder: Path) -> Json:
        is_repeat = duplicates([shard_file(collected[name][0], number, "digests") for name in train
                                for number in sorted(finished(collected[name][0]))])
        _write_array(folder / "repeats.npy", is_repeat)
        ends = np.cumsum([collected[name][1]["kept"] for name in train])
        return {name: int(part.sum()) for name, part in zip(train, np.split(is_repeat, ends[:-1]), strict=True)}

    return _stage(work, "repeats", {name: collected[name][1]["text"] for name in train}, make)


def _write_array(path: Path, array: np.ndarray) -> None:
    data = io.BytesIO()
    np.save(data, array)
    write_bytes(path, data.getvalue())


# ---- learn and encode -------------------------------------------------------------------------------------------

def _learn(work: Path, texts: list[Text], marks: Path | None, text_digests: list[str], data: DataConfig,
           vocab: VocabConfig, seed: int, meter: _Meter) -> Stage:
    """The joint BPE of both sides of all training corpora, each taken once whatever its `repeat`."""
    n_lines = [2 * int((~text.repeats(marks)).sum()) for text in texts]
    wanted = min(sum(n_lines), vocab.sample_sentences)
    if not wanted:
        raise UserError("data.train: no pair is left after cleaning; look at data.clean and at the corpora")
    given = None if vocab.model is None else Vocab.load(Path(data.root) / vocab.model)

    def make(folder: Path) -> Json:
        if given is not None:
            write_bytes(folder / VOCAB, given.model)
            return {"sha256": given.digest, "pieces": given.size, "lines": 0, "words": 0, "seed": None}
        draw = np.random.Generator(np.random.Philox(seed))  # each line is equally likely to be among them
        quotas = draw.multivariate_hypergeometric(n_lines, wanted, method="marginals").tolist()
        tasks = [(text, quota, (seed, i)) for i, (text, quota) in enumerate(zip(texts, quotas, strict=True))]
        learning = partial(_learn_words, folder, tasks, marks, data.workers)
        n_words = learning(vocab) if wanted <= FEW_LINES else apart(learning, vocab)
        meter.n_lines += wanted
        return {"sha256": digest(folder / VOCAB), "pieces": vocab.size, "lines": wanted, "words": n_words,
                "seed": seed if wanted < sum(n_lines) else None}

    made_with = {"texts": text_digests, "marks": marks is not None, "seed": seed,
                 "vocab": to_dict(replace(vocab, bpe_dropout=0.0, model=given.digest if given else None))}
    return _stage(work, "bpe", made_with, make)


def _learn_words(folder: Path, tasks: list[Any], marks: Path | None, workers: int, vocab: VocabConfig) -> int:
    """Count the words of a sample of the text and learn the BPE from them; how many there are."""
    words = folder / WORDS
    wanted = sum(quota for _, quota, _ in tasks)
    if not words.with_suffix(".json").is_file():
        counts: Counter[bytes] = Counter()
        with closing(Progress("count words", wanted, "lines")) as progress:
            results = ordered(partial(shard.count_words, marks), tasks, workers)
            for (_, quota, _), more in zip(tasks, results, strict=True):
                counts.update(more)
                progress.advance(quota)
        write_words(words, counts)
        del counts
    n_words: int = read_json(words.with_suffix(".json"))["words"]
    say(f"learning a joint BPE of {vocab.size:,} pieces from {n_words:,} words of {wanted:,} lines")
    write_bytes(folder / VOCAB, learn(words, vocab))
    return n_words


def _encode(part: Part, work: Path, texts: list[Text], collected: Stage, bpe: Path, marks: Path | None,
            data: DataConfig, meter: _Meter) -> Stage:
    limit = part.rules.max_pieces if part.rules else None

    def make(folder: Path) -> Json:
        done = finished(folder)
        tasks = [(n, text) for n, text in enumerate(texts) if n not in done]
        total = 2 * sum(text.n_pairs for _, text in tasks)
        with closing(Progress(f"encode {describe(part.corpus)}", total, "lines")) as progress:
            results = ordered(partial(shard.encode, folder, bpe / VOCAB, limit, marks), tasks, data.workers)
            for (_, text), _ in zip(tasks, results, strict=True):
                progress.advance(2 * text.n_pairs)
                meter.n_lines += 2 * text.n_pairs
        return add_up([read_json(shard_file(folder, n, "json")) for n in range(len(texts))])

    made_with = {"text": collected[1]["text"], "bpe": bpe.name, "limit": limit, "marks": marks and str(marks)}
    return _stage(work, f"encode-{part.name}", made_with, make)


# ---- seal -------------------------------------------------------------------------------------------------------

def _account(part: Part, collected: Json, encoded: Json, repeats: dict[str, int]) -> Json:
    """A corpus in the ledger."""
    account = {"corpus": describe(part.corpus), "split": part.split, "repeat": part.corpus.repeat,
               "files": collected["files"], "lines": collected["lines"], "kept": encoded["kept"],
               "tokens": [n * part.corpus.repeat for n in encoded["tokens"]],
               "dropped": collected["dropped"] | encoded["dropped"],
               "samples": collected["samples"] | encoded["samples"]}
    if part.rules:
        account |= {"duplicates": repeats[part.name], "held_out": collected["held_out"]}
    return account


def _seal(store: Path, folder: Path, parts: list[Part], texts: dict[str, list[Text]], encoded: dict[str, Stage],
          vocab: Path, ledger: Json, meter: _Meter) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(vocab, folder / VOCAB)
    for split in dict.fromkeys(part.split for part in parts):
        with closing(SideWriter(folder, split, "src")) as src, closing(SideWriter(folder, split, "tgt")) as tgt:
            for part in parts:
                for _ in range(part.corpus.repeat if part.split == split else 0):
                    for number in range(len(texts[part.name])):
                        with np.load(shard_file(encoded[part.name][0], number, "npz")) as arrays:
                            src.append(arrays["src"], arrays["src_lengths"])
                            tgt.append(arrays["tgt"], arrays["tgt_lengths"])
                            meter.n_lines += 2 * len(arrays["src_lengths"])
    if "valid" in texts:
        lines = [line + b"\n" for text in texts["valid"] for line in text.lines()]
        (folder / "valid.src.txt").write_bytes(b"".join(lines[0::2]))
        (folder / "valid.tgt.txt").write_bytes(b"".join(lines[1::2]))
    ledger["data"] = {file.name: digest(file) for file in sorted(folder.iterdir())}
    ledger["store"] = store_digest(ledger["data"])
    write_json(folder / LEDGER, ledger)
    seal(folder, known=ledger["data"])
    os.rename(folder, store)
    sync(store.parent)
