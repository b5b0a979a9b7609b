"""The stages from raw corpora to encoded shards: collect, mark duplicates, learn the BPE, encode.

A stage works in a folder of `STORE.work/` whose name comes from all that decides its result, shard
by shard, in several processes; its `done.json` holds the result. So a run that was killed, or whose
config has changed since, finds what is still valid and does the rest.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig, to_plain_values
from nmt.corpus.cleaning import find_duplicates
from nmt.corpus.file_formats import count_rows
from nmt.corpus.ledger import (
    BpeAccount,
    SourceFile,
    TestSetAccount,
    digest_source,
    list_versions,
    name_file,
)
from nmt.corpus.reader import Block, Pair, describe_corpus, find_local_files, read_blocks
from nmt.corpus.shards import (
    DAMAGED,
    PAIRS_PER_SHARD,
    SIDES,
    WORDS,
    CollectReport,
    EncodeReport,
    ShardCollector,
    ShardEncoder,
    ShardText,
    WordSample,
    add_collect_reports,
    add_encode_reports,
    check_whole,
    count_words,
    find_finished_shards,
    read_work,
    shard_file,
)
from nmt.data.vocab import Vocab, read_word_totals, train_bpe, write_word_counts
from nmt.system.errors import UserError
from nmt.system.files import (
    check_own_folder,
    digest_file,
    has_plain_file,
    read_file_stamp,
    remove_entry,
    write_bytes,
    write_json,
)
from nmt.system.pool import map_in_order, map_with_workers, run_in_process
from nmt.system.progress import Progress, clock, say
from nmt.system.run_folder import VOCAB_FILE

FEW_LINES = 200_000  # whose words need not be counted in a process of their own
DONE_FILE = "done.json"
LAYOUT = 4  # of the files in the work folder: what another layout left is not continued
NOTHING_LEFT = "data.train: no pairs are left after cleaning; check data.clean and the corpora"
Json = dict[str, Any]


class StageClock:
    """Reports how long each stage took and how many pairs a second passed through it."""

    def __init__(self) -> None:
        self.started_at = clock()
        self.n_done = 0

    def finish(self, stage: str, unit: str = "pairs") -> None:
        seconds = clock() - self.started_at
        rate = ""
        if self.n_done and seconds >= 1:
            rate = f", {self.n_done:,} {unit}, {self.n_done / seconds:,.0f}/s"
        say(f"stage {stage}: {seconds:.1f} s{rate}")
        self.started_at = clock()
        self.n_done = 0


@dataclass(frozen=True)
class Preparation:
    """What all stages of one preparation share."""

    work: Path
    data: DataConfig
    vocab: VocabConfig
    seed: int
    clock: StageClock

    def run_stage(self, name: str, made_with: Json, make: Callable[[Path], Json]) -> Path:
        """Return the folder that `make` fills, and in which DONE_FILE has the plain values that it
        returns; run once for equal `made_with`.
        """
        deciding = [LAYOUT, made_with, list_versions()]
        key = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
        folder = self.work / f"{name}.{key[:16]}"
        done = folder / DONE_FILE
        check_own_folder(folder, inside=self.work)
        if not has_plain_file(done):
            for other in self.work.glob(f"{name}.{'[0-9a-f]' * 16}"):
                if other != folder:  # made with other settings
                    remove_entry(other)
            folder.mkdir(exist_ok=True)
            write_json(done, make(folder))
        return folder


@dataclass(frozen=True)
class Part:
    """One corpus on its way into the store. The dev set has no rules: it is taken as it is."""

    name: str
    corpus: CorpusConfig
    rules: CleanConfig | None

    @property
    def split(self) -> str:
        return "valid" if self.rules is None else "train"


@dataclass(frozen=True)
class CollectResult:
    """What the stage that collects a part returns."""

    report: CollectReport
    files: list[SourceFile]


@dataclass(frozen=True)
class CollectedPart:
    """The cleaned text of a part, and what became of its lines."""

    part: Part
    folder: Path
    report: CollectReport
    files: list[SourceFile]

    def shard_files(self, kind: str) -> list[Path]:
        numbers = range(len(self.report.text) // len(SIDES))
        return [shard_file(self.folder, number, kind) for number in numbers]

    def texts(self, duplicates: Path | None) -> list[ShardText]:
        """Return its shards. The folder `duplicates` holds for each training part a mask of the
        pairs to leave out.
        """
        mask = None
        if duplicates is not None and self.part.split == "train":
            mask = duplicates / f"{self.part.name}.mask"
        texts = []
        first = 0
        for number, file in enumerate(self.shard_files("json")):
            report = read_work(file, CollectReport)
            texts.append(
                ShardText(self.folder, number, first, report.kept, tuple(report.text), mask)
            )
            first += report.kept
        if first != self.report.kept:
            raise UserError(f"{self.folder}: {DAMAGED}")
        return texts


@dataclass(frozen=True)
class EncodedPart:
    """The ids of a part, and what became of its pairs."""

    folder: Path
    n_shards: int
    report: EncodeReport

    @property
    def files(self) -> list[Path]:
        return [shard_file(self.folder, number, "npz") for number in range(self.n_shards)]


# ---- collect ----------------------------------------------------------------------------------------------------


def collect_part(job: Preparation, part: Part, held_out: Path | None) -> CollectedPart:
    """Read a corpus, clean it and search it for the sentences of the file `held_out`."""
    files = find_local_files(part.corpus, job.data)
    stamps = [read_file_stamp(path) for path in files]

    def make(folder: Path) -> Json:
        n_shards = _collect_shards(job, part, held_out, folder)
        files_of_reports = [shard_file(folder, number, "json") for number in range(n_shards)]
        reports = [read_work(file, CollectReport) for file in files_of_reports]
        report = add_collect_reports(reports)
        sources = _list_source_files(job.data, files, report.lines)
        for path, before in zip(files, stamps, strict=True):
            if read_file_stamp(path) != before:
                raise UserError(f"{path}: changed while it was being read; run the command again")
        return asdict(CollectResult(report, sources))

    rules = None
    if part.rules is not None:
        # What only later stages apply must not make this one run again.
        rules_here = replace(part.rules, preset=None, duplicates=False, max_pieces=None)
        rules = to_plain_values(rules_here)
    made_with = {
        "corpus": to_plain_values(replace(part.corpus, repeat=1, weight=None, tag=None)),
        "src": job.data.src,
        "tgt": job.data.tgt,
        "files": [[str(path), *before] for path, before in zip(files, stamps, strict=True)],
        "rules": rules,
        "on_bad_line": job.data.on_bad_line,
        "shard": PAIRS_PER_SHARD,
        "held_out": held_out and digest_file(held_out),
    }
    folder = job.run_stage(part.name, made_with, make)
    result = read_work(folder / DONE_FILE, CollectResult)
    return CollectedPart(part, folder, result.report, result.files)


def _collect_shards(job: Preparation, part: Part, held_out: Path | None, folder: Path) -> int:
    """Make the shards that no earlier run has finished; returns how many there are in all."""
    finished = find_finished_shards(folder)
    # Workers finish shards in any order. Those before the first gap need not even be read.
    first = 0
    while first in finished:
        first += 1
    n_shards = first
    with closing(Progress(f"collect {describe_corpus(part.corpus)}", None, "pairs")) as progress:

        def read_unfinished_blocks() -> Iterator[tuple[int, Block]]:
            nonlocal n_shards
            for block in read_blocks(part.corpus, job.data, PAIRS_PER_SHARD, skip=first):
                number = n_shards
                n_shards += 1
                n_read = (n_shards - first) * PAIRS_PER_SHARD
                progress.expect(int(n_read / max(block.share, 1e-9)))
                if number not in finished:
                    yield number, block

        start = partial(ShardCollector, folder, part.rules, held_out, part.corpus.min_score)
        for report in map_with_workers(start, read_unfinished_blocks(), job.data.workers):
            progress.advance(report.lines)
            job.clock.n_done += report.lines
    return n_shards


def _list_source_files(data: DataConfig, files: list[Path], n_lines: int) -> list[SourceFile]:
    """The files of a corpus of `n_lines` pairs, for the ledger."""
    with ThreadPoolExecutor(data.workers) as threads:
        digests = list(threads.map(digest_source, files))
    sources = []
    for path, sha256 in zip(files, digests, strict=True):
        rows = count_rows(path)  # a dataset may consist of several tables
        lines = n_lines if rows is None else rows
        sources.append(SourceFile(name_file(path, data.root), path.stat().st_size, sha256, lines))
    return sources


def gather_held_out(
    job: Preparation, valid: CollectedPart | None
) -> tuple[Path, TestSetAccount | None]:
    """Write the dev and test sets into one file; returns it and the account of the test set.

    A test set that cannot be read is left out with a note, unless data.clean.held_out drops pairs
    because of it.
    """
    sets: dict[str, list[Pair]] = {}
    test = None
    if valid is not None:
        sets["dev"] = []
        for text in valid.texts(None):
            for src, tgt in zip(*text.read(), strict=True):
                sets["dev"].append(Pair(src.decode(), tgt.decode()))
    if job.data.test is not None:
        try:
            sets["test"], test = _read_test_set(job.data, job.data.test)
        except UserError as error:
            if job.data.clean.held_out != "keep":
                raise
            say(f"note: the training text is not searched for sentences of the test set: {error}")
    content = json.dumps(sets).encode()
    path = job.work / f"held-out.{hashlib.sha256(content).hexdigest()[:16]}.json"
    write_bytes(path, content)
    return path, test


def _read_test_set(data: DataConfig, corpus: CorpusConfig) -> tuple[list[Pair], TestSetAccount]:
    pairs: list[Pair] = []
    for block in read_blocks(corpus, data, PAIRS_PER_SHARD):
        pairs += map(Pair, block.src, block.tgt)
    files = [] if corpus.sacrebleu else find_local_files(corpus, data)
    sources = _list_source_files(data, files, len(pairs))
    return pairs, TestSetAccount(describe_corpus(corpus), len(pairs), sources)


@dataclass(frozen=True)
class DuplicateCounts:
    """By training part."""

    n_duplicates: dict[str, int]
    sha256: dict[str, str]  # of the masks


def mark_duplicates(
    job: Preparation, train: Sequence[CollectedPart]
) -> tuple[Path, dict[str, int]]:
    """Mark the pairs that equal an earlier one; return a folder with a mask for each part, and how
    many each part has.
    """

    def make(folder: Path) -> Json:
        digests: list[Path] = []
        for each in train:
            files = each.shard_files("digests")
            for file, sha256 in zip(files, each.report.digests, strict=True):
                check_whole(file, sha256)
            digests += files
        is_duplicate = find_duplicates(digests)
        counts = DuplicateCounts({}, {})
        first = 0
        for each in train:
            mask = is_duplicate[first : first + each.report.kept]
            first += each.report.kept
            content = mask.tobytes()
            write_bytes(folder / f"{each.part.name}.mask", content)
            counts.n_duplicates[each.part.name] = int(mask.sum())
            counts.sha256[each.part.name] = hashlib.sha256(content).hexdigest()
        return asdict(counts)

    job.clock.n_done = sum(each.report.kept for each in train)
    made_with = {each.part.name: each.report.text for each in train}
    folder = job.run_stage("repeats", made_with, make)
    counts = read_work(folder / DONE_FILE, DuplicateCounts)
    for each in train:
        name = each.part.name
        check_whole(folder / f"{name}.mask", counts.sha256.get(name, ""))
    return folder, counts.n_duplicates


# ---- learn and encode -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BpePart:
    """A BPE to learn: the joint one, or that of one side."""

    name: str
    sides: tuple[int, ...]  # 0: the source, 1: the target
    key: str  # how its keys begin
    vocab: VocabConfig  # with its own size and model

    @property
    def has_source(self) -> bool:
        return 0 in self.sides

    def load_given(self, data: DataConfig) -> Vocab | None:
        """Load the model that the config names, if it names one, and give it the symbols and, for the
        source, the tags of training text that it lacks. The source's must then have all tags.
        """
        if self.vocab.model is None:
            return None
        try:
            # The user names this file, so it may be a link, such as those of the Hugging Face cache.
            given = Vocab.load((Path(data.root) / self.vocab.model).resolve())
        except UserError as error:
            raise UserError(
                f"{self.key}model: {error}; relative paths start from data.root={data.root}"
            ) from None
        tags = data.train_tags if self.has_source else []
        try:
            given = given.with_symbols(tags, self.vocab.user_symbols or ())
            for corpus in (*data.train, data.valid, data.test):
                if corpus is not None and corpus.tag is not None and self.has_source:
                    given.find_symbol(corpus.tag)
        except UserError as error:
            raise UserError(f"{self.key}model={self.vocab.model}: {error}") from None
        return given


def list_bpe_parts(vocab: VocabConfig) -> list[BpePart]:
    if vocab.joint:
        return [BpePart("bpe", (0, 1), "vocab.", vocab)]
    tgt = replace(vocab, size=vocab.sizes[1], model=vocab.tgt_model)
    return [BpePart("bpe-src", (0,), "vocab.", vocab), BpePart("bpe-tgt", (1,), "vocab.tgt_", tgt)]


@dataclass(frozen=True)
class LearnedBpe:
    folder: Path
    account: BpeAccount

    @property
    def model(self) -> Path:
        return self.folder / VOCAB_FILE


def learn_bpe(
    job: Preparation, part: BpePart, train: Sequence[CollectedPart], duplicates: Path | None
) -> LearnedBpe:
    """Learn a BPE of all training corpora, each taken once whatever its `repeat`."""
    texts: list[ShardText] = []
    for each in train:
        texts += each.texts(duplicates)
    n_lines = []
    for text in texts:
        n_usable = int((~text.read_duplicate_mask()).sum())
        n_lines.append(len(part.sides) * n_usable)
    n_sampled = min(sum(n_lines), part.vocab.sample_sentences)
    if n_sampled == 0:
        raise UserError(NOTHING_LEFT)
    given = part.load_given(job.data)
    tags = job.data.train_tags if part.has_source else []

    def make(folder: Path) -> Json:
        if given is not None:
            write_bytes(folder / VOCAB_FILE, given.model)
            return asdict(BpeAccount(given.digest, given.size, 0, 0, None))
        # Each line is equally likely to be in the sample, whatever shard it is in.
        draw = np.random.Generator(np.random.Philox(job.seed))
        quotas = draw.multivariate_hypergeometric(n_lines, n_sampled, method="marginals").tolist()
        samples = []
        for number, (text, quota) in enumerate(zip(texts, quotas, strict=True)):
            samples.append(WordSample(text, part.sides, quota, (job.seed, number)))
        learn_from = partial(_learn_from_samples, folder, samples, job.data.workers, tags)
        if n_sampled <= FEW_LINES:
            n_words = learn_from(part)
        else:  # its memory goes when its process ends
            n_words = run_in_process(learn_from, part)
        job.clock.n_done += n_sampled
        seed = job.seed if n_sampled < sum(n_lines) else None
        sha256 = digest_file(folder / VOCAB_FILE)
        return asdict(BpeAccount(sha256, part.vocab.size, n_sampled, n_words, seed))

    made_with = {
        "texts": [each.report.text for each in train],
        "repeats": duplicates and duplicates.name,
        "seed": job.seed,
        "vocab": given.digest if given else to_plain_values(replace(part.vocab, bpe_dropout=0.0)),
        "tags": None if given else tags,
    }
    folder = job.run_stage(part.name, made_with, make)
    learned = LearnedBpe(folder, read_work(folder / DONE_FILE, BpeAccount))
    check_whole(learned.model, learned.account.sha256)
    return learned


def _learn_from_samples(
    folder: Path, samples: list[WordSample], workers: int, tags: Sequence[str], part: BpePart
) -> int:
    """Count the words of the samples and learn the BPE from them; returns the number of different
    words.
    """
    words = folder / WORDS
    n_lines = sum(sample.n_lines for sample in samples)
    if not has_plain_file(words.with_suffix(".json")):
        counts: Counter[bytes] = Counter()
        with closing(Progress("count words", n_lines, "lines")) as progress:
            counted = map_in_order(count_words, samples, workers)
            for sample, sample_counts in zip(samples, counted, strict=True):
                counts.update(sample_counts)
                progress.advance(sample.n_lines)
        write_word_counts(words, counts)
        del counts  # before SentencePiece needs the memory
    n_words = read_word_totals(words).words
    kind = "joint BPE" if part.vocab.joint else f"BPE of the {('source', 'target')[part.sides[0]]}"
    vocab = part.vocab
    say(f"learning a {kind} of {vocab.size:,} pieces from {n_words:,} words of {n_lines:,} lines")
    write_bytes(folder / VOCAB_FILE, train_bpe(words, vocab, tags, f"{part.key}size"))
    return n_words


def encode_part(
    job: Preparation,
    collected: CollectedPart,
    bpes: Sequence[LearnedBpe],
    duplicates: Path | None,
) -> EncodedPart:
    """Encode a part's text, without duplicates and without pairs that are too long."""
    part = collected.part
    texts = collected.texts(duplicates)
    max_pieces = part.rules.max_pieces if part.rules is not None else None

    def make(folder: Path) -> Json:
        finished = find_finished_shards(folder)
        tasks = [(text.number, text) for text in texts if text.number not in finished]
        total = sum(text.n_pairs for _, text in tasks)
        models = [bpe.model for bpe in bpes]
        start = partial(ShardEncoder, folder, models, max_pieces, part.corpus.tag)
        bar = Progress(f"encode {describe_corpus(part.corpus)}", total, "pairs")
        with closing(bar) as progress:
            encoded = map_with_workers(start, tasks, job.data.workers)
            for (_, text), _ in zip(tasks, encoded, strict=True):
                progress.advance(text.n_pairs)
                job.clock.n_done += text.n_pairs
        files = [shard_file(folder, number, "json") for number in range(len(texts))]
        reports = [read_work(file, EncodeReport) for file in files]
        return asdict(add_encode_reports(reports))

    made_with = {
        "text": collected.report.text,
        "bpe": [bpe.folder.name for bpe in bpes],
        "max_pieces": max_pieces,
        "tag": part.corpus.tag,
        "repeats": duplicates and duplicates.name,
    }
    folder = job.run_stage(f"encode-{part.name}", made_with, make)
    report = read_work(folder / DONE_FILE, EncodeReport)
    return EncodedPart(folder, len(texts), report)
