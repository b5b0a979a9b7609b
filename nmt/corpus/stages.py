"""The stages from raw corpora to encoded shards: collect, find repeats, learn the BPE, encode.

A stage works in a folder of `STORE.work/` that is named after all that decides its result, shard by shard, in several
processes; its `done.json` says what came out. So a run that was killed, or whose config has changed since, finds what
still holds and does the rest.
"""

import hashlib
import io
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig, to_dict
from nmt.corpus import shards as shard
from nmt.corpus.cleaning import duplicates
from nmt.corpus.ledger import listed, versions
from nmt.corpus.reader import describe, local_files, n_rows, read_blocks
from nmt.corpus.shards import SHARD, WORDS, Text, add_up, finished, shard_file
from nmt.data.vocab import Vocab, learn, write_words
from nmt.system.errors import UserError
from nmt.system.files import digest, read_json, stamp, write_bytes, write_json
from nmt.system.pool import apart, ordered
from nmt.system.progress import Progress, clock, say
from nmt.system.run_folder import VOCAB_FILE

FEW_LINES = 200_000  # whose words need not be counted in a process of their own
Json = dict[str, Any]


class Meter:
    """How long a stage takes, and how many lines pass in it."""

    def __init__(self) -> None:
        self.began, self.n_lines = clock(), 0

    def tell(self, stage: str) -> None:
        seconds = clock() - self.began
        rate = (
            f", {self.n_lines:,} lines, {self.n_lines / seconds:,.0f}/s"
            if self.n_lines and seconds >= 1
            else ""
        )
        say(f"stage {stage}: {seconds:.1f} s{rate}")
        self.began, self.n_lines = clock(), 0


@dataclass(frozen=True)
class Job:
    """What all stages of one preparation share."""

    work: Path
    data: DataConfig
    vocab: VocabConfig
    seed: int
    meter: Meter

    def stage(self, name: str, made_with: Json, make: Callable[[Path], Json]) -> tuple[Path, Json]:
        """What `make` leaves in its folder, and returns; done once for all that decides it, `made_with`."""
        key = hashlib.sha256(
            json.dumps([made_with, versions()], sort_keys=True).encode()
        ).hexdigest()
        folder = self.work / f"{name}.{key[:16]}"
        if not (folder / "done.json").is_file():
            for other in self.work.glob(f"{name}.{'[0-9a-f]' * 16}"):
                if other != folder:  # of other settings
                    shutil.rmtree(other)
            folder.mkdir(exist_ok=True)
            write_json(folder / "done.json", make(folder))
        return folder, read_json(folder / "done.json")


@dataclass(frozen=True)
class Part:
    """One corpus on its way. The dev set has no rules: it is taken as it is."""

    name: str
    corpus: CorpusConfig
    rules: CleanConfig | None

    @property
    def split(self) -> str:
        return "valid" if self.rules is None else "train"


@dataclass(frozen=True)
class Collected:
    """The cleaned text of a part, and the account of its lines."""

    part: Part
    folder: Path
    account: Json

    def files(self, kind: str) -> list[Path]:
        return [shard_file(self.folder, number, kind) for number in sorted(finished(self.folder))]

    def texts(self, marks: Path | None) -> list[Text]:
        """Its shards; `marks` holds what is not to be used of each part."""
        sizes = [read_json(file)["kept"] for file in self.files("json")]
        firsts = itertools.accumulate(sizes, initial=0)
        own = marks / f"{self.part.name}.npy" if marks and self.part.rules else None
        return [
            Text(file, first, n, own)
            for file, first, n in zip(self.files("txt"), firsts, sizes, strict=False)
        ]


@dataclass(frozen=True)
class Encoded:
    """The ids of a part, and what became of its pairs."""

    folder: Path
    n_shards: int
    account: Json

    def files(self) -> list[Path]:
        return [shard_file(self.folder, number, "npz") for number in range(self.n_shards)]


# ---- collect ----------------------------------------------------------------------------------------------------


def collect(job: Job, part: Part, sets: Path | None) -> Collected:
    """Read a corpus, clean it and hold it against the dev and test `sets`."""
    data, files = job.data, local_files(part.corpus, job.data)
    stamps = [[str(path), *stamp(path)] for path in files]
    rules = part.rules and to_dict(
        replace(part.rules, preset=None, duplicates=False, max_pieces=None)
    )
    made_with = {
        "corpus": to_dict(replace(part.corpus, repeat=1)),
        "src": data.src,
        "tgt": data.tgt,
        "files": stamps,
        "rules": rules,
        "on_bad_line": data.on_bad_line,
        "shard": SHARD,
        "held_out": sets and digest(sets),
    }

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

            for report in ordered(
                partial(shard.collect, folder, part.rules, sets), todo(), data.workers
            ):
                progress.advance(2 * report["lines"])
                job.meter.n_lines += 2 * report["lines"]
        account = add_up([read_json(shard_file(folder, n, "json")) for n in range(n_shards)])
        account["files"] = _accounts(data, files, account["lines"])
        for path, before in zip(files, stamps, strict=True):
            if before[1:] != stamp(path):
                raise UserError(f"{path}: was changed while it was read; run it again")
        return account

    return Collected(part, *job.stage(part.name, made_with, make))


def _accounts(data: DataConfig, files: list[Path], n_lines: int) -> list[Json]:
    """The files of a corpus of so many lines, as the ledger lists them."""
    with ThreadPoolExecutor(data.workers) as threads:
        digests = list(threads.map(digest, files))
    return [
        {
            "name": listed(path, data.root),
            "size": path.stat().st_size,
            "sha256": sha,
            "lines": n_lines if (n := n_rows(path)) is None else n,
        }
        for path, sha in zip(files, digests, strict=True)
    ]


def hold_out(job: Job, valid: Collected | None) -> tuple[Path, Json | None]:
    """The dev and test sets in one file, and the account of the test set, if there is one and it can be had: where it
    decides what is kept, it must."""
    sets: dict[str, list[Any]] = {}
    test = None
    if valid:
        lines = [line.decode() for text in valid.texts(None) for line in text.lines()]
        sets["dev"] = list(zip(lines[0::2], lines[1::2], strict=True))
    if job.data.test:
        try:
            sets["test"] = [
                pair
                for block in read_blocks(job.data.test, job.data, SHARD)
                for pair in zip(block.src, block.tgt, strict=True)
            ]
            files = [] if job.data.test.sacrebleu else local_files(job.data.test, job.data)
            test = {
                "corpus": describe(job.data.test),
                "lines": len(sets["test"]),
                "files": _accounts(job.data, files, len(sets["test"])),
            }
        except UserError as error:
            if job.data.clean.held_out != "keep":
                raise
            say(f"note: the training text is not searched for sentences of the test set: {error}")
    text = json.dumps(sets).encode()
    path = job.work / f"held-out.{hashlib.sha256(text).hexdigest()[:16]}.json"
    write_bytes(path, text)
    return path, test


def find_repeats(job: Job, train: Sequence[Collected]) -> tuple[Path, dict[str, int]]:
    """Which pairs equal an earlier one, in a file for each part, and how many they are."""

    def make(folder: Path) -> Json:
        is_repeat = duplicates([file for each in train for file in each.files("digests")])
        ends = np.cumsum([each.account["kept"] for each in train])
        parts = dict(
            zip([each.part.name for each in train], np.split(is_repeat, ends[:-1]), strict=True)
        )
        for name, part in parts.items():
            data = io.BytesIO()
            np.save(data, part)
            write_bytes(folder / f"{name}.npy", data.getvalue())
        return {name: int(part.sum()) for name, part in parts.items()}

    job.meter.n_lines = sum(2 * each.account["kept"] for each in train)
    return job.stage("repeats", {each.part.name: each.account["text"] for each in train}, make)


# ---- learn and encode -------------------------------------------------------------------------------------------


def learn_bpe(job: Job, train: Sequence[Collected], marks: Path | None) -> tuple[Path, Json]:
    """The joint BPE of both sides of all training corpora, each taken once whatever its `repeat`."""
    texts = [text for each in train for text in each.texts(marks)]
    n_lines = [2 * int((~text.is_marked()).sum()) for text in texts]
    wanted = min(sum(n_lines), job.vocab.sample_sentences)
    if not wanted:
        raise UserError(
            "data.train: no pair is left after cleaning; look at data.clean and at the corpora"
        )
    given = given_model(job.data, job.vocab)

    def make(folder: Path) -> Json:
        if given is not None:
            write_bytes(folder / VOCAB_FILE, given.model)
            return {
                "sha256": given.digest,
                "pieces": given.size,
                "lines": 0,
                "words": 0,
                "seed": None,
            }
        draw = np.random.Generator(
            np.random.Philox(job.seed)
        )  # each line is equally likely to be among them
        quotas = draw.multivariate_hypergeometric(n_lines, wanted, method="marginals").tolist()
        tasks = [
            (text, quota, (job.seed, i))
            for i, (text, quota) in enumerate(zip(texts, quotas, strict=True))
        ]
        learning = partial(_learn_words, folder, tasks, job.data.workers)
        n_words = learning(job.vocab) if wanted <= FEW_LINES else apart(learning, job.vocab)
        job.meter.n_lines += wanted
        return {
            "sha256": digest(folder / VOCAB_FILE),
            "pieces": job.vocab.size,
            "lines": wanted,
            "words": n_words,
            "seed": job.seed if wanted < sum(n_lines) else None,
        }

    made_with = {
        "texts": [each.account["text"] for each in train],
        "marks": marks and marks.name,
        "seed": job.seed,
        "vocab": given.digest if given else to_dict(replace(job.vocab, bpe_dropout=0.0)),
    }
    return job.stage("bpe", made_with, make)


def given_model(data: DataConfig, vocab: VocabConfig) -> Vocab | None:
    if vocab.model is None:
        return None
    try:
        model = Vocab.load(Path(data.root) / vocab.model)
    except UserError as error:
        raise UserError(
            f"vocab.model: {error}; relative paths start from data.root={data.root}"
        ) from None
    if model.size > 2**16:
        raise UserError(
            f"vocab.model: {vocab.model} has {model.size:,} pieces, but ids are stored in 16 bits"
        )
    return model


def _learn_words(folder: Path, tasks: list[Any], workers: int, vocab: VocabConfig) -> int:
    """Count the words of a sample of the text and learn the BPE from them; how many there are."""
    words = folder / WORDS
    wanted = sum(quota for _, quota, _ in tasks)
    if not words.with_suffix(".json").is_file():
        counts: Counter[bytes] = Counter()
        with closing(Progress("count words", wanted, "lines")) as progress:
            for (_, quota, _), more in zip(
                tasks, ordered(shard.count_words, tasks, workers), strict=True
            ):
                counts.update(more)
                progress.advance(quota)
        write_words(words, counts)
        del counts
    n_words: int = read_json(words.with_suffix(".json"))["words"]
    say(f"learning a joint BPE of {vocab.size:,} pieces from {n_words:,} words of {wanted:,} lines")
    write_bytes(folder / VOCAB_FILE, learn(words, vocab))
    return n_words


def encode(job: Job, collected: Collected, bpe: Path, marks: Path | None) -> Encoded:
    """The ids of a part's text, without what is marked or too long."""
    part, texts = collected.part, collected.texts(marks)
    limit = part.rules.max_pieces if part.rules else None

    def make(folder: Path) -> Json:
        done = finished(folder)
        tasks = [(n, text) for n, text in enumerate(texts) if n not in done]
        total = 2 * sum(text.n_pairs for _, text in tasks)
        with closing(Progress(f"encode {describe(part.corpus)}", total, "lines")) as progress:
            results = ordered(
                partial(shard.encode, folder, bpe / VOCAB_FILE, limit), tasks, job.data.workers
            )
            for (_, text), _ in zip(tasks, results, strict=True):
                progress.advance(2 * text.n_pairs)
                job.meter.n_lines += 2 * text.n_pairs
        return add_up([read_json(shard_file(folder, n, "json")) for n in range(len(texts))])

    made_with = {
        "text": collected.account["text"],
        "bpe": bpe.name,
        "limit": limit,
        "marks": marks and marks.name,
    }
    folder, account = job.stage(f"encode-{part.name}", made_with, make)
    return Encoded(folder, len(texts), account)
