"""The stages from raw corpora to encoded shards: collect, mark duplicates, learn the BPE, encode.

A stage is a folder of the work folder whose name comes from all that decides its content, and which
is complete once it has a `done.json`. A run that was killed, or whose config has changed since, uses
the stages that are complete and does the others from their beginning.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from nmt.agreement import check_corpus
from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig
from nmt.config_files import to_plain_values
from nmt.corpus.cleaning import HeldOutPairs, Report, find_duplicates
from nmt.corpus.file_formats import count_rows
from nmt.corpus.learn_bpe import BpePart, train_bpe, write_word_counts
from nmt.corpus.ledger import (
    BpeAccount,
    SourceFile,
    TestSetAccount,
    list_versions,
    name_file,
)
from nmt.corpus.reader import Block, Pair, describe_corpus, fetch_files, read_blocks
from nmt.corpus.shards import (
    PAIRS_PER_SHARD,
    Shard,
    ShardCollector,
    ShardEncoder,
    WordSample,
    count_words,
    shard_file,
)
from nmt.corpus.text_files import digest_source
from nmt.score.text_checks import warn_of_traces, warn_of_unrelated
from nmt.system.errors import UserError
from nmt.system.files import (
    digest_file,
    digest_values,
    read_file_stamp,
    remove_entry,
    sync_to_disk,
    write_bytes,
    write_json,
)
from nmt.system.pool import Executor, map_in_order, map_with_workers, run_in_process
from nmt.system.progress import Progress, clock, say, track
from nmt.system.records import Record, read_record
from nmt.system.run_folder import VOCAB_FILE
from nmt.system.strict_json import Fields

FEW_LINES = 200_000  # from whose words a BPE need not be learned in a process of its own
DONE_FILE = "done.json"
WORDS_FILE = "words.tsv"
LAYOUT = 7  # of the files in the work folder: what another layout left is not continued
NOTHING_LEFT = (
    "data.train: no pairs are left after cleaning; check data.clean and the corpora, and that data.valid and "
    "data.test are other text than data.train"
)


@dataclass(frozen=True)
class Preparation:
    """What all stages of one preparation share."""

    work: Path
    data: DataConfig
    vocab: VocabConfig
    seed: int
    executor: Executor

    def run_stage(
        self,
        name: str,
        made_with: Fields,
        kind: type[Record],
        make: Callable[[Path], Record],
    ) -> tuple[Path, Record]:
        """Return the folder that `make` fills, and the result that it returns. It runs only if no
        folder of the same name, `made_with` and versions is complete.
        """
        key = digest_values([LAYOUT, made_with, list_versions()])
        folder = self.work / f"{name}.{key[:16]}"
        if (folder / DONE_FILE).exists():
            with suppress(UserError):  # damaged: it has to be done again
                return folder, read_record(folder / DONE_FILE, kind, remedy="")
        for old in self.work.glob(f"{name}.*"):  # unfinished, or made with other settings
            remove_entry(old)
        folder.mkdir()
        started_at = clock()
        result = make(folder)
        for path in folder.iterdir():
            sync_to_disk(path)
        write_json(folder / DONE_FILE, asdict(result))  # type: ignore[call-overload]
        seconds = clock() - started_at
        if seconds >= 1:
            say(f"stage {name}: {seconds:.1f} s")
        return folder, result


@dataclass(frozen=True)
class Part:
    """One corpus on its way into the store. The dev set has no rules, because it is not cleaned."""

    name: str
    corpus: CorpusConfig
    rules: CleanConfig | None

    @property
    def split(self) -> str:
        return "valid" if self.rules is None else "train"


# ---- collect ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collected:
    """How many lines of a corpus were kept and dropped, and the files that they were read from."""

    report: Report
    files: list[SourceFile]


@dataclass(frozen=True)
class CollectedPart:
    """The cleaned text of a part."""

    part: Part
    folder: Path
    report: Report
    files: list[SourceFile]

    def list_shards(self, duplicates: Path | None) -> list[Shard]:
        """List its shards; `duplicates`, of `mark_duplicates`, has a mask of the pairs to leave out."""
        mask = duplicates and duplicates / f"{self.part.name}.mask"
        shards = []
        first = 0
        for number, n_pairs in enumerate(self.report.kept):
            shards.append(Shard(self.folder, number, first, n_pairs, mask))
            first += n_pairs
        return shards


def collect_part(job: Preparation, part: Part, held_out: HeldOutPairs) -> CollectedPart:
    """Read a corpus, clean it and search it for held-out sentences."""
    files = fetch_files(part.corpus, job.data)
    stamps = [read_file_stamp(path) for path in files]

    def make(folder: Path) -> Collected:
        blocks = read_blocks(part.corpus, job.data, PAIRS_PER_SHARD)
        report = collect_blocks(job, part, held_out, folder, blocks)
        sources = _list_source_files(part.corpus, job.data, files, report.lines)
        for path, stamp in zip(files, stamps, strict=True):
            if read_file_stamp(path) != stamp:
                raise UserError(f"{path}: changed while it was being read; run the command again")
        return Collected(report, sources)

    rules = None
    if part.rules is not None:
        # Settings that only later stages use must not make this one run again.
        rules_here = replace(part.rules, preset=None, duplicates=False, max_pieces=None)
        rules = to_plain_values(rules_here)
    made_with = {
        "corpus": to_plain_values(replace(part.corpus, weight=None, tag=None)),
        "src": job.data.src,
        "tgt": job.data.tgt,
        "files": [[str(path), *stamp] for path, stamp in zip(files, stamps, strict=True)],
        "rules": rules,
        "on_bad_line": job.data.on_bad_line,
        "shard": PAIRS_PER_SHARD,
        "held_out": digest_values(held_out),
    }
    folder, collected = job.run_stage(part.name, made_with, Collected, make)
    return CollectedPart(part, folder, collected.report, collected.files)


def collect_blocks(
    job: Preparation, part: Part, held_out: HeldOutPairs, folder: Path, blocks: Iterable[Block]
) -> Report:
    """Have workers clean blocks, each into a shard of its own."""
    report = Report()
    name = describe_corpus(part.corpus)
    with Progress(f"collect {name}", None, "pairs") as progress:

        def number_blocks() -> Iterator[tuple[int, Block]]:
            for number, block in enumerate(blocks):
                if number == 0:
                    src, tgt = f"{name}, source", f"{name}, target"
                    warn_of_unrelated(src, block.src, tgt, block.tgt)
                    warn_of_traces(src, block.src)
                    warn_of_traces(tgt, block.tgt)
                n_read = (number + 1) * PAIRS_PER_SHARD
                progress.total = int(n_read / max(block.share, 1e-9))  # share: read by now
                yield number, block

        start = partial(ShardCollector, folder, part.rules, held_out)
        for shard_report in map_with_workers(start, number_blocks(), job.executor):
            report.extend(shard_report)
            progress.advance(shard_report.lines)
    return report


def _list_source_files(
    corpus: CorpusConfig, data: DataConfig, files: list[Path], n_lines: int
) -> list[SourceFile]:
    """Describe the files of a corpus of `n_lines` pairs for the ledger."""
    of_each = n_lines if corpus.dataset is None or len(files) == 1 else None
    sources = []
    for path in files:
        rows = count_rows(path)
        lines = of_each if rows is None else rows
        name = name_file(path, data.root)
        sources.append(SourceFile(name, path.stat().st_size, digest_source(path), lines))
    return sources


def gather_held_out(
    job: Preparation, valid: CollectedPart | None
) -> tuple[HeldOutPairs, TestSetAccount | None]:
    """Return the pairs of the dev and test sets, and the account of the test set.

    A test set that cannot be read is left out with a note, unless data.clean.held_out drops pairs
    because of it.
    """
    sets: HeldOutPairs = {}
    test = None
    if valid is not None:
        sets["dev"] = [
            Pair(src.decode(), tgt.decode())
            for shard in valid.list_shards(None)
            for src, tgt in zip(*shard.read(), strict=True)
        ]
    if job.data.test is not None:
        try:
            sets["test"], test = _read_test_set(job.data, job.data.test)
        except UserError as error:
            if job.data.clean.held_out != "keep":
                raise
            say(f"note: the training text is not searched for sentences of the test set: {error}")
    return sets, test


def _read_test_set(data: DataConfig, corpus: CorpusConfig) -> tuple[list[Pair], TestSetAccount]:
    check_corpus("data.test.", corpus, data)
    pairs: list[Pair] = []
    for block in read_blocks(corpus, data, PAIRS_PER_SHARD):
        pairs += map(Pair, block.src, block.tgt)
    sources = _list_source_files(corpus, data, fetch_files(corpus, data), len(pairs))
    return pairs, TestSetAccount(describe_corpus(corpus), len(pairs), sources)


@dataclass(frozen=True)
class Duplicates:
    counts: dict[str, int]  # by training part


def mark_duplicates(
    job: Preparation, train: Sequence[CollectedPart]
) -> tuple[Path, dict[str, int]]:
    """Mark the pairs that equal an earlier one; return a folder with the mask of each part, and its count."""

    def make(folder: Path) -> Duplicates:
        digests = [
            shard_file(each.folder, number, "digests")
            for each in train
            for number in range(len(each.report.kept))
        ]
        is_duplicate = find_duplicates(digests)  # of all parts, one after the other
        counts = {}
        first = 0
        for each in train:
            end = first + each.report.n_kept
            mask = is_duplicate[first:end]
            mask.tofile(folder / f"{each.part.name}.mask")
            counts[each.part.name] = int(mask.sum())
            first = end
        return Duplicates(counts)

    made_with = {"texts": [each.folder.name for each in train]}
    folder, duplicates = job.run_stage("repeats", made_with, Duplicates, make)
    return folder, duplicates.counts


# ---- learn and encode -------------------------------------------------------------------------------------------


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
    """Learn a BPE of all training corpora."""
    shards = [shard for each in train for shard in each.list_shards(duplicates)]
    n_usable = [int((~shard.read_duplicate_mask()).sum()) for shard in shards]
    n_lines = [len(part.sides) * n for n in n_usable]
    n_all = sum(n_lines)
    n_sampled = min(n_all, part.vocab.sample_sentences)
    if n_sampled == 0:
        raise UserError(NOTHING_LEFT)
    given = part.load_given(job.data)
    tags = part.list_tags(job.data)

    def make(folder: Path) -> BpeAccount:
        if given is not None:
            write_bytes(folder / VOCAB_FILE, given.model)
            return BpeAccount(given.digest, given.size, 0, 0, None)
        # Each line is equally likely to be in the sample, whatever shard it is in.
        draw = np.random.Generator(np.random.Philox(job.seed))
        quotas = draw.multivariate_hypergeometric(n_lines, n_sampled, method="marginals").tolist()
        samples = [
            WordSample(shard, part.sides, quota, (job.seed, number))
            for number, (shard, quota) in enumerate(zip(shards, quotas, strict=True))
        ]
        n_words = _count_sample_words(folder / WORDS_FILE, samples, job.executor)
        say(
            f"learning a {part.kind} of {part.vocab.size:,} pieces from {n_words:,} words of {n_sampled:,} lines"
        )
        learn = partial(_learn_from_words, folder, tags)
        if n_sampled <= FEW_LINES:
            learn(part)
        else:  # its memory goes when its process ends
            run_in_process(learn, part)
        seed = job.seed if n_sampled < n_all else None
        sha256 = digest_file(folder / VOCAB_FILE)
        return BpeAccount(sha256, part.vocab.size, n_sampled, n_words, seed)

    made_with = {
        "texts": [each.folder.name for each in train],
        "repeats": duplicates and duplicates.name,
        "seed": job.seed,
        "vocab": given.digest if given else to_plain_values(replace(part.vocab, bpe_dropout=0.0)),
        "tags": None if given else tags,
    }
    folder, account = job.run_stage(part.name, made_with, BpeAccount, make)
    return LearnedBpe(folder, account)


def _count_sample_words(path: Path, samples: list[WordSample], executor: Executor) -> int:
    """Write the words of the samples with their counts; returns the number of different words."""
    counts: Counter[bytes] = Counter()
    counted = map_in_order(count_words, samples, executor)
    for of_shard in track(counted, "count words", "shards", len(samples)):
        counts.update(of_shard)
    return write_word_counts(path, counts)


def _learn_from_words(folder: Path, tags: Sequence[str], part: BpePart) -> None:
    model = train_bpe(folder / WORDS_FILE, part.vocab, tags, f"{part.key}size")
    write_bytes(folder / VOCAB_FILE, model)


@dataclass(frozen=True)
class EncodedPart:
    """The ids of a part, and how many of its pairs were kept and dropped."""

    text: CollectedPart
    folder: Path
    report: Report

    @property
    def files(self) -> list[Path]:
        return [shard_file(self.folder, number, "npz") for number in range(len(self.report.kept))]


def encode_part(
    job: Preparation,
    collected: CollectedPart,
    bpes: Sequence[LearnedBpe],
    duplicates: Path | None,
) -> EncodedPart:
    """Encode a part's text, without duplicates and without pairs that are too long."""
    part = collected.part
    max_pieces = part.rules.max_pieces if part.rules is not None else None

    def make(folder: Path) -> Report:
        report = Report()
        models = [bpe.model for bpe in bpes]
        start = partial(ShardEncoder, folder, models, max_pieces, part.corpus.tag)
        name = f"encode {describe_corpus(part.corpus)}"
        shards = collected.list_shards(duplicates)
        with Progress(name, collected.report.n_kept, "pairs") as progress:
            for shard_report in map_with_workers(start, shards, job.executor):
                report.extend(shard_report)
                progress.advance(shard_report.lines)
        return report

    made_with = {
        "text": collected.folder.name,
        "bpe": [bpe.folder.name for bpe in bpes],
        "max_pieces": max_pieces,
        "tag": part.corpus.tag,
        "repeats": duplicates and duplicates.name,
    }
    folder, report = job.run_stage(f"encode-{part.name}", made_with, Report, make)
    return EncodedPart(collected, folder, report)
